"""Write coalescing: writes of one event loop iteration are sent together at its end.

A write wakes its reader, and if the reader sleeps on the same machine, waking it costs more than the write. Under
load many requests share an iteration, and an engine or a client is woken once for all of them instead of once for each.
A single request has nothing to share, and its writes go out at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)


class WriteCoalescer:
    """One per event loop, used on its thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._writes: list[Callable[[], None]] = []
        self._requests = 0  # in progress

    @classmethod
    def of_running_loop(cls) -> WriteCoalescer:
        loop = asyncio.get_running_loop()
        found = _of_loop.get(loop)
        if found is None:
            found = _of_loop[loop] = cls(loop)
        return found

    def begin_request(self) -> None:
        self._requests += 1

    def end_request(self) -> None:
        self._requests -= 1

    @property
    def active(self) -> bool:
        """Whether a write that is due now should be deferred."""
        return self._requests > 1

    def defer(self, write: Callable[[], None]) -> None:
        """Call `write` once at the end of this iteration, before the loop polls its sockets."""
        if not self._writes:
            self._call_soon(self._flush)
        self._writes.append(write)

    def _flush(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            try:
                write()
            except Exception:  # of one connection; the other connections' bytes are still sent
                logger.exception("a write failed")


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, WriteCoalescer] = WeakKeyDictionary()
