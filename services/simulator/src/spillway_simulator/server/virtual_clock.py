"""Virtual time from the event loop's clock: `speed` virtual seconds pass per real second."""

from __future__ import annotations

import asyncio


class VirtualClock:
    def __init__(self, loop: asyncio.AbstractEventLoop, speed: float) -> None:
        self._loop = loop
        self._speed = speed
        self._start = loop.time()

    def now(self) -> float:
        return (self._loop.time() - self._start) * self._speed

    def real_time(self, virtual: float) -> float:
        """The loop's time at a virtual time."""
        return self._start + virtual / self._speed

    def real_seconds(self, virtual_seconds: float) -> float:
        return virtual_seconds / self._speed
