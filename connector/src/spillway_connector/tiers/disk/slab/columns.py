"""The arrays of an index file: read from a copy in this process's memory, changed in the file and the copy.

The file is not mapped. A user who may write to the directory can cut it, and a disk can fail to read it back; the next
access to a mapping would then end the process (SIGBUS). What other processes change is taken over from a ring beside
the file (change_log.py), which costs a look-up less than a microsecond while nothing has changed.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spillway_connector.tiers.disk.slab.change_log import EVERYTHING, Change, ChangeLog, place
from spillway_connector.tiers.disk.slab.layout import COLUMNS, Column, SizeClassShape

_NAMED_AT_ONCE = 64  # elements of a column whose changes are named one by one
_CATCH_UP_SECONDS = 0.001  # between two looks whether another thread has brought the copy up to date
_RENEWED_EVERY = 32  # changes under the lock, between two looks whether the ring is there
_KINDS: dict[int, Literal["B", "I", "Q"]] = {1: "B", 4: "I", 8: "Q"}


class FileCut(OSError):
    """The file has not its size or header any more."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the index was cut or overwritten")


class Columns:
    """The columns of one index file, by their names in ``columns``. Takes over ``descriptor``.

    log: of the changes of this file; None while it belongs to this process alone. header: what the file begins with;
    another beginning is never taken over, because the zeros of a file that was cut read as an index without chunks.
    Raises OSError (FileCut) if the file cannot be read. The index, its hash table and its policy refer to it, and it to
    none of them: with a reference cycle, the file and the copy of an index that was replaced would stay until a garbage
    collection, which engines rarely run.
    """

    def __init__(
        self,
        shape: SizeClassShape,
        descriptor: int,
        columns: Sequence[Column] = COLUMNS,
        log: ChangeLog | None = None,
        header: bytes = b"",
    ) -> None:
        self._descriptor = descriptor
        self._header = header
        self._log = log
        self._offsets, self._file_bytes = shape.offsets(columns)
        # mmap for its page alignment; anonymous, so no file is behind it.
        memory = mmap.mmap(-1, self._file_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(memory)
        self._memory = np.frombuffer(memory, np.uint8)
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._places: dict[str, tuple[int, int, memoryview[int]]] = {}
        for column in columns:
            offset, rows = self._offsets[column.name], shape.rows(column)
            array = np.ndarray((rows,), column.dtype, memory, offset)
            array.flags.writeable = False
            self.arrays[column.name] = array
            view = self._view[offset : offset + rows * column.item_bytes].cast(_KINDS[column.item_bytes])
            self._places[column.name] = offset, column.item_bytes, view
        self._counters = [self._offsets[column.name] for column in columns if column.per == "all"]
        self._changes: list[Change] = []
        self._changings = 0
        # Held while the copy is brought up to date, and by the holder of the root's lock: its own changes are not
        # overwritten with what was read before them.
        self._updating = threading.Lock()
        # The holder of the root's lock has read what others changed, and they change nothing until it lets go.
        self._is_current = False
        self.reload()

    def __del__(self) -> None:
        os.close(self._descriptor)

    # --- the copy and the file --------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Read all of the file. Raises OSError (FileCut)."""
        if self._log is not None:
            self._log.skip()
        self.require_whole()
        done = 0
        while done < self._file_bytes:
            count = os.preadv(self._descriptor, [self._view[done:]], done)
            if not count:
                raise FileCut
            done += count
        self.require_whole()  # it may have been cut meanwhile

    def follow(self, *, reload: bool = True) -> bool:
        """Take over what other processes have changed. Without a lock.

        reload: read all of the file if that is needed, some ten milliseconds for a million slots. If it is False, the
        answer is False then, and also if another thread is bringing the copy up to date: nothing is waited for. While
        this process is making changes, its copy is up to date, and nothing is done here. Raises OSError.
        """
        if self._log is None:
            return True
        acquired = self._updating.acquire(blocking=False)
        while not acquired:
            if self._is_current or not reload:
                return self._is_current
            acquired = self._updating.acquire(timeout=_CATCH_UP_SECONDS)
        try:
            return self._follow(reload)
        finally:
            self._updating.release()

    def _follow(self, reload: bool) -> bool:
        assert self._log is not None
        if self._log.news_apply(self._memory):
            return True
        if reload:
            self.reload()
        else:
            self._log.miss()
        return reload

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the columns under the root's lock: within the block the copy is what the file holds, and changes are
        announced.

        Raises OSError (FileCut).
        """
        with self._updating:
            self.require_whole()
            self._changings += 1
            differs = self._log is None or not self._log.news_apply(self._memory) or self._differs()
            if self._log is not None and (differs or self._changings % _RENEWED_EVERY == 1):
                self._log.renew()
            if differs:
                self.reload()
            self._is_current = True
            try:
                yield
            finally:
                self._is_current = False
                self.announce()

    def announce(self) -> None:
        """Announce what was changed. Under the root's lock."""
        records, self._changes = self._changes, []
        if self._log is not None:
            self._log.append(records)

    def _differs(self) -> bool:
        """Whether the file's counters are not the copy's: a process has changed it and announced nothing."""
        first, end = self._counters[0], self._counters[-1] + 8
        return os.pread(self._descriptor, end - first, first) != self._view[first:end]

    def require_whole(self) -> None:
        """The file still has its size and header. Raises OSError (FileCut)."""
        if os.fstat(self._descriptor).st_size != self._file_bytes:
            raise FileCut
        if os.pread(self._descriptor, len(self._header), 0) != self._header:
            raise FileCut

    # --- reading ----------------------------------------------------------------------------------------------------

    def elements(self, name: str, kind: Literal["B", "I", "Q"]) -> memoryview[int]:
        """A column as a memoryview: single elements are read from it several times faster than from an array."""
        offset = self._offsets[name]
        return self._view[offset : offset + self.arrays[name].nbytes].cast(kind).toreadonly()

    def counter(self, name: str) -> int:
        """A column of one element."""
        return self._places[name][2][0]

    def fresh(self, name: str, position: int) -> int:
        """One element as the file has it, because others count hits without the lock; else as the copy has it."""
        view = self._places[name][2]
        with suppress(OSError):
            found = self.in_file(name, position)
            if found is not None:
                view[position] = found
        return view[position]

    def in_file(self, name: str, position: int) -> int | None:
        """One element as it is in the file, announced or not; None if the file was cut. The copy stays as it is.

        Raises OSError.
        """
        offset, item_bytes, _ = self._places[name]
        raw = os.pread(self._descriptor, item_bytes, offset + position * item_bytes)
        return int.from_bytes(raw, "little") if len(raw) == item_bytes else None

    def refresh(self, name: str) -> None:
        """Read a column again. Raises OSError."""
        offset, size = self._offsets[name], self.arrays[name].nbytes
        os.preadv(self._descriptor, [self._view[offset : offset + size]], offset)

    # --- changing ---------------------------------------------------------------------------------------------------

    def put(self, name: str, position: int, value: int) -> None:
        """Change one element of a column. Raises OSError."""
        offset, item_bytes, view = self._places[name]
        at = offset + position * item_bytes
        os.pwrite(self._descriptor, value.to_bytes(item_bytes, "little"), at)
        view[position] = value
        self._changes.append((place(at, item_bytes), value))

    def put_all(self, name: str, values: npt.NDArray[np.generic], first: int = 0) -> None:
        """Change consecutive elements of a column, from the place ``first``. Raises OSError."""
        offset, item_bytes, _ = self._places[name]
        values = np.ascontiguousarray(values, self.arrays[name].dtype)
        raw = memoryview(values.tobytes())
        start = position = offset + first * item_bytes
        self._view[start : start + raw.nbytes] = raw
        if len(values) > _NAMED_AT_ONCE:
            self._changes.append(EVERYTHING)
        else:
            elements = enumerate(values.reshape(-1).tolist())
            self._changes += [(place(start + i * item_bytes, item_bytes), value) for i, value in elements]
        while raw.nbytes:
            written = os.pwrite(self._descriptor, raw, position)
            raw, position = raw[written:], position + written

    def put_at(self, name: str, slots: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        """Change many scattered elements of a column, by writing all of it. Raises OSError."""
        changed = self.arrays[name].copy()
        changed[slots] = values
        self.put_all(name, changed)
