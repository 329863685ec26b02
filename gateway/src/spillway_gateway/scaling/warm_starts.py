"""A new engine's warm start: the prefixes that most requests share are promoted into its CPU tier while it gets few
requests, for `routing.warmStartSeconds` at most.

They go the way of promotion hints. An engine may refuse them, or find nothing to promote; either costs time alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from spillway_gateway.routing.prefix import PromptTokens

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
BUSY_SECONDS = 0.1  # before an engine that is busy with other hints is sent the next one
PREFIXES_MAX = 32


class Hints(Protocol):
    """Sends an engine the first tokens of a prompt, as many as are given; see upstream/promotion_hints.py."""

    def send(self, engine: Engine, tokens: PromptTokens, first: int) -> Awaitable[str]: ...


class WarmStarts:
    """The warm starts of all new engines, on the event loop.

    outcomes: of engines by model: nothing (no prefix is hot and in a shared tier), warmed (all were accepted), late
    (the time was over, or the engine was gone), refused (the engine takes no hints).
    """

    def __init__(
        self,
        fleets: Sequence[ModelFleet],
        hot_of: Callable[[ModelFleet], HotPrefixes],
        hints: Hints,
        *,
        lies_in_store: Callable[[ModelFleet, HotPrefix], bool],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """hot_of: the hot prefixes of a model. lies_in_store: whether engines can load one."""
        self._fleets = fleets
        self._hot_of = hot_of
        self._hints = hints
        self._lies_in_store = lies_in_store
        self._clock = clock
        self._pause = pause
        self._under_way: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Warm new engines until cancelled."""
        try:
            while True:
                await self._pause(LOOK_SECONDS)
                for fleet in self._fleets:
                    for engine in fleet.engines.values():
                        if engine.routable and engine.take_warm_start():
                            task = asyncio.create_task(self._follow(fleet, engine))
                            self._under_way.add(task)
                            task.add_done_callback(self._under_way.discard)
        finally:
            for task in self._under_way:
                task.cancel()

    async def _follow(self, fleet: ModelFleet, engine: Engine) -> None:
        outcome = "late"
        try:
            outcome = await self.warm(fleet, engine)
        finally:
            self.outcomes[fleet.name, outcome] += 1
        logger.info("model %s: engine %s: warm start: %s", fleet.name, engine.name, outcome)

    async def warm(self, fleet: ModelFleet, engine: Engine) -> str:
        """Send one engine what is hot; returns the outcome."""
        hot = [
            each
            for each in self._hot_of(fleet).hottest(PREFIXES_MAX, self._clock())
            if self._lies_in_store(fleet, each)
        ]
        if not hot:
            return "nothing"
        engine.begin_warm_start()
        for each in hot:
            while True:
                if not engine.routable or not engine.in_warm_start(self._clock()):
                    return "late"
                answer = await self._hints.send(engine, each.tokens, each.prompt_tokens)
                if answer != "busy":
                    break
                await self._pause(BUSY_SECONDS)
            if answer != "accepted":
                engine.end_warm_start()
                return "refused"
        return "warmed"  # the engine promotes them until its warm start is over

    def families(self) -> Iterable[CounterMetricFamily]:
        """The metric family of what became of warm starts."""
        starts = CounterMetricFamily(
            "spillway_gateway_warm_starts", "Warm starts of new engines, by outcome.", labels=("model", "outcome")
        )
        for (model, outcome), count in self.outcomes.items():
            starts.add_metric((model, outcome), count)
        return (starts,)
