"""Doing the same for every stripe of a block: one after the other, or in a few threads at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from spillway_connector.errors import without_frames


class Lanes:
    """``count``: how many stripes of one block may be under way at once. threads: of all blocks together."""

    def __init__(self, count: int, threads: int) -> None:
        self._count = count
        self._helpers = ThreadPoolExecutor(threads, "spillway-redis-stripe") if count > 1 else None

    def run(self, indices: Sequence[int], act: Callable[[int], None]) -> None:
        """Do ``act`` for every index, begun in order, here and in helper threads that are free right now.

        Returns or raises the first error only when no thread is at it any more: they work in the caller's memory.
        """
        waiting = deque(indices)
        errors: list[Exception] = []

        def lane() -> None:
            while waiting and not errors:
                try:
                    index = waiting.popleft()
                except IndexError:
                    return
                try:
                    act(index)
                except Exception as error:
                    errors.append(without_frames(error))

        helpers = []
        if self._helpers is not None and len(indices) > 1:
            try:
                helpers = [self._helpers.submit(lane) for _ in range(min(self._count, len(indices)) - 1)]
            except RuntimeError:
                pass  # closed meanwhile: the router says so
        lane()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors.pop(0)  # not held by this frame, which its traceback will hold

    def close(self) -> None:
        """Threads end with what they are at."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False, cancel_futures=True)
