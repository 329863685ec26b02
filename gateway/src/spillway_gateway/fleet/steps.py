"""Work on the event loop in short steps, so that streams are served in between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

WAITING_MAX = 256  # pieces of work; the oldest is given up for a further one


class Steps:
    """Pieces of work, one after another; each a sequence of steps of which one event loop iteration takes one. The
    first step of a piece is taken at once if no other waits, so short work needs no event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque(maxlen=WAITING_MAX)
        self._scheduled = False

    def run(self, work: Iterator[None]) -> None:
        """Take all steps. The work must be such that it may be given up between two of them."""
        if not self._waiting and _ended(work):
            return
        self._waiting.append(work)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def soon(self, work: Iterator[None]) -> None:
        """Run the work like run(), but later, when the work that runs now has ended: no client waits for it. It runs
        at once if no event loop does, as in virtual time."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.run(work)
        else:
            loop.call_soon(self.run, work)

    def _step(self) -> None:
        self._scheduled = False
        if _ended(self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._step)


def _ended(work: Iterator[None]) -> bool:
    return next(work, _END) is _END


_END = object()
