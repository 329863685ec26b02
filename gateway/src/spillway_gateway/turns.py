"""Turns for work on the event loop: thousands of sockets may have some in one iteration, and streams would wait for all
of it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Turns:
    """The turns of one kind of work, on one event loop. The work that came first begins first.

    cost_max: the cost of the work that begins in one iteration; its last piece may exceed it.
    """

    def __init__(self, cost_max: int) -> None:
        self.cost_max = cost_max
        self._waiting: OrderedDict[Callable[[], None], int] = OrderedDict()  # a dict is slow to find its first key
        self._spent = 0  # in this iteration
        self._counts = False

    @property
    def spent(self) -> bool:
        """Whether no more may begin in this iteration."""
        return self._spent >= self.cost_max or bool(self._waiting)

    def take(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], None], cost: int = 1) -> bool:
        """Return whether the work may begin in this iteration. If not, `begin` is called in the iteration in which
        it may, unless leave() is called before. It must not wait already."""
        if not self.spent:
            self._spent += cost
            if self._counts or 2 * self._spent < self.cost_max:  # so little may count for a later iteration, too
                return True
            begins = True
        else:
            self._waiting[begin] = cost
            begins = False
        if not self._counts:
            self._counts = True
            loop.call_soon(self._next_iteration, loop)
        return begins

    def leave(self, begin: Callable[[], None]) -> None:
        """Forget the work if it still waits: it would take the place of others, and be kept."""
        self._waiting.pop(begin, None)

    async def wait(self, cost: int = 1) -> None:
        """Return in an iteration in which the work may begin."""
        came = asyncio.Event()
        if not self.take(asyncio.get_running_loop(), came.set, cost):
            try:
                await came.wait()
            finally:
                self.leave(came.set)

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._spent = 0
        while self._waiting and self._spent < self.cost_max:
            begin, cost = self._waiting.popitem(last=False)
            self._spent += cost
            try:
                begin()
            except Exception:  # of one connection; the other connections' work still begins
                logger.exception("work whose turn had come could not begin")
        self._counts = bool(self._spent or self._waiting)
        if self._counts:
            loop.call_soon(self._next_iteration, loop)
