"""Processes that may hold claims on slots: each has a lease, a locked file in the root.

The lock is a ``flock``, which the kernel releases when the process ends, so a lease cannot outlive its holder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from spillway_connector.own_files import clear_the_place, open_own, unlink_own

_DEPTH = 3  # slab/writers/<number> below the root, see own_files.py


def new_number() -> int:
    return int.from_bytes(os.urandom(8), "little") | 1  # 0: no owner


class WriterLease:
    """The lease of one writer: the file ``folder/<number in hex>``, locked from :meth:`acquire` to :meth:`release`.

    number: random, not 0, 64 bits; the index names the owner of a slot by it. A writer of several processes gives each
    of them the number of the first, and holds its lease until the last has ended.
    """

    def __init__(self, folder: Path, shared_number: int | None = None) -> None:
        """shared_number: the number of a writer of several processes, from :func:`new_number`."""
        self.number = new_number() if shared_number is None else shared_number
        self._is_shared = shared_number is not None
        self._folder = folder
        self._path = folder / f"{self.number:016x}"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Make and lock the file, again if need be. Under the root's lock. Raises OSError."""
        self.release()
        clear_the_place(self._path, _DEPTH)
        self._descriptor = open_own(self._path, os.O_CREAT | os.O_RDWR, _DEPTH)
        fcntl.flock(self._descriptor, (fcntl.LOCK_SH if self._is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def release(self) -> None:
        """Remove and unlock the file; one of several processes leaves it to :meth:`sweep`. Raises OSError."""
        if self._descriptor is not None:
            try:
                if not self._is_shared:
                    unlink_own(self._path, _DEPTH, missing_ok=True)
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    @property
    def is_removed(self) -> bool:
        """Whether someone has removed the file that this process holds: others take its writer for dead."""
        return self._descriptor is not None and not os.fstat(self._descriptor).st_nlink

    def is_held(self, number: int) -> bool:
        """Whether the writer of that number still runs. The file of one that does not is removed."""
        return bool(self.look(number, removes=True))

    def look(self, number: int, *, removes: bool = False) -> bool | None:
        """Whether the writer of that number still runs; None if there is no file: it never began, or somebody has
        removed its file. removes: the file of one that does not run."""
        if number == self.number:
            return True
        path = self._folder / f"{number:016x}"
        try:
            clear_the_place(path, _DEPTH)
            descriptor = open_own(path, os.O_RDONLY, _DEPTH)
        except FileNotFoundError:
            return None
        except OSError:
            return True  # not known, for example for want of descriptors: its slots stay claimed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if removes:
                unlink_own(path, _DEPTH, missing_ok=True)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def remove(self, number: int) -> None:
        """The file of a writer that does not run any more. Raises OSError."""
        unlink_own(self._folder / f"{number:016x}", _DEPTH, missing_ok=True)

    def sweep(self) -> list[int]:
        """Remove the files of writers that no longer run, and return the numbers of the others that do.

        Under the root's lock, under which leases are acquired.
        """
        running = []
        for name in os.listdir(self._folder):
            if len(name) == 16:
                try:
                    number = int(name, 16)
                except ValueError:
                    continue
                if self.is_held(number) and number != self.number:
                    running.append(number)
        return running
