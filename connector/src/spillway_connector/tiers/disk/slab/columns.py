"""The arrays of an index file: read through a read-only mapping, changed with ``pwrite``.

The kernel keeps the two coherent. A disk that fails then answers with an error number, where a store into a mapping
would end the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from spillway_connector.tiers.disk.slab.layout import COLUMNS, Column, PoolShape

_libc = ctypes.CDLL(None, use_errno=True)


class Columns:
    """The columns of one index file, by their names in ``columns``. Takes over ``descriptor``.

    The index, its hash table and its policy refer to it, and it to none of them: with a reference cycle, the file and
    the locked mapping of an index that was replaced would stay until a garbage collection, which engines rarely run.
    """

    def __init__(self, shape: PoolShape, descriptor: int, columns: Sequence[Column] = COLUMNS) -> None:
        self._descriptor = descriptor
        self._offsets, file_bytes = shape.offsets(columns)
        self._places = {column.name: (self._offsets[column.name], column.item_bytes) for column in columns}
        mapped = mmap.mmap(descriptor, file_bytes, access=mmap.ACCESS_READ)
        self._view = memoryview(mapped)
        self.arrays = {
            column.name: np.ndarray((shape.rows(column),), column.dtype, mapped, self._offsets[column.name])
            for column in columns
        }
        # Locked in memory where the limits allow: a mapped page that the disk fails to read back ends the process, too.
        first = self.arrays[columns[0].name].ctypes.data - self._offsets[columns[0].name]
        _libc.mlock(ctypes.c_void_p(first), file_bytes)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def elements(self, name: str, kind: Literal["B", "I", "Q"]) -> memoryview[int]:
        """A column as a memoryview: single elements are read from it several times faster than from an array."""
        offset = self._offsets[name]
        return self._view[offset : offset + self.arrays[name].nbytes].cast(kind)

    def counter(self, name: str) -> int:
        """A column of one element."""
        return int(self.arrays[name][0])

    def put(self, name: str, position: int, value: int) -> None:
        """Change one element of a column. Raises OSError."""
        offset, item_bytes = self._places[name]
        os.pwrite(self._descriptor, value.to_bytes(item_bytes, "little"), offset + position * item_bytes)

    def put_all(self, name: str, values: npt.NDArray[np.generic], first: int = 0) -> None:
        """Change consecutive elements of a column, from the place ``first``. Raises OSError."""
        offset, item_bytes = self._places[name]
        raw = memoryview(np.ascontiguousarray(values, self.arrays[name].dtype).tobytes())
        position = offset + first * item_bytes
        while raw.nbytes:
            written = os.pwrite(self._descriptor, raw, position)
            raw, position = raw[written:], position + written

    def put_at(self, name: str, slots: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        """Change many scattered elements of a column, by writing all of it. Raises OSError."""
        changed = self.arrays[name].copy()
        changed[slots] = values
        self.put_all(name, changed)
