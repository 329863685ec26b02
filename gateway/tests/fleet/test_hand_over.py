from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_price_follows_what_hand_overs_take_and_returns_to_the_default() -> None:
    moving = Moving()
    assert moving.price.ms(500) == 50.0
    moving.price.measured(500, 0.35)
    assert 50.0 < moving.price.ms(500) < 150.0, "one slow hand-over does not decide alone"
    for _ in range(20):
        moving.price.measured(500, 0.2)
    assert moving.price.ms(500) == pytest.approx(200.0, abs=1.0)
    moving.now += HALF_LIFE_SECONDS
    assert moving.price.ms(500) == pytest.approx(125.0, abs=1.0)
    moving.now += 100 * HALF_LIFE_SECONDS
    assert moving.price.ms(500) == pytest.approx(50.0)


@given(st.floats(0, 500), st.floats(0, 1), st.permutations([256, 1024, 2048, 8192]))
def test_the_price_of_each_length_is_learned_from_all(fixed_ms: float, token_ms: float, lengths: list[int]) -> None:
    price = HandOverPrice(50.0, lambda: 0.0)
    for tokens in lengths * 200:
        price.measured(tokens, (fixed_ms + token_ms * tokens) / 1000.0)
    for tokens in (128, 4096, 16_384):
        assert price.ms(tokens) == pytest.approx(fixed_ms + token_ms * tokens, rel=0.1, abs=5.0)


@given(st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 100), st.floats(0, 60)), max_size=30))
def test_no_price_is_negative_or_without_a_bound(measured: list[tuple[int, float, float]]) -> None:
    moving = Moving()
    for tokens, seconds, pause in measured:
        moving.price.measured(tokens, seconds)
        moving.now += pause
    fixed_ms, token_ms = moving.price.terms
    assert math.isfinite(fixed_ms) and math.isfinite(token_ms)
    assert all(moving.price.ms(tokens) >= 0.0 for tokens in (0, 1000, 100_000))


def test_what_is_overdue_counts_until_it_ends_and_its_time_then() -> None:
    moving = Moving()
    first, second = moving.price.awaited(4096, 0.5), moving.price.awaited(4096, 0.7)
    moving.now += 0.5
    assert moving.price.ms(4096) == 50.0
    moving.now += 3.0
    assert moving.price.ms(4096) == pytest.approx(3000.0), "no other prompt follows it"
    first.ended(came=False)
    assert moving.price.ms(4096) == pytest.approx(2800.0)
    second.ended(came=True)
    second.ended(came=True)
    assert moving.price.ms(4096) == pytest.approx(50.0 + 0.3 * (2800.0 - 50.0))


def test_a_second_leg_that_is_late_by_less_than_a_bound_counts_as_in_time() -> None:
    moving = Moving()
    price = HandOverPrice(0.0, lambda: moving.now, counted_from_seconds=2.0)
    for late, expected in ((1.9, 0.0), (2.1, 0.3 * 2100.0)):
        awaited = price.awaited(0, 0.1)
        moving.now += 0.1 + late
        if not expected:
            assert price.ms(0) == 0.0
        awaited.ended(came=True)
        assert price.ms(0) == pytest.approx(expected)


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
