"""A lock file that one thread of one process holds at a time.

It uses ``flock``, which the kernel releases when its holder ends: a crash leaves no lock behind, and process ids, which
mean nothing across containers, are not needed.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spillway_connector.errors import TierTimeout
from spillway_connector.own_files import clear_the_place, open_own
from spillway_connector.tiers.tier import Clock

FIRST_RETRY_SECONDS = 0.0001
LONGEST_RETRY_SECONDS = 0.002
_CLOSE_SECONDS = 0.1


class FileLock:
    """The lock on the file at ``path``, which is made when missing. Safe from several threads.

    depth, links, owners_checked: see own_files.py.
    """

    def __init__(
        self, path: Path, clock: Clock, depth: int = 1, *, links: int = 1, owners_checked: bool = True
    ) -> None:
        self.path = path
        self._depth = depth
        self._links = links
        self._owners_checked = owners_checked
        self._clock = clock
        self._thread_lock = threading.Lock()
        self._descriptor: int | None = None
        self._file: tuple[int, int] | None = None  # device and inode of what was opened by name

    @contextmanager
    def held(self, deadline: float) -> Iterator[int]:
        """Hold the lock; yields the descriptor of the file, open for reading and writing.

        Raises TierTimeout, and OSError if the file cannot be opened (FileNotFoundError: its folder is missing).
        """
        descriptor = self.acquire(deadline)
        try:
            yield descriptor
        finally:
            self.release()

    def acquire(self, deadline: float) -> int:
        """Acquire the lock as :meth:`held` does; release() must follow."""
        lock = self._thread_lock
        if not lock.acquire(blocking=False) and not lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self.path}: another thread held the lock")
        try:
            return self._acquire(deadline)
        except BaseException:
            self._thread_lock.release()
            raise

    def release(self) -> None:
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._thread_lock.release()

    def close(self) -> None:
        """Close the file. While another thread holds the lock it stays open until the process ends."""
        if self._thread_lock.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._close_file()
            finally:
                self._thread_lock.release()

    def _acquire(self, deadline: float) -> int:
        pause = FIRST_RETRY_SECONDS
        while True:
            if self._descriptor is None:
                self._descriptor = self._open()
                status = os.fstat(self._descriptor)
                self._file = status.st_dev, status.st_ino
            descriptor = self._descriptor
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() >= deadline:
                    raise TierTimeout(f"{self.path}: another process held the lock") from None
                time.sleep(pause)  # flock has no timeout of its own
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)
                continue
            if self._is_current():
                return descriptor
            self._close_file()  # removed or replaced: other processes lock the file that has the name now

    def _open(self) -> int:
        clear_the_place(self.path, self._depth, links=self._links)
        flags = os.O_CREAT | os.O_RDWR
        return open_own(self.path, flags, self._depth, links=self._links, owners_checked=self._owners_checked)

    def _is_current(self) -> bool:
        try:
            on_disk = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (on_disk.st_dev, on_disk.st_ino) == self._file

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
