from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing import hot_prefixes
from spillway_gateway.routing.hot_prefixes import (
    COUNTED_PER_SECOND,
    DEPTHS,
    DRAWN_OF,
    HALF_LIFE_SECONDS,
    HotPrefix,
    HotPrefixes,
)
from spillway_gateway.routing.prefix import KEYS_MAX, chain_blocks, namespace_key, token_bytes

BLOCK = 4
BLOCK_BYTES = 4 * BLOCK


def request(hot: HotPrefixes, tokens: list[int], now: float = 0.0, salt: str | None = None) -> None:
    data = token_bytes(tokens)
    hot.requested(chain_blocks(namespace_key("m", None, salt), data, BLOCK_BYTES), data, BLOCK_BYTES, salt, now)


def blocks(*numbers: int) -> list[int]:
    return [number for number in numbers for _ in range(BLOCK)]


def tokens_of(found: HotPrefix) -> list[int]:
    return list(memoryview(found.tokens.ids).cast("I"))


def test_depths_reach_the_longest_prompt_in_few_steps() -> None:
    assert DEPTHS[:8] == tuple(range(1, 9)) and KEYS_MAX * 4 // 5 < DEPTHS[-1] <= KEYS_MAX
    assert list(DEPTHS) == sorted(set(DEPTHS)) and len(DEPTHS) < 50


def test_what_many_requests_begin_with_is_hot_and_comes_with_its_tokens() -> None:
    hot = HotPrefixes()
    for number in range(6):
        request(hot, blocks(1, 2, 3, 100 + number, 200), salt="s")
    (found,) = hot.hottest(8, 0.0)

    assert (found.blocks, found.prompt_tokens, tokens_of(found)) == (3, 3 * BLOCK, blocks(1, 2, 3))
    assert found.tokens.cache_salt == "s"


def test_prompts_that_are_little_longer_than_what_they_share_are_enough() -> None:
    hot = HotPrefixes()
    for number in range(6):
        request(hot, blocks(*range(64), 1000 + number, 2000 + number))
    (found,) = hot.hottest(8, 0.0)
    assert found.blocks == max(depth for depth in DEPTHS if depth <= 64)


def test_requests_count_half_after_each_half_life_however_long_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that grow without end would exceed what a float holds."""
    monkeypatch.setattr(hot_prefixes, "HALF_LIVES_MAX", 2)
    hot = HotPrefixes()
    for at in range(40):
        for number in range(3):
            request(hot, blocks(1, 2, 3, 1000 * at + number), now=at * HALF_LIFE_SECONDS)
    (found,) = hot.hottest(8, 39 * HALF_LIFE_SECONDS)
    assert found.requests == pytest.approx(6)
    assert hot.hottest(8, 10_000 * HALF_LIFE_SECONDS) == []


def test_the_turns_of_one_conversation_in_any_order_are_not_hot() -> None:
    hot = HotPrefixes()
    for turn in (66, 70, 64, 68, 65, 90, 67):
        request(hot, blocks(*range(turn)))
    assert hot.hottest(8, 0.0) == []


def test_the_turns_of_one_conversation_are_not_hot() -> None:
    hot = HotPrefixes()
    for turn in range(2, 40):
        request(hot, blocks(*range(turn)))
    assert hot.hottest(8, 0.0) == []


def test_the_prefix_that_saves_most_comes_first_and_what_it_begins_with_is_left_out() -> None:
    hot = HotPrefixes()
    for number in range(5):
        request(hot, blocks(1, 2, 3, 4, 5, 6, 7, 8, 1000 + number))
    for number in range(6):
        request(hot, blocks(9, 2000 + number))
    assert [tokens_of(found) for found in hot.hottest(8, 0.0)] == [blocks(*range(1, 9)), blocks(9)]
    assert len(hot.hottest(1, 0.0)) == 1


def test_what_nobody_asks_for_any_more_cools_down() -> None:
    hot = HotPrefixes()
    for number in range(6):
        request(hot, blocks(1, 2, number + 10))
    assert hot.hottest(8, HALF_LIFE_SECONDS) and not hot.hottest(8, 10 * HALF_LIFE_SECONDS)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sampled_from([None, "a", "b"])), max_size=40),
    st.integers(0, 9),
)
def test_whatever_is_requested_a_hot_prefix_is_one_that_requests_share(
    prompts: list[tuple[list[int], str | None]], count: int
) -> None:
    hot = HotPrefixes()
    for at, (numbers, salt) in enumerate(prompts):
        request(hot, blocks(*numbers), float(at), salt)
    found = hot.hottest(count, float(len(prompts)))

    assert len(found) <= count
    for each in found:
        tokens = tokens_of(each)
        same = [numbers for numbers, salt in prompts if salt == each.tokens.cache_salt]
        asked = [numbers for numbers in same if blocks(*numbers)[: len(tokens)] == tokens]
        assert len(asked) >= hot_prefixes.REQUESTS_MIN
        assert len({tuple(numbers) for numbers in asked}) >= 2
        key = chain_blocks(namespace_key("m", None, each.tokens.cache_salt), each.tokens.ids, BLOCK_BYTES)[-1]
        assert (each.key, each.prompt_tokens) == (key, each.blocks * BLOCK)


def test_of_many_requests_in_a_second_some_count_for_all() -> None:
    draw = random.Random(1).random
    hot, counted, further = HotPrefixes(draw), 0, 4_000
    for number in range(COUNTED_PER_SECOND + further):
        if count := hot.counts_for(7.5):
            counted += 1
            data = token_bytes(blocks(1, 2, 100 + number))
            hot.requested(
                chain_blocks(namespace_key("m"), data, BLOCK_BYTES), data, BLOCK_BYTES, None, 7.5, count=count
            )
    (found,) = hot.hottest(1, 7.5)

    assert counted == pytest.approx(COUNTED_PER_SECOND + further / DRAWN_OF, rel=0.1)
    assert found.blocks == 2 and found.requests == pytest.approx(COUNTED_PER_SECOND + further, rel=0.1)
    assert [hot.counts_for(8.1) for _ in range(COUNTED_PER_SECOND)] == [1] * COUNTED_PER_SECOND


def test_entries_and_tokens_are_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(hot_prefixes, "ENTRIES_MAX", 20)
    monkeypatch.setattr(hot_prefixes, "TOKEN_BYTES_MAX", 10 * BLOCK_BYTES)
    hot = HotPrefixes()
    for family in range(10):
        for number in range(6):
            request(hot, blocks(family, family + 1, family + 2, 1000 * family + number))
            assert len(hot) <= 20 and hot.token_bytes <= 10 * BLOCK_BYTES
    assert hot.hottest(1, 0.0)
