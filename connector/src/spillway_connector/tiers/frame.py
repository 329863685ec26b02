"""The self-describing frame around every stored block: pure packing and checking, no I/O.

Layout, little-endian; the fixed part is 192 bytes, then zero padding up to ``header_bytes``, then the payload:

    offset  size  field
         0     8  magic "SPILLKV\\n"
         8     2  format version
        10     2  header_bytes: where the payload starts (192, or 4096 on disks so that the payload is page aligned)
        12     4  flags, 0 in this version (codec, encryption)
        16    16  namespace digest
        32    64  key, zero padded
        96     2  key_bytes
        98     2  part index
       100     2  part count: 1 if the frame is the whole block, more if a block is stored as several values
       102     2  zero
       104     8  payload_bytes, of this part
       112    16  xxh3_128 of the payload, canonical (big-endian) form
       128     8  created_ms, wall clock
       136    16  set digest: which parts belong together (see digest_of_parts); zero if the part count is 1
       152     8  tenant: the first 8 bytes of the blake3 of the request's cache salt; zero for none
       160    16  zero
       176    16  xxh3_128 of all header bytes before and after this field, padding included

Every byte is covered: the header by its own checksum, the payload by the one in the header. xxh3 guards against
damage, not against forgery: every writer to the store is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.namespace import FORMAT_VERSION
from spillway_connector.tiers.tier import NO_TENANT, TENANT_BYTES

MAGIC = b"SPILLKV\n"
HEADER_BYTES = 192
PAGE_BYTES = 4096  # header size on disks; also the alignment that direct I/O needs
KEY_BYTES_MAX = 64
NAMESPACE_BYTES = 16
PARTS_MAX = 0xFFFF

NO_SET = bytes(16)

_FIELDS = struct.Struct("<8sHHI16s64sHHHHQ16sQ16s8s16s")
_CHECKSUM_BYTES = 16
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM_BYTES
assert _FIELDS.size == _CHECKSUM_AT


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The checked contents of a header; ``header_bytes`` is where the payload starts."""

    header_bytes: int
    namespace: bytes
    key: bytes
    payload_bytes: int
    payload_digest: bytes
    created_ms: int
    part: Part
    tenant: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """The piece of a block that a frame holds. ``set_digest``: 16 bytes, equal in all parts of one block."""

    index: int = 0
    count: int = 1
    set_digest: bytes = NO_SET


WHOLE = Part()


def digest_of_payload(payload: memoryview | bytes) -> bytes:
    """Return a payload's checksum, 16 bytes, as its header has it."""
    return xxhash.xxh3_128_digest(payload)


def running_digest() -> xxhash.xxh3_128:
    """Return a hash for a payload that arrives in pieces: ``update`` it with each, then ``digest``."""
    return xxhash.xxh3_128()


def digest_of_parts(payload_digests: Sequence[bytes]) -> bytes:
    """Return the set digest of a block stored in parts: xxh3_128 over the parts' payload digests, in order.

    It depends on the contents alone, so parts of two writers fit together exactly when they wrote the same bytes.
    """
    return xxhash.xxh3_128_digest(b"".join(payload_digests))


def build_header(
    namespace: bytes,
    key: bytes,
    payload: memoryview | bytes,
    *,
    created_ms: int,
    header_bytes: int = HEADER_BYTES,
    part: Part = WHOLE,
    tenant: bytes = NO_TENANT,
) -> bytes:
    """Return the header of a frame. Reads the whole payload once for its checksum (about 30 GB/s, without the GIL).

    For the arguments see :func:`pack_header`.
    """
    return pack_header(
        namespace,
        key,
        payload.nbytes if isinstance(payload, memoryview) else len(payload),
        digest_of_payload(payload),
        created_ms=created_ms,
        header_bytes=header_bytes,
        part=part,
        tenant=tenant,
    )


def pack_header(
    namespace: bytes,
    key: bytes,
    payload_bytes: int,
    payload_digest: bytes,
    *,
    created_ms: int,
    header_bytes: int = HEADER_BYTES,
    part: Part = WHOLE,
    tenant: bytes = NO_TENANT,
) -> bytes:
    """Pack the header of a frame whose payload has ``payload_digest``.

    namespace: 16 bytes. key: 1 to 64 bytes. header_bytes: 192 to 65535, the padded size. tenant: 8 bytes. Raises
    ValueError on a wrong size, which is a programming error.
    """
    _check_names(namespace, key)
    if not 0 <= part.index < part.count <= PARTS_MAX or len(part.set_digest) != len(NO_SET):
        raise ValueError(f"{part}: needed are 0 <= index < count <= {PARTS_MAX} and a set digest of 16 bytes")
    if len(tenant) != TENANT_BYTES:
        raise ValueError(f"tenant: {len(tenant)} bytes given, {TENANT_BYTES} needed")
    if not HEADER_BYTES <= header_bytes <= 0xFFFF:
        raise ValueError(f"header_bytes: {header_bytes} is outside {HEADER_BYTES}..65535")
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        header_bytes,
        0,
        namespace,
        key,
        len(key),
        part.index,
        part.count,
        0,
        payload_bytes,
        payload_digest,
        created_ms,
        part.set_digest,
        tenant,
        b"",
    )
    padding = bytes(header_bytes - HEADER_BYTES)
    return fields + xxhash.xxh3_128_digest(fields + padding) + padding


