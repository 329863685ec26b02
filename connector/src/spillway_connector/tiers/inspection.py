"""Inspecting a store while engines use it: the types that the inspectors of all stores share.

A walk yields frames one by one, so millions of frames need no more memory than one does. Walking changes nothing, not
even the age of a frame. Frames are removed one by one; one that an engine has replaced since the walk stays.
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
    """Damage in a store. ``reason``: a word of CorruptReason, "document" or "index". ``sentence``: for people."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace in a store. ``digest``: its 16 bytes. ``document``: None if it is missing."""

    digest: bytes
    document: bytes | None

    @property
    def facts(self) -> dict[str, Any] | None:
        """The contents of the document; None if it is missing or is no JSON object."""
        try:
            facts = json.loads(self.document or b"")
        except ValueError:
            return None
        return facts if isinstance(facts, dict) else None

    @property
    def codec(self) -> dict[str, Any] | None:
        """The encryption of payloads: cipher, key_id, key_check; None if they are not encrypted."""
        codec = (self.facts or {}).get("codec")
        return codec if isinstance(codec, dict) else None

    def damage(self) -> Damage | None:
        """Return the damage of the document: missing, unreadable or of another digest; None if it is intact."""
        if self.document is None:
            return Damage("document", f"namespace {self.digest.hex()} has no document; an engine using it writes it")
        facts = self.facts
        if facts is None:
            return Damage("document", f"the document of namespace {self.digest.hex()} is no JSON object")
        if identity_of(facts).digest16 != self.digest:
            return Damage("document", f"the document of namespace {self.digest.hex()} describes another one")
        return None


def identity_of(facts: dict[str, Any]) -> Namespace:
    """Return the part of a stored document that its digest is computed from: all but an encrypted namespace's key check
    (sealed.py)."""
    codec = facts.get("codec")
    if isinstance(codec, dict):
        facts = {**facts, "codec": {name: value for name, value in codec.items() if name != "key_check"}}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return Namespace(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """One block as a walk found it.

    Attributes:
        stored_bytes: The bytes that it takes in the store.
        key, payload_bytes, tenant, created_s: None if they are damaged, or if the walk did not read headers.
        created_s, used_s: Seconds since 1970. used_s is None if the store does not record uses.
        damage: The damage that the header shows.
        place: The block's place in the store, for people.
        handle: The place, for the inspector that found the block.
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
        """The time from which its age counts: its last use, or its creation if uses are not recorded."""
        return self.used_s if self.used_s is not None else self.created_s


class Gone(Exception):
    """The frame was removed or replaced since the walk found it. This is no damage."""


CheckPayload = Callable[[StoredFrame, memoryview], Damage | None]
"""A further check of a payload whose checksum is right: opens the seal of an encrypted one."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The frames that a call removed, without those that were missing or used meanwhile."""

    frames: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Removal) -> Removal:
        return Removal(self.frames + other.frames, self.stored_bytes + other.stored_bytes)


def is_namespace_name(name: str) -> bool:
    """Whether a folder or key part is a namespace's: 32 lower-case hex digits."""
    return len(name) == 2 * NAMESPACE_DIGEST_BYTES and all(digit in "0123456789abcdef" for digit in name)
