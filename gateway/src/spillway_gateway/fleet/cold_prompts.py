"""A bound on cold prompts that engines compute at a time: the others wait here, and warm ones pass them.

A prompt is cold if it takes an engine COLD_PROMPT_SECONDS or more: a conversation's first turn, or any turn after the
engine that served it has died. The blocks of a cold prompt evict blocks that others on its engine are about to use. If
all sessions of a dead engine came to the remaining engines at once, each of these would evict its own sessions while it
computes them, and those sessions would then come as cold prompts too. So an engine is sent no more of them than keep it
busy for COLD_SECONDS. If prompts find less than half of their tokens anywhere, most evicted blocks would not have been
found anyway, so no prompt waits.

None waits for longer than OVERTAKE_SECONDS, as in the engines' own queue, and none fails because of it. Those that wait
for one engine are sent in order of arrival. When an engine's state changes, all are routed again, a few in each event
loop iteration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.route import Decision
from spillway_gateway.turns import Turns
from spillway_settings.queue_order import OVERTAKE_SECONDS

COLD_SECONDS = 0.3  # of an engine's prefill: longer than a request takes until its engine computes it
COLD_PROMPT_SECONDS = 0.1
COLD_TOKENS_MIN = 1_024  # fewer to compute evict little, and many of them may be on their way at once
ROUTED_PER_ITERATION = 16  # of the event loop, when an engine came or went
CACHED_SHARE_MIN = 0.5  # of the prompt tokens of the last requests: with less, waits protect less than they cost


def is_cold(engine: Engine, decision: Decision) -> bool:
    """Whether the engine has much of the prompt to compute."""
    least = COLD_PROMPT_SECONDS * engine.rates.prefill_tokens_per_second
    return decision.uncached_tokens >= max(COLD_TOKENS_MIN, least)


def being_computed(
    first_block: int, engines: Mapping[str, Engine], tried: Collection[str], held: Mapping[str, HeldPrefix]
) -> tuple[int, int]:
    """(from, to): the tokens of a prompt that an engine computes at the moment for another one of the same burst.

    Args:
        first_block: the key of the prompt's.
        engines: by name.
        tried: those that failed for the prompt.
        held: by engine; with what engines were sent and have not computed yet.
    """
    computed = 0, 0
    for name, found in held.items():
        engine = engines.get(name)
        if engine is not None and engine.prefills.cold_tokens and engine.routable and name not in tried:
            begin = engine.prefills.computes_from(first_block)
            if begin is not None and found.total_tokens > max(begin, computed[1]):
                computed = begin, found.total_tokens
    return computed


class ColdTurn:
    """One prompt's wait. urgent: it does not wait."""

    __slots__ = ("engine", "until", "urgent", "wake", "woken")

    def __init__(self, *, urgent: bool = False) -> None:
        self.urgent = urgent
        self.until: float | None = None  # monotonic seconds; None: it has not been held back
        self.engine: Engine | None = None  # that it waits for
        self.wake: Callable[[], None] | None = None  # called when it is to be routed again
        self.woken = False  # and has not been routed since


class ColdPrompts:
    """The cold prompts of one model that wait. On the event loop. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns = Turns(ROUTED_PER_ITERATION)
        self.waiting: dict[ColdTurn, None] = {}  # in order of arrival

    def holds(self, turn: ColdTurn, engine: Engine) -> bool:
        """Whether a cold prompt that was routed to this engine has to wait before it is sent."""
        if turn.urgent or engine.means.cached_share < CACHED_SHARE_MIN:
            return False
        now = self._clock()
        if turn.until is None:
            if self._has_room(engine) and not self._first_of(engine):
                return False
            turn.until = now + OVERTAKE_SECONDS
        elif now >= turn.until or self._has_room(engine):
            return False
        before, turn.engine = turn.engine, engine
        passes_on = turn.woken and before is not engine
        turn.woken = False
        self.waiting.setdefault(turn)
        if passes_on and before is not None:
            self.left(before)
        return True

    async def wait(self, turn: ColdTurn) -> None:
        """Returns when a prompt that was held back is to be routed again. leave() must follow in the end."""
        assert turn.until is not None
        if turn.woken:
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def begin() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> None:
            if self._turns.take(loop, begin):
                begin()

        turn.wake = wake
        try:
            async with asyncio.timeout(max(0.0, turn.until - self._clock())):
                await woken
        except TimeoutError:
            await self._turns.wait()
        finally:
            turn.wake = None

    def leave(self, turn: ColdTurn) -> None:
        """Give the prompt's place to the next one: it was sent, or its request has ended."""
        if turn in self.waiting:
            del self.waiting[turn]
            if turn.woken and turn.engine is not None:
                self.left(turn.engine)

    def left(self, engine: Engine) -> None:
        """A prompt has left the engine's queue, or was sent to it: the next one may have room."""
        if self.waiting and self._has_room(engine):
            first = self._first_of(engine)
            if first is not None:
                self._wake(first)

    def changed(self) -> None:
        """An engine came or went."""
        for turn in list(self.waiting):
            self._wake(turn)

    def _has_room(self, engine: Engine) -> bool:
        return engine.prefills.cold_tokens < COLD_SECONDS * engine.rates.prefill_tokens_per_second

    def _first_of(self, engine: Engine) -> ColdTurn | None:
        """The first that waits for the engine and has not been woken."""
        for turn in self.waiting:
            if turn.engine is engine and not turn.woken:
                return turn
        return None

    def _wake(self, turn: ColdTurn) -> None:
        if turn.woken:  # it has its turn, which a second one would take from another prompt
            return
        turn.woken = True
        if turn.wake is not None:
            turn.wake()
