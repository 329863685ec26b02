"""The description of a stored block from its headers, without its payload: parsing replies, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spillway_connector.errors import CorruptReason, TierCorrupt, TierError
from spillway_connector.tiers.frame import HEADER_BYTES, FrameHeader, read_header
from spillway_connector.tiers.redis.client.errors import ProtocolError, Reply, WrongType
from spillway_connector.tiers.tier import NO_TENANT


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block, described from its headers; its payload was not read.

    payload_bytes: of all stripes together, 0 if it is unknown. ttl_ms: None if it never expires.
    damage: why the headers cannot be trusted. If the commit record is damaged, tenant, payload, time and stripes are
    those of an empty block; after such a block is removed, its other stripes expire.
    """

    namespace: str
    key: bytes
    tenant: bytes = NO_TENANT
    payload_bytes: int = 0
    stored_bytes: int = 0
    created_ms: int = 0
    ttl_ms: int | None = None
    stripes: int = 1
    damage: CorruptReason | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Header, length and time to live of one value; ``header`` is None if it cannot be trusted."""

    there: bool
    stored_bytes: int = 0
    ttl_ms: int | None = None
    header: FrameHeader | None = None
    damage: CorruptReason | None = None


def read_head(raw: Reply | TierError, length: Reply | TierError, ttl_ms: Reply | TierError) -> Head:
    """Parse the replies to GETRANGE, STRLEN and PTTL. Raises those that are errors, ProtocolError."""
    for reply in (raw, length, ttl_ms):
        if isinstance(reply, TierError):
            if isinstance(reply, WrongType):
                return Head(True, damage=CorruptReason.MAGIC)
            raise reply
    if not isinstance(raw, bytes) or not isinstance(length, int) or not isinstance(ttl_ms, int):
        raise ProtocolError("the reply to GETRANGE, STRLEN or PTTL has another type")
    if ttl_ms == -2:
        return Head(False)  # it expired or was removed since SCAN
    lives_ms = None if ttl_ms < 0 else ttl_ms
    try:
        header = read_header(raw)
        if length - HEADER_BYTES != header.payload_bytes:
            reason = CorruptReason.SHORT if length - HEADER_BYTES < header.payload_bytes else CorruptReason.LENGTH
            return Head(True, length, lives_ms, damage=reason)
        return Head(True, length, lives_ms, header)
    except TierCorrupt as corrupt:
        return Head(True, length, lives_ms, damage=CorruptReason(corrupt.reason))


def from_commit(block: StoredBlock, head: Head) -> StoredBlock:
    """Return ``block``, of which only key and time to live are known, completed from its commit record."""
    header = head.header
    damage = head.damage
    if header is not None:
        if header.namespace.hex() != block.namespace:
            damage = CorruptReason.NAMESPACE
        elif header.key != block.key or header.part.index != header.part.count - 1:
            damage = CorruptReason.KEY
    if header is None or damage is not None:
        return replace(block, stored_bytes=head.stored_bytes, damage=damage)
    return replace(
        block,
        tenant=header.tenant,
        payload_bytes=header.payload_bytes,
        stored_bytes=head.stored_bytes,
        created_ms=header.created_ms,
        stripes=header.part.count,
    )


def with_first(block: StoredBlock, head: Head) -> StoredBlock:
    """A striped block with the sizes of all its stripes; ``head`` is that of the first."""
    header = head.header
    if header is None or header.key != block.key or (header.part.index, header.part.count) != (0, block.stripes):
        # The commit record has the number of stripes, so that all of them can be removed.
        return replace(block, payload_bytes=0, damage=head.damage or CorruptReason.SHORT)
    others = block.stripes - 1
    return replace(
        block,
        payload_bytes=block.payload_bytes + others * header.payload_bytes,
        stored_bytes=block.stored_bytes + others * head.stored_bytes,
    )
