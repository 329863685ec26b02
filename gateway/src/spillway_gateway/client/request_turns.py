"""Requests begin a few at a time: thousands may arrive in one event loop iteration, and streams would wait for all."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

PER_ITERATION = 16  # of half a millisecond each: parsed, then its task's first step


class RequestTurns:
    """The turns of one listener, on its event loop. Who came first begins first."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0  # in this iteration
        self._counts = False

    def take(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], None]) -> bool:
        """Whether a request may begin in this iteration. If not, `begin` is called in the one in which it may."""
        if not self._counts:
            self._counts = True
            loop.call_soon(self._next_iteration, loop)
        if self._begun < PER_ITERATION and not self._waiting:
            self._begun += 1
            return True
        self._waiting.append(begin)
        return False

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = 0
        while self._waiting and self._begun < PER_ITERATION:
            self._begun += 1
            try:
                self._waiting.popleft()()
            except Exception:  # of one connection; the other connections' requests still begin
                logger.exception("a request could not begin")
        self._counts = bool(self._begun or self._waiting)
        if self._counts:
            loop.call_soon(self._next_iteration, loop)
