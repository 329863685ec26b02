"""A clock that a test advances."""

from __future__ import annotations

import threading


class SteppedClock:
    """Monotonic seconds that only :meth:`advance` changes; may be read and advanced from several threads."""

    def __init__(self, start_seconds: float = 1000.0) -> None:
        self._now = start_seconds
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {-seconds} s")
        with self._lock:
            self._now += seconds
