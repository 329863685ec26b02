"""The header table of a size class: every slot's frame header once more, side by side in one file.

A rebuild of the index reads this file from end to end instead of one page of every slot: 200 bytes in sequence, not a
seek each. It may be wrong: records and frames are written in no enforced order, and every frame is verified when it is
loaded. A record is zeros while its slot is free or being written, so after a crash it never names the previous frame.

A table is always created together with its index, so a frame that it does not list is not in the size class. If there
is no table, the slots are read.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    open_anew,
    open_own,
    rename_own,
    unlink_own,
)
from spillway_connector.tiers.disk.slab.layout import (
    HEADER_FIXED_BYTES,
    RECORD_BYTES,
    SIZE_CLASS_DEPTH,
    TABLE_MAGIC,
    TABLE_NAME,
    SizeClassShape,
)
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES

_READ_BYTES = 16 << 20
_NOTHING = bytes(RECORD_BYTES)


class HeaderTable:
    """The table in ``folder``, opened at first use. If there is none, every method does nothing.

    owners_checked: see own_files.py.
    """

    def __init__(self, folder: Path, shape: SizeClassShape, *, owners_checked: bool = True) -> None:
        self._path = folder / TABLE_NAME
        self._owners_checked = owners_checked
        self._shape = shape
        self._descriptor: int | None = None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def create(self) -> None:
        """Begin the table of a new index, empty and not yet under its name. Raises OSError; then there is none."""
        self.close()
        clear_the_place(self._path, SIZE_CLASS_DEPTH)
        unlink_own(self._path, SIZE_CLASS_DEPTH, missing_ok=True)
        partial = self._path.with_name(f"{TABLE_NAME}.new")
        self._descriptor = open_anew(partial, SIZE_CLASS_DEPTH)
        try:
            os.ftruncate(self._descriptor, self._shape.table_bytes)
            os.pwrite(self._descriptor, self._shape.pack(TABLE_MAGIC), 0)
        except OSError:
            unlink_own(partial, SIZE_CLASS_DEPTH, missing_ok=True)
            self.close()
            raise

    def publish_file(self) -> None:
        """Give a table that was begun its name. Raises OSError."""
        rename_own(self._path.with_name(f"{TABLE_NAME}.new"), self._path, SIZE_CLASS_DEPTH)

    def grow(self, shape: SizeClassShape) -> None:
        """Make room for more chunks. Raises OSError."""
        descriptor = self._open()
        if descriptor is not None:
            os.ftruncate(descriptor, shape.table_bytes)
        self._shape = shape

    def put(self, slot: int, header: bytes) -> None:
        """Record the frame in a slot; the first 192 bytes of ``header`` count. A failure is ignored: see the module."""
        fixed = header[:HEADER_BYTES]
        self._write(slot, fixed + xxhash.xxh3_64_digest(fixed))

    def clear(self, slot: int) -> None:
        """Record that the slot holds no frame, or is about to hold another. A failure is ignored."""
        self._write(slot, _NOTHING)

    def clear_chunk(self, chunk: int) -> None:
        """Record that no slot of a chunk holds a frame. Raises OSError."""
        self.write_chunk(chunk, np.zeros((self._shape.slots_per_chunk, HEADER_BYTES), np.uint8))

    def exists(self) -> bool:
        """Whether there is a table of this size class. Raises OSError."""
        return self._open() is not None

    def read_chunk(self, chunk: int) -> npt.NDArray[np.uint8]:
        """The headers of a chunk, (slots, 192), zeros if a record is absent or damaged. Raises OSError."""
        descriptor = self._open()
        raw = np.zeros((self._shape.slots_per_chunk, RECORD_BYTES), np.uint8)
        view, at = memoryview(raw.reshape(-1).data), 0
        while descriptor is not None and at < view.nbytes:
            begin = PAGE_BYTES + chunk * view.nbytes + at
            count = os.preadv(descriptor, [view[at : at + _READ_BYTES]], begin)
            if not count:
                break
            at += count
        digest = xxhash.xxh3_64_digest
        records = np.flatnonzero(raw[:, 0])
        found = b"".join([digest(view[at : at + HEADER_BYTES]) for at in (records * RECORD_BYTES).tolist()])
        damaged = (np.frombuffer(found, np.uint8).reshape(-1, 8) != raw[records, HEADER_BYTES:]).any(1)
        raw[records[damaged]] = 0
        return raw[:, :HEADER_BYTES]

    def write_chunk(self, chunk: int, headers: npt.NDArray[np.uint8]) -> None:
        """Set the headers of all slots of a chunk, (slots, 192), zeros for those that hold no frame. Raises OSError."""
        descriptor = self._open()
        if descriptor is None:
            return
        records = np.zeros((self._shape.slots_per_chunk, RECORD_BYTES), np.uint8)
        slots = np.flatnonzero(headers[:, 0])
        records[slots, :HEADER_BYTES] = headers[slots]
        view = memoryview(records.reshape(-1).data)
        digest = xxhash.xxh3_64_digest
        digests = b"".join([digest(view[at : at + HEADER_BYTES]) for at in (slots * RECORD_BYTES).tolist()])
        records[slots, HEADER_BYTES:] = np.frombuffer(digests, np.uint8).reshape(-1, 8)
        at = PAGE_BYTES + chunk * view.nbytes
        while view.nbytes:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written

    def _write(self, slot: int, record: bytes) -> None:
        try:
            descriptor = self._open()
            if descriptor is not None:
                os.pwrite(descriptor, record, PAGE_BYTES + slot * RECORD_BYTES)
        except OSError:
            # The frame is complete and in the index; only a rebuild would not find it.
            self.close()

    def _open(self) -> int | None:
        """The table, if it is of this size class."""
        if self._descriptor is not None:
            return self._descriptor
        try:
            descriptor = open_own(self._path, os.O_RDWR, SIZE_CLASS_DEPTH, owners_checked=self._owners_checked)
        except (FileNotFoundError, NotOwn):
            return None
        found = SizeClassShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0), TABLE_MAGIC)
        ours = (self._shape.slot_bytes, self._shape.slots_per_chunk)
        if found is None or (found.slot_bytes, found.slots_per_chunk) != ours:
            os.close(descriptor)
            return None
        self._descriptor = descriptor
        return descriptor
