from __future__ import annotations

import math
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.queue_order import CANDIDATES_MAX, admission_order, next_due

SECONDS = st.integers(0, 40).map(float)


def order(arrived_at: list[float], at_hand: list[int], now: float, bound: float = 4.0) -> list[int]:
    return admission_order(arrived_at, at_hand.__getitem__, now, bound)


def test_the_most_tokens_at_hand_come_first_and_equal_ones_as_they_came():
    assert order([0.0, 1.0, 2.0, 3.0], [1, 5, 1, 9], now=3.0) == [3, 1, 0, 2]
    assert order([0.0, 1.0, 2.0, 3.0], [0, 0, 0, 0], now=3.0) == [0, 1, 2, 3]


def test_who_has_waited_for_the_bound_goes_before_all_younger_ones_in_order_of_arrival():
    assert order([0.0, 1.0, 2.0, 3.0], [0, 1, 8, 9], now=5.0) == [0, 1, 3, 2]
    assert order([2.0, -math.inf, 1.0, 3.0], [9, 0, 0, 8], now=5.5) == [1, 2, 0, 3]


def test_nobody_is_asked_what_it_finds_who_cannot_be_overtaken():
    asked: list[int] = []

    def at_hand(position: int) -> int:
        asked.append(position)
        return 0

    assert admission_order([0.0, 1.0, 9.0], at_hand, 9.0, 4.0) == [0, 1, 2]
    assert asked == [2]
    assert admission_order([0.0, 1.0], at_hand, 9.0, 4.0) == [0, 1]
    assert asked == [2]


@given(st.lists(st.tuples(SECONDS, st.integers(0, 9)), max_size=20), SECONDS, st.floats(0.5, 10))
def test_every_request_is_in_the_order_once_and_its_rule_holds_for_each_pair(
    waiting: list[tuple[float, int]], now: float, bound: float
):
    arrived_at, at_hand = [at for at, _ in waiting], [tokens for _, tokens in waiting]
    admitted = order(arrived_at, at_hand, now, bound)

    assert sorted(admitted) == list(range(len(waiting)))
    for at, first in enumerate(admitted):
        for second in admitted[at + 1 :]:
            first_is_due, second_is_due = now - arrived_at[first] >= bound, now - arrived_at[second] >= bound
            assert first_is_due >= second_is_due
            if second_is_due:
                assert arrived_at[first] <= arrived_at[second]
            elif not first_is_due:
                assert at_hand[first] >= at_hand[second]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1000)), min_size=1, max_size=300),
    slots=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    bound=st.integers(1, 20).map(float),
)
def test_nobody_starves_whatever_others_find(arrivals: list[tuple[int, int]], slots: list[int], bound: float):
    """A queue of which the candidates at the head are ordered, and any number of slots each second: none is admitted
    before a request that has waited for the bound, but those that came before it."""
    queue: list[tuple[int, float, int]] = []  # number, arrival, tokens at hand; in order of arrival
    numbers, now = count(), 0.0
    incoming = iter(arrivals)
    for at in range(2_000):
        more = next(incoming, None)
        if more is not None:
            many, tokens = more
            queue += [(next(numbers), now, (tokens * (one + 1)) % 97) for one in range(many)]
        for _ in range(slots[at % len(slots)] if more is not None else 3):
            if not queue:
                break
            head = queue[:CANDIDATES_MAX]
            chosen = head[order([came for _, came, _ in head], [found for *_, found in head], now, bound)[0]]
            queue.remove(chosen)
            assert not any(now - came >= bound and number < chosen[0] for number, came, _ in queue)
        if more is None and not queue:
            break
        now += 1.0
    assert not queue


@given(st.lists(SECONDS, max_size=10), SECONDS, st.integers(1, 10).map(float))
def test_the_order_is_current_until_the_next_request_has_waited_for_the_bound(
    arrived_at: list[float], now: float, bound: float
):
    until = next_due(arrived_at, now, bound)

    assert until > now
    due = [now - came >= bound for came in arrived_at]
    assert (until == math.inf) is all(due)
    if until < math.inf:
        assert [until - came >= bound for came in arrived_at] != due
