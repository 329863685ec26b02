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

from spillway_gateway.turns import Turns

LOOK_SECONDS = 0.01
LOOKS_PER_ITERATION = 32  # of the event loop, each of 50 us or less
HINTED_SHARE = 0.25  # of the prompt, that has arrived since the last hint
HALF_LIFE_SECONDS = 10.0  # of what was measured, in the price of a hand-over
_NEWEST_WEIGHT = 0.3


class HandOverPrice:
    """Measures how long hand-overs take, in milliseconds. clock: monotonic seconds.

    The price returns to the default while no request takes two legs, and a single measurement moves it by a part:
    otherwise one slow hand-over, such as the first behind a gateway that has just begun to follow its engines, would
    make all requests take one leg for as long as it counts.
    """

    def __init__(self, default_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._default_ms = default_ms
        self._clock = clock
        self._above_default_ms = 0.0
        self._measured_at = clock()

    @property
    def ms(self) -> float:
        age_seconds = self._clock() - self._measured_at
        return self._default_ms + self._above_default_ms * math.exp2(-age_seconds / HALF_LIFE_SECONDS)

    def measured(self, seconds: float) -> None:
        """Count the time from the end of a first leg until its prompt could be loaded, or was given up."""
        now_ms = self.ms
        self._above_default_ms = now_ms + _NEWEST_WEIGHT * (1000.0 * seconds - now_ms) - self._default_ms
        self._measured_at = self._clock()


class HandOver:
    """The hand-over of one prompt. It begins at once, and end() must follow.

    Args:
        arrived_tokens: those of the prompt that the second engine could load or has.
        wanted_tokens: those that it will be able to load.
        tell: called with the number of tokens that are there, for the second engine.
        price: called with the time that the hand-over took.
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
        """The first leg has ended: wait until the prompt can be loaded. False: it still cannot after these seconds."""
        began = self._clock()
        try:
            async with asyncio.timeout(seconds_max):
                await asyncio.shield(self._following)
        except TimeoutError:
            return False
        finally:
            self.end()
            self._price.measured(self._clock() - began)
        return True

    def end(self) -> None:
        """Stop following the prompt. May be called more than once."""
        self._following.cancel()
