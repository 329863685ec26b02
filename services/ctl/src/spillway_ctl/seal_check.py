"""Opening the seals of encrypted frames with the operator's copy of the key. Needs the package `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spillway_connector.errors import TierCorrupt
from spillway_connector.tiers.inspection import Damage, StoredFrame, StoredNamespace, identity_of
from spillway_connector.tiers.sealed import SEAL_BYTES, PayloadSeal, SealedNamespace, SealKey
from spillway_ctl.errors import CommandError


class SealCheck:
    """Opens payloads of the namespaces whose key it has; others pass. A inspection.CheckPayload."""

    def __init__(self, namespaces: Sequence[StoredNamespace], key_file: Path | None, key_env: str | None) -> None:
        """Raises ConfigError if no key can be read, CommandError if the key is no namespace's."""
        self.opens: set[bytes] = set()
        self._keys: dict[bytes, tuple[SealedNamespace, SealKey]] = {}
        self._seals: dict[tuple[bytes, int], PayloadSeal] = {}
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
        seal = self._seal(frame.namespace, size)
        if self._opened.nbytes < size:
            self._opened = memoryview(bytearray(size))
        try:
            seal.open(frame.key, payload, self._opened[:size])
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))
        return None

    def _seal(self, namespace: bytes, size: int) -> PayloadSeal:
        found = self._seals.get((namespace, size))
        if found is None:
            self._seals.clear()  # frames of one namespace have one size
            found = self._seals[namespace, size] = PayloadSeal(self._keys[namespace][0], size, self._keys[namespace][1])
        return found
