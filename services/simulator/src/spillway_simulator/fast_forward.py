"""Virtual time without sockets: engines and scheduled actions, in the order of their times, as fast as possible.

For experiments about routing: the caller submits requests at scheduled times, receives progress and events, and
may schedule more. Ties are broken by order of scheduling and then of engines, so a run repeats exactly.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.events import KvEvent
from spillway_simulator.model.request import EngineRequest, Progress


class FastForward:
    """on_progress, on_events: called at the virtual time of `now`, with the engine's position in `engines`."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        on_progress: Callable[[int, Progress], None],
        on_events: Callable[[int, list[KvEvent]], None],
    ) -> None:
        self.engines = tuple(engines)
        self.now = 0.0
        self._on_progress = on_progress
        self._on_events = on_events
        self._appointments: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wakeups: list[tuple[float, int]] = []  # of engines; stale entries are skipped

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action; a time in the past means now."""
        heapq.heappush(self._appointments, (max(seconds, self.now), next(self._numbers), action))

    def submit(self, engine: int, request: EngineRequest) -> None:
        self.engines[engine].submit(request, self.now)
        self._wake(engine)

    def cancel(self, engine: int, request_id: str) -> None:
        self.engines[engine].cancel(request_id, self.now)
        self._wake(engine)

    def _wake(self, engine: int) -> None:
        due = self.engines[engine].next_time
        if due is not None:
            heapq.heappush(self._wakeups, (due, engine))

    def run(self, until: float = float("inf")) -> None:
        """Run until nothing is left to do, or the next thing is later than `until`."""
        while True:
            while self._wakeups and self.engines[self._wakeups[0][1]].next_time != self._wakeups[0][0]:
                heapq.heappop(self._wakeups)
            engine_due = self._wakeups[0][0] if self._wakeups else float("inf")
            action_due = self._appointments[0][0] if self._appointments else float("inf")
            due = min(engine_due, action_due)
            if due > until or due == float("inf"):
                return
            self.now = due
            if action_due <= engine_due:
                heapq.heappop(self._appointments)[2]()
            else:
                self._advance(heapq.heappop(self._wakeups)[1])

    def _advance(self, position: int) -> None:
        engine = self.engines[position]
        progress = engine.advance(self.now)
        events = engine.take_events()
        if events:
            self._on_events(position, events)
        for item in progress:
            self._on_progress(position, item)
        self._wake(position)
