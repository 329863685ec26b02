"""Writes of one turn of the event loop, sent together at its end.

A write wakes its reader, and where the reader sleeps on the same machine, waking it costs more than the write. Under
load many requests share a turn of the loop, and an engine or a client is woken once for all of them instead of once for
each. A single request has nothing to share, and its writes go out at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)


class TurnWrites:
    """One per event loop. requests: served now; who serves one counts it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._writes: list[Callable[[], None]] = []
        self.requests = 0

    @classmethod
    def here(cls) -> TurnWrites:
        """Of the running loop."""
        loop = asyncio.get_running_loop()
        found = _of_loop.get(loop)
        if found is None:
            found = _of_loop[loop] = cls(loop)
        return found

    @property
    def shared(self) -> bool:
        """Whether a write that is due now should wait for the end of the turn."""
        return self.requests > 1

    def at_end(self, write: Callable[[], None]) -> None:
        """write: called once, before the loop looks for news from outside again."""
        if not self._writes:
            self._call_soon(self._send)
        self._writes.append(write)

    def _send(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            try:
                write()
            except Exception:  # of one connection; the others' bytes must leave
                logger.exception("a write failed")


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnWrites] = WeakKeyDictionary()
