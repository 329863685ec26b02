"""What an operator may learn of a store and do to it while engines use it: the words that all stores share.

A store is walked as a stream, so that millions of frames need no more memory than one does. Walking changes nothing,
not even the age of what is read. Frames are removed one by one; what an engine has replaced since the walk saw it stays
where that matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spillway_connector.namespace import NAMESPACE_DIGEST_BYTES, Namespace
from spillway_connector.tiers.tier import TENANT_BYTES

TENANT_HEX_DIGITS = 2 * TENANT_BYTES


@dataclass(frozen=True, slots=True)
class Damage:
    """``reason``: a word of CorruptReason, "document" or "index". ``sentence``: for people."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace as it lies in a store. ``digest``: its 16 bytes. ``document``: None where there is none."""

    digest: bytes
    document: bytes | None

    @property
    def facts(self) -> dict[str, Any] | None:
        """What the document says; None where it is missing or is no JSON object."""
        try:
            facts = json.loads(self.document or b"")
        except ValueError:
            return None
        return facts if isinstance(facts, dict) else None

    @property
    def codec(self) -> dict[str, Any] | None:
        """How payloads are encrypted: cipher, key_id, key_check; None where they are not."""
        codec = (self.facts or {}).get("codec")
        return codec if isinstance(codec, dict) else None

    def damage(self) -> Damage | None:
        """Whether the document is there and is the one that the digest stands for."""
        if self.document is None:
            return Damage("document", f"namespace {self.digest.hex()} has no document; an engine using it writes it")
        facts = self.facts
        if facts is None:
            return Damage("document", f"the document of namespace {self.digest.hex()} is no JSON object")
        if identity_of(facts).digest16 != self.digest:
            return Damage("document", f"the document of namespace {self.digest.hex()} describes another one")
        return None


def identity_of(facts: dict[str, Any]) -> Namespace:
    """What the digest of a stored document is made of: all of it but the key check of an encrypted one (sealed.py)."""
    codec = facts.get("codec")
    if isinstance(codec, dict):
        facts = {**facts, "codec": {name: value for name, value in codec.items() if name != "key_check"}}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return Namespace(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """One block as a walk found it.

    stored_bytes: what it takes in the store. key, payload_bytes, tenant, created_s: None where nothing undamaged says
    so, or where the walk did not look at headers. created_s, used_s: seconds since 1970; used_s is None where the store
    does not record uses. damage: as far as the header shows. place: where it is, for people.
    handle: for the inspector that found it.
    """

    namespace: bytes
    stored_bytes: int
    place: str
    handle: object
    key: bytes | None = None
    tenant: bytes | None = None
    payload_bytes: int | None = None
    created_s: float | None = None
    used_s: float | None = None
    damage: Damage | None = None

    @property
    def age_reference_s(self) -> float | None:
        """From when its age counts: its last use, or its creation where uses are not recorded."""
        return self.used_s if self.used_s is not None else self.created_s


class Gone(Exception):
    """The frame was removed or replaced since the walk saw it. Nothing is wrong with that."""


CheckPayload = Callable[[StoredFrame, memoryview], Damage | None]
"""Looks further into a payload whose checksum is right: opens the seal of an encrypted one."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What a call removed. A frame that was gone or used meanwhile is not in it."""

    frames: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Removal) -> Removal:
        return Removal(self.frames + other.frames, self.stored_bytes + other.stored_bytes)


def is_namespace_name(name: str) -> bool:
    """Whether a folder or key part is a namespace's: 32 lower-case hex digits."""
    return len(name) == 2 * NAMESPACE_DIGEST_BYTES and all(digit in "0123456789abcdef" for digit in name)
