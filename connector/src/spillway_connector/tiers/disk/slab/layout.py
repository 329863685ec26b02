"""Layout of slab files and their index on disk: sizes, names and the index header. Pure arithmetic, no I/O.

A *slot* holds one frame (disk/frame_places.py). Slots of one size form a *size class*; a size
class's slots live in *chunks*, files of ``slots_per_chunk`` slots each, so slot ``s`` is slot ``s % slots_per_chunk``
of chunk ``s // slots_per_chunk``. The index of a size class is one file: a header page, then one array per field
(``COLUMNS``), each aligned to 64 bytes. docs/formats.md states the same for other programs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES

LOCK_NAME = "lock"
INDEX_NAME = "index"
TABLE_NAME = "headers"
SESSIONS_NAME = "sessions"
CHANGES_NAME = "changes"  # of the index, see change_log.py
SESSION_CHANGES_NAME = "sessions.changes"
LOCK_DEPTH = 2  # slab/lock below the root, see own_files.py
LOCK_LINKS = 1 << 30  # it is empty and never written to: a copy of the store made of hard links does no harm
SIZE_CLASS_DEPTH = 3  # slab/<slot bytes>/<file>
RECORD_BYTES = HEADER_BYTES + 8  # of the file that repeats every slot's header: the header and its xxh3_64
WRITERS_FOLDER = "writers"
INDEX_MAGIC = b"SPILLSLB"
TABLE_MAGIC = b"SPILLHDR"
SESSIONS_MAGIC = b"SPILLSES"
CHANGES_MAGIC = b"SPILLCHG"
CHANGES_HEAD_BYTES = 32
_CHANGES_MAX = 1 << 16
_CHANGES_MIN = 1 << 8
INDEX_VERSION = 2  # 1 had no tenant_used
SLOTS_MAX = 1 << 31  # slot numbers, plus one, are kept in 32 bits
WAYS = 8  # entries of one hash bucket
TENANT_PLACES = 1024  # of the table that counts slots by tenant
SESSION_ROWS_MAX = 4096  # sessions of a size class, of all processes together
_SESSION_ROWS_MIN = 64

# Copies of the index and the sessions in an engine's memory, see columns.py; charts/spillway/templates/_memory.tpl has
# both numbers.
COPY_BYTES_PER_SLOT = 104
COPY_BYTES_BESIDE = 2 << 20  # headers, and what grows with chunks, sessions and tenants

_HEADER = struct.Struct("<8sHHIQII")  # magic, version, zero, slots per chunk, slot bytes, chunks, zero
_CHUNK_NAME = re.compile(r"(\d{6})-(\d{8})\.slab")


@dataclass(frozen=True, slots=True)
class Column:
    """One array of the index: ``per`` "slot", "chunk", "entry" (of the hash table), "tenant" (place in
    the tenants' table), "session" (row of the sessions' table), or "all" (of the size class): one element."""

    name: str
    dtype: str
    per: str

    @property
    def item_bytes(self) -> int:
        return int(self.dtype[-1])


COLUMNS = (
    Column("dirty", "<u8", "all"),  # not 0: a holder of the lock is changing the index, or was when it was killed
    Column("next_order", "<u8", "all"),
    Column("used", "<u8", "all"),  # slots in use, those being written included
    Column("small_used", "<u8", "all"),  # those of the small queue
    Column("evictions", "<u8", "all"),
    Column("chunk_changes", "<u8", "all"),
    Column("key_low", "<u8", "slot"),  # the 128-bit fingerprint of namespace and key, see fingerprint.py
    Column("key_high", "<u8", "slot"),
    Column("namespace", "<u8", "slot"),  # first 8 bytes of the namespace digest
    Column("tenant", "<u8", "slot"),  # the tenant's tag, 0 for none
    Column("owner", "<u8", "slot"),  # number of the writer's lease
    Column("order", "<u8", "slot"),  # place in its queue: lowest is oldest
    Column("generation", "<u4", "slot"),  # grows with every claim of the slot
    Column("used_s", "<u4", "slot"),  # last use, in seconds of the clock of ages (disk/clock.py)
    Column("check", "<u4", "slot"),  # over the fields that do not change while the slot is in use
    Column("state", "u1", "slot"),
    Column("queue", "u1", "slot"),
    Column("frequency", "u1", "slot"),  # hits since the entry was last considered for eviction, at most 3
    Column("ghost", "<u8", "slot"),  # recent evictions: tag in the high half, eviction number in the low
    Column("tenant_used", "<u4", "tenant"),  # slots in use of all tenants of that place
    Column("chunk_epoch", "<u4", "chunk"),  # 0: the chunk does not exist; else part of its file name
    Column("bucket_tag", "<u4", "entry"),
    Column("bucket_slot", "<u4", "entry"),  # slot number plus one; 0: empty
)
SESSION_COLUMNS = (  # of the file beside the index, see session_file.py and session_order.py
    Column("row_changes", "<u8", "all"),
    Column("row_tag", "<u8", "session"),  # hash of the session's name
    Column("row_tenant", "<u8", "session"),
    Column("row_number", "<u4", "session"),  # changes with the session; 0: the row is free
    Column("row_due_s", "<u4", "session"),  # clock of the entries' ages; all ones: unknown
    Column("row_late_s", "<u4", "session"),  # when it has ended without saying so; all ones: never
    Column("row_used_s", "<u4", "session"),
    Column("row_ended", "u1", "session"),
    Column("slot_generation", "<u4", "slot"),  # of the entry that the next two speak of
    Column("slot_session", "<u4", "slot"),  # number of the session that alone uses it; 0: none, all ones: several
    Column("slot_place", "<u4", "slot"),  # of the chunk in the session's prefix; all ones: not known
)


@dataclass(frozen=True, slots=True)
class SizeClassShape:
    """slot_bytes: a whole number of pages. chunks: the number that the index has room for, whether they exist or
    not."""

    slot_bytes: int
    slots_per_chunk: int
    chunks: int

    def __post_init__(self) -> None:
        if self.slot_bytes < PAGE_BYTES or self.slot_bytes % PAGE_BYTES:
            raise ValueError(f"slot_bytes: {self.slot_bytes} are no whole pages")
        if not (self.slots_per_chunk > 0 and 0 < self.chunks <= 999_999 and self.slots <= SLOTS_MAX):
            raise ValueError(f"{self.chunks} chunks of {self.slots_per_chunk} slots cannot be numbered")

    @property
    def slots(self) -> int:
        return self.slots_per_chunk * self.chunks

    @property
    def chunk_bytes(self) -> int:
        return self.slots_per_chunk * self.slot_bytes

    @property
    def buckets(self) -> int:
        """Two entries per slot: at a load of one half both buckets of a key are practically never full (buckets.py)."""
        return -(-2 * self.slots // WAYS)

    @property
    def session_rows(self) -> int:
        """The number of sessions, a power of two: one for about eight slots, at most SESSION_ROWS_MAX."""
        return min(SESSION_ROWS_MAX, max(_SESSION_ROWS_MIN, 1 << (self.slots // 8).bit_length()))

    def rows(self, column: Column) -> int:
        rows = {
            "slot": self.slots,
            "chunk": self.chunks,
            "entry": self.buckets * WAYS,
            "tenant": TENANT_PLACES,
            "session": self.session_rows,
            "all": 1,
        }
        return rows[column.per]

    def offsets(self, columns: Sequence[Column] = COLUMNS) -> tuple[dict[str, int], int]:
        """Offsets of the columns in the index file, or in that of the sessions, and the file's size."""
        offsets, position = {}, PAGE_BYTES
        for column in columns:
            offsets[column.name] = position
            position = -(-(position + column.item_bytes * self.rows(column)) // 64) * 64
        return offsets, -(-position // PAGE_BYTES) * PAGE_BYTES

    @property
    def index_bytes(self) -> int:
        return self.offsets()[1]

    @property
    def sessions_bytes(self) -> int:
        """The size of the file of the sessions, 12 bytes per slot and 37 per session."""
        return self.offsets(SESSION_COLUMNS)[1]

    @property
    def records(self) -> int:
        """Changes that are announced to other processes before the first is overwritten: a claim makes some 15."""
        return min(_CHANGES_MAX, max(_CHANGES_MIN, 1 << (8 * self.slots).bit_length()))

    @property
    def changes_bytes(self) -> int:
        """Size of the file with these changes, see change_log.py."""
        return CHANGES_HEAD_BYTES + 16 * self.records

    @property
    def table_bytes(self) -> int:
        """The size of the file that repeats every slot's header, see headers.py."""
        return PAGE_BYTES + self.slots * RECORD_BYTES

    def pack(self, magic: bytes = INDEX_MAGIC) -> bytes:
        """The fixed part of the header of the index, or of the header table."""
        fields = _HEADER.pack(magic, INDEX_VERSION, 0, self.slots_per_chunk, self.slot_bytes, self.chunks, 0)
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def unpack(cls, raw: bytes, wanted_magic: bytes = INDEX_MAGIC) -> SizeClassShape | None:
        """The shape in such a header; None if it is damaged, of another version or of another program."""
        if len(raw) < HEADER_FIXED_BYTES:
            return None
        fields, checksum = raw[: _HEADER.size], raw[_HEADER.size : HEADER_FIXED_BYTES]
        magic, version, _, slots_per_chunk, slot_bytes, chunks, _ = _HEADER.unpack(fields)
        if magic != wanted_magic or version != INDEX_VERSION or xxhash.xxh3_64_digest(fields) != checksum:
            return None
        try:
            return cls(slot_bytes, slots_per_chunk, chunks)
        except ValueError:
            return None

    def chunk_of(self, slot: int) -> int:
        return slot // self.slots_per_chunk

    def offset_of(self, slot: int) -> int:
        """The offset of a slot within its chunk's file, in bytes."""
        return slot % self.slots_per_chunk * self.slot_bytes


HEADER_FIXED_BYTES = _HEADER.size + 8


def chunk_target_bytes(limit_bytes: int) -> int:
    """Return the bytes by which a size class grows at a time: 1/64 of a small bound, 1 GiB of a large one (a thousand
    files per TB)."""
    return min(max(limit_bytes // 256, min(limit_bytes // 64, 64 << 20)), 1 << 30)


def plan_shape(slot_bytes: int, limit_bytes: int) -> SizeClassShape | None:
    """The size class that may fill ``limit_bytes`` alone, index, header table and changes included; None if not
    even one slot fits."""
    chunk_slots = max(1, chunk_target_bytes(limit_bytes) // slot_bytes)
    chunks = min(limit_bytes // (chunk_slots * slot_bytes), SLOTS_MAX // chunk_slots, 999_999)
    while chunks > 0:
        shape = SizeClassShape(slot_bytes, chunk_slots, chunks)
        beside_bytes = shape.index_bytes + shape.table_bytes + shape.changes_bytes
        over = chunks * shape.chunk_bytes + beside_bytes - limit_bytes
        if over <= 0:
            return shape
        chunks -= max(1, over // (shape.chunk_bytes + beside_bytes // chunks + 1))
    return None


def copies_bytes(payload_bytes: int, limit_bytes: int) -> int:
    """Return the most memory that an engine core needs for its copies of the index, with payloads of this size, or with
    those of rows of this size: a row's padding may have room for a header."""
    row_bytes = -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
    return limit_bytes // row_bytes * COPY_BYTES_PER_SLOT + COPY_BYTES_BESIDE


def slot_bytes_of(payload_bytes: int) -> int:
    """The frame of such a payload."""
    return FramePlaces.of(payload_bytes).frame_bytes


def chunk_name(chunk: int, epoch: int) -> str:
    """The epoch makes a name that is never used twice, so an open file is never mistaken for its successor."""
    return f"{chunk:06d}-{epoch:08d}.slab"


def parse_chunk_name(name: str) -> tuple[int, int] | None:
    match = _CHUNK_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
