"""Encryption at rest: a wrapper around any tier that seals payloads with AES-GCM before they leave this process.

The wrapped tier stores a sealed payload in its frame. The ciphertext comes first, so that it is page aligned if the
payload was:

    ciphertext (payload_bytes) | tag (16) | nonce (12) | key check (4)

The namespace digest, the block's key and the payload's size are authenticated with it. So a block under another name,
of another engine layout, or written without the key does not open, even if its checksums are right. Names, sizes and
times stay visible to all readers of the store.

One key per namespace is derived from the master key (HKDF-SHA256, salted with the namespace digest). Nonces are random:
with 2**32 blocks written under one namespace the chance that two share a nonce is below 2**-32 (NIST SP 800-38D, 8.3);
at 1000 blocks per second that is 49 days, after which a new key id starts over. Needs the package `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from typing_extensions import override

from spillway_connector.errors import ConfigError, CorruptReason, TierCorrupt
from spillway_connector.namespace import NAMESPACE_DIGEST_BYTES, Namespace
from spillway_connector.plan.sessions import SessionUse
from spillway_connector.tiers.buffers import transfer_buffer
from spillway_connector.tiers.tier import (
    NO_TENANT,
    BilledTier,
    BlockInMemory,
    PeekableTier,
    ReceivingTier,
    SessionTier,
    StoreOutcome,
    Tier,
    WrappedTier,
)

TAG_BYTES = 16
NONCE_BYTES = 12
CHECK_BYTES = 4
SEAL_BYTES = TAG_BYTES + NONCE_BYTES + CHECK_BYTES
PAYLOAD_BYTES_MAX = 2**31 - 1 - SEAL_BYTES  # of one AES-GCM call in OpenSSL
KEY_FILE_BYTES_MAX = 4096
_KEY_BYTES = (16, 32)


@dataclass(frozen=True, slots=True)
class SealKey:
    """A master key of 16 (AES-128) or 32 bytes (AES-256). ``key_id``: its public name; each id has its own store."""

    key_id: str
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, key_id: str, text: str, where: str) -> SealKey:
        """Parse a key in hex or base64. ``where``: its origin, for the message. Raises ConfigError."""
        if not key_id or not key_id.isascii() or not key_id.isprintable():
            raise ConfigError(f"encryption.keyId: {key_id!r} is not a name; use letters, digits and dashes")
        compact = "".join(text.split())
        for decode in (bytes.fromhex, lambda given: base64.b64decode(given, validate=True)):
            try:
                secret = decode(compact)
            except (ValueError, binascii.Error):
                continue
            if len(secret) in _KEY_BYTES:
                return cls(key_id, secret)
        raise ConfigError(
            f"{where}: holds no key of 16 or 32 bytes in hex or base64 ({len(compact)} characters given); "
            "make one with: openssl rand -hex 32"
        )

    @classmethod
    def from_file(cls, key_id: str, path: Path) -> SealKey:
        """Read the key from a file. Raises ConfigError if the file cannot be read or holds no key."""
        try:
            with path.open("rb") as file:
                text = file.read(KEY_FILE_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"encryption.keyFile: {path} cannot be read as text; make it readable, in hex or base64: {error}"
            ) from error
        return cls.parse(key_id, text, f"encryption.keyFile {path}")

    @classmethod
    def from_environment(cls, key_id: str, variable: str) -> SealKey:
        """Read the key from a variable. Raises ConfigError if the variable is not set or holds no key."""
        if variable not in os.environ:
            raise ConfigError(f"encryption.keyEnv: the environment variable {variable} is not set")
        return cls.parse(key_id, os.environ[variable], f"encryption.keyEnv {variable}")

    @property
    def cipher(self) -> str:
        return f"AES-{len(self.secret) * 8}-GCM"

    def derive(self, salt: bytes, purpose: bytes, size: int) -> bytes:
        """Derive a namespace's key: HKDF-SHA256 of the master key."""
        return HKDF(algorithm=SHA256(), length=size, salt=salt, info=b"spillway " + purpose).derive(self.secret)


@dataclass(frozen=True, slots=True)
class SealedNamespace(Namespace):
    """A namespace whose blocks are sealed.

    Cipher and key id change its digest: another key id is another store, and rotating a key means giving it a new id.
    The key check is in the document but not in the digest, so the wrong key under a known id meets the document of the
    right one and is refused.
    """

    identity: bytes  # the document without the key check

    @property
    @override
    def digest16(self) -> bytes:
        return blake3(self.identity).digest(length=NAMESPACE_DIGEST_BYTES)

    @override
    def may_own(self, document: bytes) -> bool:
        """Whether the document may be this namespace's. One of another key under the same id may: it is no damage."""
        try:
            facts = json.loads(document)
            del facts["codec"]["key_check"]
            return Namespace.of(facts).document == self.identity
        except (ValueError, KeyError, TypeError, ConfigError):
            return False


def sealed_namespace(namespace: Namespace, key: SealKey) -> SealedNamespace:
    """Return the namespace of the same blocks, sealed with ``key``, for the tier that SealedTier wraps."""
    facts = json.loads(namespace.document)
    codec = {"cipher": key.cipher, "key_id": key.key_id}
    identity = Namespace.of({**facts, "codec": codec})
    check = key.derive(identity.digest16, b"key check", 8).hex()
    document = Namespace.of({**facts, "codec": {**codec, "key_check": check}}).document
    return SealedNamespace(document, identity.document)


