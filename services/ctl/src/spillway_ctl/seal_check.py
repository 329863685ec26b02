"""Opening the seals of encrypted frames with the operator's copy of the key. Needs the package `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spillway_connector.errors import TierCorrupt
from spillway_connector.tiers.inspection import Damage, StoredFrame, StoredNamespace, identity_of
from spillway_connector.tiers.sealed import SEAL_BYTES, SealedNamespace, SealedTier, SealKey
from spillway_connector.tiers.tier import NO_TENANT, StoreOutcome
from spillway_ctl.errors import CommandError


class SealCheck:
    """Opens payloads of the namespaces whose key it has; others pass. A inspection.CheckPayload."""

    def __init__(self, namespaces: Sequence[StoredNamespace], key_file: Path | None, key_env: str | None) -> None:
        """Raises ConfigError where there is no key to be had, CommandError where it is no namespace's key."""
        self.opens: set[bytes] = set()
        self._keys: dict[bytes, tuple[SealedNamespace, SealKey]] = {}
        self._tiers: dict[tuple[bytes, int], tuple[SealedTier, _OneFrame]] = {}
        self._opened = memoryview(b"")
        mismatches = []
        for namespace in namespaces:
            codec, facts = namespace.codec, namespace.facts
            if codec is None or facts is None:
                continue
            key_id = str(codec.get("key_id"))
            if key_file is not None:
                key = SealKey.from_file(key_id, key_file)
            else:
                assert key_env is not None
                key = SealKey.from_environment(key_id, key_env)
            sealed = SealedNamespace(namespace.document or b"", identity_of(facts).document)
            if key.derive(sealed.digest16, b"key check", 8).hex() != codec.get("key_check"):
                mismatches.append(key_id)
                continue
            self._keys[namespace.digest] = sealed, key
            self.opens.add(namespace.digest)
        if not self.opens and mismatches:
            raise CommandError(
                f"the encryption key opens none of the encrypted namespaces (their key ids: "
                f"{', '.join(sorted(set(mismatches)))}); give the key of one of these ids"
            )
        if not self.opens:
            raise CommandError("an encryption key was given, but nothing here is encrypted; leave the key out")

    def __call__(self, frame: StoredFrame, payload: memoryview) -> Damage | None:
        if frame.namespace not in self._keys or frame.key is None:
            return None
        size = payload.nbytes - SEAL_BYTES
        if size < 0:
            return Damage("seal", f"{payload.nbytes} bytes are too few for an encrypted payload")
        tier, source = self._tier(frame.namespace, size)
        source.payload = payload
        if self._opened.nbytes < size:
            self._opened = memoryview(bytearray(size))
        try:
            tier.load(frame.key, self._opened[:size], 0.0)
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))
        return None

    def _tier(self, namespace: bytes, size: int) -> tuple[SealedTier, _OneFrame]:
        found = self._tiers.get((namespace, size))
        if found is None:
            self._tiers.clear()  # frames of one namespace have one size
            source = _OneFrame(size + SEAL_BYTES)
            sealed, key = self._keys[namespace]
            found = self._tiers[namespace, size] = SealedTier(source, sealed, size, key), source
        return found


class _OneFrame:
    """A tier whose every key is the payload at hand, so that opening a seal is done where it is done for engines."""

    name = "verify"

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.payload = memoryview(b"")

    def prepare(self, deadline: float) -> None:
        """Nothing is needed."""

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [True] * len(keys)

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        target[:] = self.payload

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        return StoreOutcome.PRESENT

    def discard(self, key: bytes, deadline: float) -> None:
        """Nothing is kept."""

    def resident_bytes(self, deadline: float) -> int:
        return self.payload.nbytes

    def close(self) -> None:
        """Nothing is open."""
