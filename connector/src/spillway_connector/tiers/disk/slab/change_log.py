"""A log of changes to a file that several processes have copies of: a ring of (place, value) in a file beside it.

Whoever changes the file appends what was changed, under the root's lock; the others bring their copies up to date from
there, without a lock. It is a notice and no journal. A process that has missed changes, or finds the ring damaged,
reads the whole file again. So does a holder of the lock if the file's own counters differ from those of its copy: a
process that knows no ring, or that was killed before it wrote to it, has changed the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillway_connector.own_files import clear_the_place, open_own
from spillway_connector.tiers.disk.slab.layout import (
    CHANGES_HEAD_BYTES,
    CHANGES_MAGIC,
    SIZE_CLASS_DEPTH,
    SizeClassShape,
)

EVERYTHING = (0, 0)
"""The change that stands for more than can be named."""

_HEAD = struct.Struct("<8sQQQ")  # magic, records in the ring, records ever written, zero
_TOTAL_MAX = 1 << 62  # more than is ever written; a larger number is damage
_ITEM_BITS = 4  # of a place: bytes of the element; the rest is its offset in the file

Change = tuple[int, int]
"""Offset and size of an element, as :func:`place`, and its new value."""


def place(offset: int, item_bytes: int) -> int:
    return offset << _ITEM_BITS | item_bytes


class ChangeLog:
    """The ring at ``path``. writable: whether it is made if it is missing."""

    def __init__(self, path: Path, shape: SizeClassShape, *, writable: bool, owners_checked: bool = True) -> None:
        self._path = path
        self._file_bytes = shape.changes_bytes
        self._capacity = shape.records
        self._writable = writable
        self._owners_checked = owners_checked
        self._descriptor: int | None = None
        self._head = b""  # as seen last
        self._seen = 0
        self._missed = False
        self._open()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def renew(self) -> None:
        """Make the ring again if it was removed or damaged, under the root's lock."""
        if not self._writable:
            return
        try:
            now, ours = os.stat(self._path, follow_symlinks=False), os.fstat(self._descriptor or -1)
            same = (now.st_dev, now.st_ino, now.st_size) == (ours.st_dev, ours.st_ino, self._file_bytes)
            if same and _total_in(os.pread(self._descriptor or -1, _HEAD.size, 0), self._capacity) is not None:
                return
        except OSError:
            pass
        self.close()
        self._open()
        self._missed = True

    def _open(self) -> None:
        try:
            flags = os.O_RDONLY
            if self._writable:
                clear_the_place(self._path, SIZE_CLASS_DEPTH)
                flags = os.O_CREAT | os.O_RDWR
            self._descriptor = open_own(self._path, flags, SIZE_CLASS_DEPTH, owners_checked=self._owners_checked)
            whole = os.fstat(self._descriptor).st_size == self._file_bytes
            if self._writable and not (self._read_head() is not None and whole):
                os.ftruncate(self._descriptor, self._file_bytes)
                self._write_head(0)
        except OSError:
            self.close()  # without: this process's changes are noticed late, and it notices others' late

    def skip(self) -> None:
        """Count everything written so far as seen: the file is about to be read."""
        self._missed = False
        with suppress(OSError):
            self._read_head()

    def miss(self) -> None:
        """Have :meth:`news` answer None until the file has been read."""
        self._missed = True

    def news(self) -> npt.NDArray[np.uint64] | None:
        """Changes since the last call, (n, 2); None if some were missed. Raises OSError."""
        if self._descriptor is None:
            return _NOTHING
        if self._missed:
            return None
        before, head = self._seen, os.pread(self._descriptor, _HEAD.size, 0)
        if head == self._head:
            return _NOTHING
        self._missed = True  # until all of it has been read
        total = self._read_head()
        if total is None or not 0 <= total - before <= self._capacity:
            return None
        count, first = total - before, before % self._capacity
        parts = [(first, min(count, self._capacity - first))]
        parts.append((0, count - parts[0][1]))
        raw = b"".join(os.pread(self._descriptor, 16 * n, CHANGES_HEAD_BYTES + 16 * at) for at, n in parts if n)
        # The records that were read may have been overwritten meanwhile.
        latest = _total_in(os.pread(self._descriptor, _HEAD.size, 0), self._capacity)
        if len(raw) != 16 * count or latest is None or not 0 <= latest - before <= self._capacity:
            return None
        self._missed = False
        return np.frombuffer(raw, np.uint64).reshape(-1, 2)

    def news_apply(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Make what is new in a copy of the file; False if all of it has to be read. Raises OSError."""
        news = self.news()
        return news is not None and apply(news, memory)

    def append(self, records: Sequence[Change]) -> None:
        """Append these records, under the root's lock and after :meth:`news`. A failure is ignored: see the module."""
        if self._descriptor is None or not records:
            return
        if len(records) > self._capacity // 2:
            records = (EVERYTHING,)
        first = self._seen % self._capacity
        raw = np.array(records, np.uint64).tobytes()
        fits = 16 * (self._capacity - first)
        with suppress(OSError):
            os.pwrite(self._descriptor, raw[:fits], CHANGES_HEAD_BYTES + 16 * first)
            if raw[fits:]:
                os.pwrite(self._descriptor, raw[fits:], CHANGES_HEAD_BYTES)
            self._write_head(self._seen + len(records))

    def _read_head(self) -> int | None:
        """Records ever written; None if the ring is damaged or of another size."""
        if self._descriptor is None:
            return None
        self._head = os.pread(self._descriptor, _HEAD.size, 0)
        total = _total_in(self._head, self._capacity)
        self._seen = total or 0
        return total

    def _write_head(self, total: int) -> None:
        assert self._descriptor is not None
        head = _HEAD.pack(CHANGES_MAGIC, self._capacity, total, 0)
        os.pwrite(self._descriptor, head, 0)
        self._head, self._seen = head, total


_NOTHING = np.empty((0, 2), np.uint64)


def _total_in(head: bytes, capacity: int) -> int | None:
    if len(head) < _HEAD.size:
        return None
    magic, size, total, _ = _HEAD.unpack(head)
    return int(total) if magic == CHANGES_MAGIC and size == capacity and total <= _TOTAL_MAX else None


def apply(records: npt.NDArray[np.uint64], memory: npt.NDArray[np.uint8]) -> bool:
    """Make changes in a copy of the file; False if they say that all of it has to be read again."""
    if not len(records):
        return True
    sizes = (records[:, 0] & np.uint64((1 << _ITEM_BITS) - 1)).astype(np.int64)
    offsets = records[:, 0] >> np.uint64(_ITEM_BITS)
    if not np.isin(sizes, (1, 4, 8)).all():
        return False
    if (offsets + sizes.astype(np.uint64) > np.uint64(len(memory))).any() or (offsets % sizes.astype(np.uint64)).any():
        return False  # of a file of another shape
    for size, dtype in ((1, np.uint8), (4, np.uint32), (8, np.uint64)):
        rows = np.flatnonzero(sizes == size)
        if len(rows):
            places = (offsets[rows] // np.uint64(size)).astype(np.int64)
            # If one element changed several times, the last change counts.
            _, last = np.unique(places[::-1], return_index=True)
            last = len(places) - 1 - last
            memory[: len(memory) // size * size].view(dtype)[places[last]] = records[rows[last], 1].astype(dtype)
    return True