def read_header(header: memoryview | bytes) -> FrameHeader:
    """Check a header without its payload (all ``header_bytes`` of it must be given) and return its contents.

    Raises TierCorrupt: SHORT, MAGIC, VERSION or HEADER.
    """
    raw = bytes(header)
    if len(raw) < HEADER_BYTES:
        raise TierCorrupt(CorruptReason.SHORT, f"the frame has {len(raw)} bytes; a header has {HEADER_BYTES}")
    (
        magic,
        version,
        header_bytes,
        flags,
        namespace,
        padded_key,
        key_bytes,
        part_index,
        part_count,
        zero,
        payload_bytes,
        digest,
        created_ms,
        set_digest,
        tenant,
        reserved,
    ) = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise TierCorrupt(CorruptReason.MAGIC, f"the frame starts with {magic!r}, not with {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise TierCorrupt(CorruptReason.VERSION, f"the frame has format {version}, this program reads {FORMAT_VERSION}")
    if len(raw) != header_bytes:
        raise TierCorrupt(CorruptReason.HEADER, f"the header announces {header_bytes} bytes, {len(raw)} were stored")
    checksum = raw[_CHECKSUM_AT:HEADER_BYTES]
    if xxhash.xxh3_128_digest(raw[:_CHECKSUM_AT] + raw[HEADER_BYTES:]) != checksum:
        raise TierCorrupt(CorruptReason.HEADER, "the header's checksum does not match its bytes")
    if flags or zero or any(reserved) or part_index >= part_count or not 1 <= key_bytes <= KEY_BYTES_MAX:
        # The header is intact, so a newer program wrote it.
        raise TierCorrupt(CorruptReason.VERSION, "the frame uses fields that this program does not support")
    part = Part(part_index, part_count, set_digest)
    return FrameHeader(header_bytes, namespace, padded_key[:key_bytes], payload_bytes, digest, created_ms, part, tenant)


def verify(
    header: memoryview | bytes,
    payload: memoryview | bytes,
    *,
    namespace: bytes,
    key: bytes,
    payload_bytes: int,
    part_index: int = 0,
    part_count: int = 1,
) -> FrameHeader:
    """Prove that header and payload are the whole, undamaged frame of ``key`` in ``namespace``.

    payload: what was read, to be compared with ``payload_bytes``, the size this engine expects. If a block is in parts,
    each frame is proven separately; the caller checks that they belong together (see digest_of_parts).
    Raises TierCorrupt with the first reason found; returns the header otherwise.
    """
    found = _verify_header(header, namespace, key, payload_bytes, (part_index, part_count))
    given_bytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if given_bytes != payload_bytes:
        raise TierCorrupt(CorruptReason.SHORT, f"{given_bytes} of {payload_bytes} payload bytes were read")
    _compare(digest_of_payload(payload), found)
    return found


def verify_digest(
    header: memoryview | bytes,
    payload_digest: bytes,
    *,
    namespace: bytes,
    key: bytes,
    payload_bytes: int,
    part_index: int = 0,
    part_count: int = 1,
) -> FrameHeader:
    """Verify as :func:`verify` does for a payload that arrived in pieces; ``payload_digest`` is of all of them."""
    found = _verify_header(header, namespace, key, payload_bytes, (part_index, part_count))
    _compare(payload_digest, found)
    return found


def _verify_header(
    header: memoryview | bytes, namespace: bytes, key: bytes, payload_bytes: int, part: tuple[int, int]
) -> FrameHeader:
    """part: the part's index, and the count of parts."""
    _check_names(namespace, key)
    found = read_header(header)
    if found.namespace != namespace:
        raise TierCorrupt(
            CorruptReason.NAMESPACE, f"the frame belongs to namespace {found.namespace.hex()}, not {namespace.hex()}"
        )
    if found.key != key:
        raise TierCorrupt(CorruptReason.KEY, f"the frame holds key {found.key.hex()}, not {key.hex()}")
    if (found.part.index, found.part.count) != part:
        raise TierCorrupt(
            CorruptReason.KEY,
            f"the frame holds part {found.part.index + 1} of {found.part.count}, not {part[0] + 1} of {part[1]}",
        )
    if found.payload_bytes != payload_bytes:
        raise TierCorrupt(
            CorruptReason.LENGTH, f"the frame holds {found.payload_bytes} payload bytes, {payload_bytes} are needed"
        )
    return found


def _compare(payload_digest: bytes, header: FrameHeader) -> None:
    if payload_digest != header.payload_digest:
        raise TierCorrupt(CorruptReason.PAYLOAD, "the payload's checksum does not match its bytes")


def _check_names(namespace: bytes, key: bytes) -> None:
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"namespace: {len(namespace)} bytes given, {NAMESPACE_BYTES} needed")
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"key: {len(key)} bytes given, 1 to {KEY_BYTES_MAX} needed")
