"""The lock of a node's index, which the scheduler's thread takes within a step.

By ``flock`` on the open file, so a killed holder leaves it, and every process that has mapped the index takes this
lock, even if another file has its name by now. An attempt does not wait, so it keeps the GIL: if it gave the GIL up, a
thread of a shared tier would take it, and the step would wait for that thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from pathlib import Path

from spillway_connector.errors import TierTimeout
from spillway_connector.tiers.disk.file_lock import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS

_TRY, _UNLOCK = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
_flock = ctypes.PyDLL(None).flock


class IndexLock:
    """One thread of a process uses it. `descriptor`: becomes the lock's to close; its file is on this machine."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def acquire(self, patience_seconds: float) -> None:
        """release() must follow. Raises TierTimeout, OSError."""
        if _flock(self._descriptor, _TRY):
            self._wait(patience_seconds)

    def release(self) -> None:
        _flock(self._descriptor, _UNLOCK)

    def _wait(self, patience_seconds: float) -> None:
        pause, deadline = FIRST_RETRY_SECONDS, time.monotonic() + patience_seconds
        while True:
            try:
                return fcntl.flock(self._descriptor, _TRY)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TierTimeout(f"{self._path}: another process held the lock") from None
            time.sleep(pause)  # flock has no timeout of its own
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    def close(self) -> None:
        """Close the lock. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
