from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.prefill_queue import ColdPrompt, PrefillQueue

RATE = 1_000.0


def test_what_the_oldest_prompt_has_computed_does_not_count() -> None:
    now = 0.0
    queue = PrefillQueue(lambda: now)
    queue.add("first", 10_000)
    now = 4.0
    queue.add("second", 2_000)

    assert queue.tokens == 12_000
    assert queue.tokens_left(now, RATE) == 8_000  # the second has not begun
    assert queue.tokens_left(60.0, RATE) == 2_000
    now = 11.0
    queue.remove("first")
    assert queue.tokens_left(now, RATE) == queue.tokens == 2_000
    now = 12.5
    assert queue.tokens_left(now, RATE) == 500
    queue.remove("second")
    assert queue.tokens_left(now, RATE) == queue.tokens == 0


def test_an_engine_that_was_idle_begins_with_the_next_prompt() -> None:
    now = 0.0
    queue = PrefillQueue(lambda: now)
    queue.add("first", 10)
    queue.remove("first")
    queue.remove("first")
    now = 100.0
    queue.add("second", 500)

    assert queue.tokens_left(now, RATE) == 500


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9), st.integers(1, 5_000)), max_size=40), st.floats(1.0, 1e6))
def test_between_nothing_and_all_that_was_sent_is_left(
    steps: list[tuple[float, int, int]], tokens_per_second: float
) -> None:
    now = 0.0
    queue = PrefillQueue(lambda: now)
    open_prompts: dict[int, int] = {}
    for seconds, request, tokens in steps:
        now += seconds
        if open_prompts.pop(request, None) is None:
            open_prompts[request] = tokens
            queue.add(request, tokens)
        else:
            queue.remove(request)
        others = sum(open_prompts.values()) - next(iter(open_prompts.values()), 0)

        assert queue.tokens == sum(open_prompts.values())
        assert others <= queue.tokens_left(now + 1.0, tokens_per_second) <= queue.tokens


def test_a_burst_is_computed_from_where_its_oldest_cold_prompt_is() -> None:
    queue = PrefillQueue(lambda: 0.0)
    queue.add("first", 5_000, ColdPrompt(1, 100))
    queue.add("second", 500, ColdPrompt(1, 5_100))
    queue.add("other", 5_000, ColdPrompt(2, 0))
    queue.add("warm", 10)

    assert [queue.computes_from(block) for block in (1, 2, 3)] == [100, 0, None]
    queue.remove("first")
    assert (queue.computes_from(1), queue.cold_tokens) == (5_100, 5_500)
    for request in ("second", "second", "other", "warm"):
        queue.remove(request)
    assert [queue.computes_from(block) for block in (1, 2)] == [None, None]
