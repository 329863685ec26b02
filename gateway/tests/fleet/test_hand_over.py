from __future__ import annotations

import asyncio

import pytest

from spillway_gateway.fleet.hand_over import HALF_LIFE_SECONDS, HandOver, HandOverPrice
from spillway_gateway.turns import Turns


class Moving:
    """A prompt that arrives when the test says so; time passes with each look."""

    def __init__(self) -> None:
        self.tokens = 0
        self.hinted: list[int] = []
        self.now = 0.0
        self.price = HandOverPrice(50.0, lambda: self.now)
        self.looks = Turns(32)

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def begin(self, wanted: int) -> HandOver:
        return HandOver(
            lambda: self.tokens,
            wanted,
            self.hinted.append,
            self.price,
            self.looks,
            pause=self.pause,
            clock=lambda: self.now,
        )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_second_engine_is_told_what_has_arrived_while_the_first_computes() -> None:
    moving = Moving()
    hand_over = moving.begin(1000)
    for tokens in (100, 300, 400, 560, 999):
        moving.tokens = tokens
        await settle()
    assert moving.hinted == [300, 560, 999], "a quarter of the prompt each"
    moving.tokens = 1000
    assert await hand_over.arrived(120.0)


async def test_a_prompt_that_does_not_arrive_is_waited_for_no_longer_than_that() -> None:
    moving = Moving()
    hand_over = moving.begin(1000)
    assert not await hand_over.arrived(0.0)
    await settle()
    before = moving.now
    await settle()
    assert moving.now == before, "the prompt is followed no longer"


async def test_the_price_follows_what_hand_overs_take_and_returns_to_the_default() -> None:
    moving = Moving()
    assert moving.price.ms == 50.0
    moving.price.measured(0.35)
    assert 50.0 < moving.price.ms < 150.0, "one slow hand-over does not decide alone"
    for _ in range(20):
        moving.price.measured(0.2)
    assert moving.price.ms == pytest.approx(200.0, abs=1.0)
    moving.now += HALF_LIFE_SECONDS
    assert moving.price.ms == pytest.approx(125.0, abs=1.0)
    moving.now += 100 * HALF_LIFE_SECONDS
    assert moving.price.ms == pytest.approx(50.0)


async def test_a_cancelled_wait_ends_the_following() -> None:
    moving = Moving()
    waiting = asyncio.create_task(moving.begin(10).arrived(120.0))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    before = moving.now
    await settle()
    assert moving.now == before


async def test_few_of_many_prompts_are_looked_at_in_one_iteration() -> None:
    looks, many, per_iteration = 0, 500, 4

    def look() -> int:
        nonlocal looks
        looks += 1
        return 0

    async def pause(seconds: float) -> None:
        await asyncio.sleep(0)

    turns = Turns(per_iteration)
    following = [HandOver(look, 1, lambda tokens: None, HandOverPrice(50.0), turns, pause=pause) for _ in range(many)]
    before = looks
    for _ in range(2 * many // per_iteration):
        await asyncio.sleep(0)
        assert looks - before <= per_iteration
        before = looks
    assert looks >= 2 * many  # each when it began, and once more
    for each in following:
        each.end()