class PayloadSeal:
    """Seals and opens payloads of ``payload_bytes`` in one namespace. Safe from several threads; releases the GIL."""

    def __init__(self, namespace: SealedNamespace, payload_bytes: int, key: SealKey) -> None:
        digest = namespace.digest16
        self._cipher = AESGCM(key.derive(digest, b"blocks", len(key.secret)))
        self._key_check = key.derive(digest, b"key check", 8)[:CHECK_BYTES]
        self._context = b"spillway sealed block 1" + digest + payload_bytes.to_bytes(8, "little")
        self._tagged_bytes = payload_bytes + TAG_BYTES

    def seal(self, key: bytes, source: memoryview, sealed: memoryview) -> None:
        """Encrypt the payload of ``key`` from ``source`` into ``sealed``, which is SEAL_BYTES longer."""
        nonce = os.urandom(NONCE_BYTES)
        self._cipher.encrypt_into(nonce, source, self._context + key, sealed[: self._tagged_bytes])
        sealed[self._tagged_bytes :] = nonce + self._key_check

    def open(self, key: bytes, sealed: memoryview, target: memoryview) -> None:
        """Decrypt the payload of ``key`` into ``target``. Raises TierCorrupt(SEAL); ``target`` is then undefined."""
        tagged_bytes = self._tagged_bytes
        if sealed[tagged_bytes + NONCE_BYTES :] != self._key_check:
            raise TierCorrupt(CorruptReason.SEAL, "the block is sealed with another key")
        nonce = sealed[tagged_bytes : tagged_bytes + NONCE_BYTES]
        try:
            self._cipher.decrypt_into(nonce, sealed[:tagged_bytes], self._context + key, target)
        except InvalidTag:
            raise TierCorrupt(CorruptReason.SEAL, "the block does not open: it was changed, moved or forged") from None


class SealedTier(WrappedTier):
    """Seals payloads before they are stored in ``tier`` and opens them after loading. See tier.Tier for the contract.

    tier: opened for ``namespace`` with ``payload_bytes + SEAL_BYTES``; closed with this one.
    Each operation needs a buffer of that size; as many are kept as operations ever ran concurrently.
    """

    def __init__(self, tier: Tier, namespace: SealedNamespace, payload_bytes: int, key: SealKey) -> None:
        if tier.payload_bytes != payload_bytes + SEAL_BYTES:
            raise ValueError(f"payload_bytes: the tier has {tier.payload_bytes}, {payload_bytes} + {SEAL_BYTES} needed")
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise ConfigError(
                f"encryption: a block of {payload_bytes} bytes cannot be sealed, at most {PAYLOAD_BYTES_MAX}; "
                "lower blocks_per_chunk"
            )
        super().__init__(tier, payload_bytes)
        self._seal = PayloadSeal(namespace, payload_bytes, key)
        self._buffers: list[memoryview] = []
        self._buffers_lock = threading.Lock()

    @property
    def received_bytes(self) -> int | None:
        """See tier.ReceivingTier; None if the wrapped tier is none."""
        return self.tier.received_bytes if isinstance(self.tier, ReceivingTier) else None

    @property
    def requests(self) -> Mapping[str, int]:
        """See tier.BilledTier; none if the wrapped tier is none."""
        return self.tier.requests if isinstance(self.tier, BilledTier) else {}

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._load(self.tier.load, key, target, deadline)

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        """See tier.PeekableTier; a load if the wrapped tier is none."""
        self._load(self.tier.peek if isinstance(self.tier, PeekableTier) else self.tier.load, key, target, deadline)

    def _load(
        self, load: Callable[[bytes, memoryview, float], None], key: bytes, target: memoryview, deadline: float
    ) -> None:
        with self._buffer() as buffer:
            load(key, buffer, deadline)
            self._seal.open(key, buffer, target)

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        sealed = self.tier.in_memory(key, deadline)
        return None if sealed is None else BlockInMemory(partial(self._copy_opened, key, sealed))

    def _copy_opened(self, key: bytes, sealed: BlockInMemory, target: memoryview) -> bool:
        try:
            with self._buffer() as buffer:
                if not sealed.copy_to(buffer):
                    return False
                self._seal.open(key, buffer, target)
        except TierCorrupt:
            return False
        return True

    @staticmethod
    def of(tier: Tier, namespace: SealedNamespace, payload_bytes: int, key: SealKey) -> SealedTier:
        """Wrap ``tier`` as the constructor does; the result follows sessions if ``tier`` does."""
        kind = SealedSessionTier if isinstance(tier, SessionTier) else SealedTier
        return kind(tier, namespace, payload_bytes, key)

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        with self._buffer() as buffer:
            self._seal.seal(key, source, buffer)
            return self.tier.store(key, buffer, deadline, tenant)

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """Lend a buffer for one sealed payload, and keep it for the next operation."""
        with self._buffers_lock:
            buffer = self._buffers.pop() if self._buffers else None
        if buffer is None:
            buffer = transfer_buffer(self.payload_bytes + SEAL_BYTES)
        try:
            yield buffer
        finally:
            with self._buffers_lock:
                self._buffers.append(buffer)


class SealedSessionTier(SealedTier):
    """A sealed tier that follows sessions. Keys and sessions are not sealed."""

    def use_session(self, use: SessionUse) -> None:
        self._session_tier.use_session(use)

    def store_of_session(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, session: bytes, *, own_room: bool
    ) -> StoreOutcome:
        with self._buffer() as buffer:
            self._seal.seal(key, source, buffer)
            return self._session_tier.store_of_session(key, buffer, deadline, tenant, session, own_room=own_room)

    @property
    def _session_tier(self) -> SessionTier:
        assert isinstance(self.tier, SessionTier)
        return self.tier
