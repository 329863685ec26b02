"""The records of a node's index about each row's chunk: its owner, its key, and a checksum of both.

The checksum contains a part of the row's generation, so a record and a stamp of different uses differ. It detects
damage, not an attacker.

Pure: no I/O, no lock, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

KEY_BYTES_MAX = 64
NAMESPACE_BYTES = 16

Rows = Sequence[int]
RowArray = npt.NDArray[np.intp]
U64 = npt.NDArray[np.uint64]

_RECORD = struct.Struct(f"<QB7x{NAMESPACE_BYTES}s{KEY_BYTES_MAX}s")  # checksum, length of the key, namespace, key
RECORD_BYTES, pack_record = _RECORD.size, _RECORD.pack_into
_WORDS = RECORD_BYTES // 8
_NAMESPACE_AT, _KEY_AT = 2, 2 + NAMESPACE_BYTES // 8  # in the words of a record
STATE_BITS = 2  # of a stamp; the others are its generation
USE_MASK = 0xFFFF_FFFF  # what a checksum holds of the generation
_USE, _CRC_AT = np.uint64(USE_MASK), np.uint64(32)
FEW_ROWS = 16  # up to so many words are read and written faster one by one than as an array


class RowWords:
    """Words about each row that an engine knows, which are read one by one and as arrays.

    seen: the row's stamp. used_ms: the time of use that gives its chunk its place in the order. checks: the checksum of
    that chunk in this use of the row. reserved: the stamp with which this engine has reserved the row.
    """

    def __init__(self, num_rows: int) -> None:
        words = np.zeros((4, num_rows), np.uint64)
        self.seen_array, self.used_array, self.check_array, self.reserved_array = words
        self.seen, self.used_ms, self.checks, self.reserved = (column.data for column in words)


class Entry(NamedTuple):
    """The content of a row. A row without a chunk, free or reserved, has only a stamp."""

    stamp: int
    namespace: bytes = b""
    key: bytes = b""
    check: int = 0

    @property
    def state(self) -> int:
        return self.stamp & 3

    @property
    def generation(self) -> int:
        return self.stamp >> STATE_BITS


class NodeRecords:
    """The records of all rows, in `memory`."""

    def __init__(self, memory: memoryview, num_rows: int) -> None:
        """memory: RECORD_BYTES for each row, writable."""
        self.memory = memory
        self._words: U64 = np.frombuffer(memory, np.uint64).reshape(num_rows, _WORDS)
        self.checks: U64 = self._words[:, 0]
        self.namespaces: U64 = self._words[:, _NAMESPACE_AT:_KEY_AT]

    def write_many(self, rows: RowArray, generations: U64, namespace: bytes, keys: Sequence[bytes]) -> U64:
        """Write the records of these chunks in those uses of the rows. Returns the checksums."""
        count = len(rows)
        crcs = np.fromiter(map(crc32, keys, repeat(crc32(namespace))), np.uint64, count)
        records = np.empty((count, _WORDS), np.uint64)
        checks: U64 = crcs << _CRC_AT | generations & _USE
        records[:, 0] = checks
        lengths = set(map(len, keys))
        records[:, 1] = lengths.pop() if len(lengths) == 1 else list(map(len, keys))
        records[:, _NAMESPACE_AT:_KEY_AT] = np.frombuffer(namespace, np.uint64)
        records[:, _KEY_AT:] = np.array(keys, f"S{KEY_BYTES_MAX}").view(np.uint64).reshape(count, KEY_BYTES_MAX // 8)
        self._words[rows] = records
        return checks

    def read(self, row: int, stamp: int) -> Entry | None:
        """The chunk in a row of that stamp; None if the record is of another use, or damaged."""
        check, length, namespace, key = _RECORD.unpack_from(self.memory, row * RECORD_BYTES)
        key = key[:length]
        expected = crc32(key, crc32(namespace)) << 32 | stamp >> STATE_BITS & USE_MASK
        return Entry(stamp, namespace, key, check) if check == expected else None
