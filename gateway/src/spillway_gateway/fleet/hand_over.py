"""The hand-over between two legs: the prompt that one engine computes reaches a store from which another one loads it.

The first engine announces each chunk that has reached the shared tier. While it computes, the second one gets hints at
what has arrived, so that it loads chunk after chunk; when the first leg has ended, the second waits until the whole
prompt can be loaded, for a bounded time. On the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from spillway_gateway.config.disaggregation import DisaggregationConfig
from spillway_gateway.routing.fleet_view import SplitTerms
from spillway_gateway.routing.load import certain_ms
from spillway_gateway.routing.route import Decision
from spillway_gateway.turns import Turns

LOOK_SECONDS = 0.01
LOOKS_PER_ITERATION = 32  # of the event loop, each of 50 us or less
HINTED_SHARE = 0.25  # of the prompt, that has arrived since the last hint
HALF_LIFE_SECONDS = 10.0  # of what was measured, in the price of a hand-over
FIXED_TOKENS = 1024  # of a prompt of so many, either part of the price moves as much
_NEWEST_WEIGHT = 0.3


class HandOverPrice:
    """Measures how long hand-overs take, in milliseconds: a fixed part, and one for each token.

    clock: monotonic seconds.

    The price returns to the default while no request takes two legs, and a single measurement moves it by a part:
    otherwise one slow hand-over, such as the first behind a gateway that has just begun to follow its engines, would
    make all requests take one leg for as long as it counts. One that is overdue counts in full until it ends, so that
    not all prompts follow one into a link that stands still.
    """

    def __init__(
        self, default_ms: float, clock: Callable[[], float] = time.monotonic, *, counted_from_seconds: float = 0.0
    ) -> None:
        """counted_from_seconds: a hand-over that takes less counts as none."""
        self._default_ms = default_ms
        self._counted_from_seconds = counted_from_seconds
        self._clock = clock
        self._above_ms = self._token_ms = 0.0  # above the default, and for each token
        self._measured_at = clock()
        self._due: dict[Awaited, float] = {}

    @property
    def terms(self) -> tuple[float, float]:
        """The fixed part, and that of a token."""
        now = self._clock()
        kept = math.exp2((self._measured_at - now) / HALF_LIFE_SECONDS)
        overdue_ms = 1000.0 * self._counted(now - min(self._due.values(), default=now))
        return max(self._default_ms + kept * self._above_ms, overdue_ms), kept * self._token_ms

    def ms(self, tokens: int) -> float:
        """The price for a prompt of which so many tokens are handed over."""
        fixed_ms, token_ms = self.terms
        return max(0.0, fixed_ms + token_ms * tokens)

    def measured(self, tokens: int, seconds: float) -> None:
        """Count a hand-over: both parts move by the least that takes the price by a part of the way to what it took (a
        normalised least mean squares filter)."""
        now = self._clock()
        kept = math.exp2((self._measured_at - now) / HALF_LIFE_SECONDS)
        above_ms, token_ms = kept * self._above_ms, kept * self._token_ms
        share = tokens / FIXED_TOKENS
        error_ms = 1000.0 * self._counted(seconds) - self._default_ms - above_ms - token_ms * tokens
        step_ms = _NEWEST_WEIGHT * error_ms / (1.0 + share * share)
        self._above_ms, self._token_ms = above_ms + step_ms, token_ms + step_ms * share / FIXED_TOKENS
        self._measured_at = now

    def awaited(self, tokens: int, seconds: float) -> Awaited:
        """A second leg has begun. seconds: until its first token, if the hand-over took nothing."""
        awaited = Awaited(self, tokens)
        self._due[awaited] = self._clock() + seconds
        return awaited

    def ended(self, awaited: Awaited, *, came: bool) -> None:
        """came: whether its first token came."""
        due = self._due.pop(awaited, None)
        if came and due is not None:
            self.measured(awaited.tokens, self._clock() - due)

    def _counted(self, seconds: float) -> float:
        return seconds if seconds >= self._counted_from_seconds else 0.0


class Awaited:
    """A second leg whose first token is awaited."""

    __slots__ = ("_price", "tokens")

    def __init__(self, price: HandOverPrice, tokens: int) -> None:
        self._price = price
        self.tokens = tokens

    def ended(self, *, came: bool) -> None:
        """came: whether its first token came. May be called more than once."""
        self._price.ended(self, came=came)


class HandOverPrices:
    """The measured times of a model's hand-overs. waits: the time until a computed prompt can be loaded from a store.

    Late second legs come on top: their load from a store, or the transfer by the engines' own connectors, takes longer
    than it was priced, by more than late_seconds. Below that, other requests may be the reason, for which one leg waits
    as well.
    """

    def __init__(self, default_ms: float, late_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.waits = HandOverPrice(default_ms, clock)
        self._late = HandOverPrice(0.0, clock, counted_from_seconds=late_seconds)

    def terms(self, asked: DisaggregationConfig, block_tokens: int) -> SplitTerms:
        """Return what routing asks about two legs of a prompt with blocks of this size."""
        (waits_ms, wait_token_ms), (late_ms, late_token_ms) = self.waits.terms, self._late.terms
        return SplitTerms(
            asked.mode == "always",
            asked.uncached_tokens_min,
            waits_ms + late_ms,
            asked.token_ms_max,
            block_tokens,
            asked.by_connector,
            wait_token_ms + late_token_ms,
        )

    def await_second_leg(self, decision: Decision) -> Awaited:
        """A second leg begins on the engine of this decision."""
        chosen = next(each for each in decision.candidates if each.engine.name == decision.engine_name)
        loaded_tokens = decision.held.cpu_tokens + decision.held.shared_tokens
        return self._late.awaited(loaded_tokens, certain_ms(chosen.engine, chosen.cost) / 1000.0)


class HandOver:
    """The hand-over of one prompt. It begins at once, and end() must follow.

    Args:
        arrived_tokens: those of the prompt that the second engine could load or has.
        wanted_tokens: those that it will be able to load.
        tell: called with the number of tokens that are there, for the second engine.
        price: counts the time that the hand-over took.
        looks: the turns in which all prompts look at what has arrived.
        pause: sleeps for a number of seconds.
    """

    def __init__(
        self,
        arrived_tokens: Callable[[], int],
        wanted_tokens: int,
        tell: Callable[[int], object],
        price: HandOverPrice,
        looks: Turns,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arrived_tokens = arrived_tokens
        self._wanted_tokens = wanted_tokens
        self._tell = tell
        self._price = price
        self._looks = looks
        self._pause = pause
        self._clock = clock
        self._hinted = arrived_tokens()
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        await self._looks.wait()
        while (arrived := self._arrived_tokens()) < self._wanted_tokens:
            if arrived - self._hinted >= HINTED_SHARE * self._wanted_tokens:
                self._hinted = arrived
                self._tell(arrived)
            await self._pause(LOOK_SECONDS)
            await self._looks.wait()

    async def arrived(self, seconds_max: float) -> bool:
        """The first leg has ended: wait until the prompt can be loaded. Returns False if it still cannot after these
        seconds."""
        began = self._clock()
        try:
            async with asyncio.timeout(seconds_max):
                await asyncio.shield(self._following)
        except TimeoutError:
            return False
        finally:
            self.end()
            self._price.measured(self._wanted_tokens, self._clock() - began)
        return True

    def end(self) -> None:
        """Stop following the prompt. May be called more than once."""
        self._following.cancel()
