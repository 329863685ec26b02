"""One operation for every stripe of a block: in sequence, or on a few threads in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from spillway_connector.errors import without_frames


class Lanes:
    """``count``: the number of stripes of one block that are processed in parallel. threads: those for all blocks
    together."""

    def __init__(self, count: int, threads: int) -> None:
        self._count = count
        self._helpers = ThreadPoolExecutor(threads, "spillway-redis-stripe") if count > 1 else None

    def run(self, indices: Sequence[int], act: Callable[[int], None]) -> None:
        """Call ``act`` for every index, started in order, on this thread and on helper threads that are free now.

        Returns, or raises the first error, only after all threads have finished: they write to the caller's memory.
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
                pass  # closed meanwhile: the router raises that
        lane()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors.pop(0)  # not held by this frame, which its traceback will hold

    def close(self) -> None:
        """Threads end after their current stripe."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False, cancel_futures=True)
