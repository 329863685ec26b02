"""Reading a size class's index file with plain reads: without mapping it, and without taking any lock.

For processes that only look, and for the few numbers that an engine needs of its root's other size classes. Neither the
size of an index nor a failing disk is a danger to the reader.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillway_connector.own_files import NotOwn, open_own
from spillway_connector.tiers.disk.slab.layout import (
    COLUMNS,
    HEADER_FIXED_BYTES,
    INDEX_NAME,
    SIZE_CLASS_DEPTH,
    Column,
    SizeClassShape,
)

_COLUMNS = {column.name: column for column in COLUMNS}


@dataclass(frozen=True, slots=True)
class IndexReader:
    """An index file open for reading. inode: of the file; an index that replaces it has another one."""

    shape: SizeClassShape
    inode: int
    _descriptor: int
    _offsets: dict[str, int]

    def column(self, name: str, first: int, count: int) -> npt.NDArray[np.generic]:
        """Elements of a column as they are now, shape (count,). Raises OSError."""
        column = _COLUMNS[name]
        return np.frombuffer(self._read(column, first, count), column.dtype)

    def element(self, name: str, position: int = 0) -> int:
        """One element of a column as it is now. Raises OSError."""
        return int.from_bytes(self._read(_COLUMNS[name], position, 1), "little")

    def _read(self, column: Column, first: int, count: int) -> bytes:
        size = count * column.item_bytes
        raw = os.pread(self._descriptor, size, self._offsets[column.name] + first * column.item_bytes)
        if len(raw) < size:
            raise OSError(errno.EIO, "the index was cut while it was read")
        return raw

    def used_slots(self) -> int:
        """Slots in use, those being written included. Raises OSError."""
        return min(self.element("used"), self.shape.slots)


@contextmanager
def open_index(folder: Path) -> Iterator[IndexReader | None]:
    """The index of the size class in ``folder``; None if there is none that this program can use. Raises OSError."""
    try:
        descriptor = open_own(folder / INDEX_NAME, os.O_RDONLY, SIZE_CLASS_DEPTH)
    except (FileNotFoundError, NotOwn):
        yield None
        return
    try:
        shape = SizeClassShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0))
        status = os.fstat(descriptor)
        offsets, index_bytes = ({}, 0) if shape is None else shape.offsets()
        yield (
            None
            if shape is None or status.st_size != index_bytes
            else IndexReader(shape, status.st_ino, descriptor, offsets)
        )
    finally:
        os.close(descriptor)
