"""The blocks that a waiting prompt would find on an engine that has room again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.prefix import PromptBlocks

CURRENT_SECONDS = 1.0  # so long an answer of the index is taken for true
KEYS_PER_SECOND = 1_000  # that one waiting prompt looks up at most; a longer prompt gets an older answer


class WaitingPrompt:
    """One per request in the queue. On the event loop.

    Args:
        fleet: the engines, and the index of what they hold.
        prompt: the keys of its blocks.
        only: the one engine that can answer; None: any.
        engine_requests_max: an engine with fewer requests has room.
        clock: monotonic seconds.
    """

    __slots__ = ("_clock", "_engine_requests_max", "_fleet", "_held", "_only", "_prompt", "_until")

    def __init__(
        self,
        fleet: ModelFleet,
        prompt: PromptBlocks,
        only: str | None,
        engine_requests_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._prompt = prompt
        self._only = only
        self._engine_requests_max = engine_requests_max
        self._clock = clock
        self._held: Mapping[str, HeldPrefix] = {}
        self._until = float("-inf")

    def tokens_at_hand(self) -> int:
        """Tokens on the device and in the CPU tier of the engine with room that holds most."""
        now = self._clock()
        if now >= self._until:
            self._held = self._fleet.held(self._prompt)
            self._until = now + CURRENT_SECONDS + len(self._prompt.keys) / KEYS_PER_SECOND
        return max(
            (held.device_tokens + held.cpu_tokens for name, held in self._held.items() if self._has_room(name)),
            default=0,
        )

    def _has_room(self, name: str) -> bool:
        engine = self._fleet.engines.get(name)
        if engine is None or (self._only is not None and name != self._only):
            return False
        return engine.routable and engine.running_requests < self._engine_requests_max
