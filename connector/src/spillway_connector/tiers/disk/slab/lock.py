"""Who may change the shared index, and which writers are alive: both by ``flock``, which the kernel drops with its
process. So a crash leaves no lock behind, and process ids, which mean nothing across containers, are not needed."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spillway_connector.errors import TierTimeout
from spillway_connector.tiers.tier import Clock

_FIRST_RETRY_SECONDS = 0.0001
_LONGEST_RETRY_SECONDS = 0.002


class RootLock:
    """One holder among all threads and processes. The file at ``path`` is made when missing."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._thread_lock = threading.Lock()
        self._descriptor: int | None = None

    @contextmanager
    def held(self, deadline: float) -> Iterator[None]:
        """Raises TierTimeout, and OSError where the file cannot be opened (FileNotFoundError: no folder)."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self._path}: another thread held the lock")
        try:
            descriptor = self._acquire(deadline)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def close(self) -> None:
        """Let go of the file, unless a thread is using it: then the process's end does."""
        if self._thread_lock.acquire(timeout=0.1):
            try:
                self._forget()
            finally:
                self._thread_lock.release()

    def _acquire(self, deadline: float) -> int:
        pause = _FIRST_RETRY_SECONDS
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() >= deadline:
                    raise TierTimeout(f"{self._path}: another process held the lock") from None
                time.sleep(pause)  # flock has no timeout of its own
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
                continue
            if self._is_current(descriptor):
                return descriptor
            self._forget()  # removed or replaced: nobody else would lock this one

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            on_disk, held = os.stat(self._path), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (on_disk.st_dev, on_disk.st_ino) == (held.st_dev, held.st_ino)

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class WriterBadge:
    """A locked file that says "this writer lives": ``folder/<number in hex>``. Made by :meth:`wear`."""

    def __init__(self, folder: Path) -> None:
        self.number = int.from_bytes(os.urandom(8), "little") | 1  # 0 is nobody
        self._folder = folder
        self._path = folder / f"{self.number:016x}"
        self._descriptor: int | None = None

    def wear(self) -> None:
        """Raises OSError."""
        self.take_off()
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take_off(self) -> None:
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def is_alive(self, number: int) -> bool:
        """Whether the writer of that number still runs; removes the badge of one that does not."""
        if number == self.number:
            return True
        path = self._folder / f"{number:016x}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # out of descriptors, say: no reason to take its slots
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def sweep(self) -> None:
        """Remove the badges of the dead. Runs under the root's lock, under which badges are made."""
        for name in os.listdir(self._folder):
            if len(name) == 16:
                try:
                    self.is_alive(int(name, 16))
                except ValueError:
                    continue
