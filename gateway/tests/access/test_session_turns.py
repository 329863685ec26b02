from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access import session_turns
from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.access.session_turns import OLDEST_EVERY, REQUEST_TOKENS, SESSIONS_MAX, Session, SessionTurns
from spillway_gateway.config.settings import AdmissionConfig

AGENT, USER = 1, 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def served_in_order(
    arrivals: list[tuple[str, Session, int]], *, half_life_seconds: float = 60.0
) -> list[tuple[str, Session, int]]:
    """The order in which requests, which all wait behind one that runs, are served; each counts its tokens.

    arrivals: tenant, session, tokens to compute.
    """
    config = AdmissionConfig(session_half_life_seconds=half_life_seconds, normal_wait_seconds=1e6)
    admission = Admission(config, lambda: 1, clock=Clock())
    await admission.enter("first", Priority.NORMAL)
    order: list[tuple[str, Session, int]] = []

    async def go(tenant: str, session: Session, tokens: int) -> None:
        await admission.enter(tenant, Priority.NORMAL, session=session)
        admission.turns.charge(tenant, session, tokens)
        order.append((tenant, session, tokens))

    tasks = [asyncio.create_task(go(*arrival)) for arrival in arrivals]
    await asyncio.sleep(0)
    for _ in tasks:
        admission.leave(*order[-1][:2] if order else ("first",))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return order


@pytest.mark.parametrize(("half_life_seconds", "place"), [(60.0, 1), (0.0, 50)])
async def test_a_burst_of_one_session_delays_another_of_its_tenant_by_one_place(
    half_life_seconds: float, place: int
) -> None:
    burst = [("a", AGENT, 5_000)] * 50
    order = await served_in_order([*burst, ("a", USER, 100)], half_life_seconds=half_life_seconds)

    assert order.index(("a", USER, 100)) == place


async def test_a_burst_that_names_no_session_counts_as_one() -> None:
    order = await served_in_order([*[("a", None, 5_000)] * 50, ("a", USER, 100)])

    assert order.index(("a", USER, 100)) == 1


async def test_tenants_still_take_turns_whatever_their_sessions_are() -> None:
    arrivals = [("a", session, 10) for session in range(8)] + [("b", AGENT, 9_000)] * 8
    order = await served_in_order(arrivals)

    assert [tenant for tenant, _, _ in order] == ["a", "b"] * 8


async def test_sessions_get_the_same_tokens_and_not_the_same_number_of_requests() -> None:
    order = await served_in_order([*[("a", AGENT, 10_000)] * 40, *[("a", USER, 1_000)] * 40])
    counts = Counter(session for _, session, _ in order[:28])

    assert counts[USER] > 2 * counts[AGENT]
    assert counts[AGENT] >= 28 // OLDEST_EVERY


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 9_000)), min_size=1, max_size=60))
def test_no_session_starves_though_new_ones_come_without_end(steps: list[tuple[int, int, int]]) -> None:
    """The oldest request is served in at most OLDEST_EVERY turns, in any order of arrivals and turns."""
    clock = Clock()
    turns = SessionTurns(60.0, clock)
    waiting: list[tuple[int, int]] = [(0, 0)]
    passed_over = 0
    for number, (newcomers, session, tokens) in enumerate(steps):
        waiting += [(1_000 * (number + 1) + each, session) for each in range(newcomers + 1)]
        positions = turns.next_of("a", [each for _, each in waiting])
        assert len({waiting[at][1] for at in positions}) == 1
        taken = positions[-1]  # the worst that the rule among them may choose
        passed_over = 0 if taken == 0 else passed_over + 1
        same_session = len({each for _, each in waiting}) == 1
        assert passed_over < OLDEST_EVERY or same_session
        if same_session:
            passed_over = 0  # the bound on overtaking holds among them (test_admission.py)
        turns.charge("a", waiting.pop(taken)[1], tokens)
        clock.now += tokens / 1_000


async def test_a_flooding_session_is_served_though_new_sessions_come_at_each_turn() -> None:
    turns = SessionTurns(60.0, Clock())
    turns.charge("a", AGENT, 1_000_000)
    waiting: list[Session] = [AGENT] * 5
    served = []
    for newcomer in range(100, 120):
        waiting.append(newcomer)
        at = turns.next_of("a", waiting)[0]
        served.append(waiting.pop(at))
        turns.charge("a", served[-1], 10)

    assert served.count(AGENT) == 20 // OLDEST_EVERY


def test_what_a_session_got_counts_half_after_each_half_life() -> None:
    clock = Clock()
    turns = SessionTurns(60.0, clock)
    turns.charge("a", AGENT, 800)
    clock.now = 60.0
    turns.charge("a", AGENT, 100)
    clock.now = 120.0

    assert turns.tokens_of("a", AGENT) == pytest.approx(250)
    assert turns.tokens_of("b", AGENT) == 0


def test_what_a_session_got_is_counted_after_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that grow without end would exceed what a float holds."""
    monkeypatch.setattr(session_turns, "HALF_LIVES_MAX", 2)
    clock = Clock()
    turns = SessionTurns(60.0, clock)
    turns.charge("a", AGENT, 800)
    turns.charge("a", USER, 80)
    for _ in range(5):
        clock.now += 60.0
        turns.charge("a", USER, 10)

    assert turns.tokens_of("a", AGENT) == pytest.approx(800 / 32)
    assert turns.tokens_of("a", USER) == pytest.approx(80 / 32 + 10 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16))
    assert list(turns.next_of("a", [AGENT, USER])) == [1]
    clock.now += 60.0 * 10_000
    assert turns.tokens_of("a", AGENT) == 0.0
    turns.charge("a", AGENT, 7)
    assert turns.tokens_of("a", AGENT) == 7.0


def test_sessions_without_end_take_bounded_memory_of_their_tenant_alone() -> None:
    turns = SessionTurns(60.0, Clock())
    turns.charge("b", AGENT, 5)
    for session in range(SESSIONS_MAX + 10):
        turns.charge("a", session, 5)

    assert [turns.tokens_of("a", session) for session in (9, 10)] == [0.0, 5.0]
    assert turns.tokens_of("b", AGENT) == 5.0


def test_the_sessions_of_all_tenants_together_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant that was served least recently loses its oldest one."""
    monkeypatch.setattr(session_turns, "ALL_SESSIONS_MAX", 4)
    turns = SessionTurns(60.0, Clock())
    for tenant, session in (("a", 1), ("b", 1), ("b", 2), ("a", 2), ("c", 1), ("d", 1), ("e", 1)):
        turns.charge(tenant, session, 5)

    known = {(tenant, session) for tenant in "abcde" for session in (1, 2) if turns.tokens_of(tenant, session)}
    assert known == {("a", 2), ("c", 1), ("d", 1), ("e", 1)}


async def test_a_request_that_does_not_wait_counts_too() -> None:
    admission = Admission(AdmissionConfig(), lambda: 1, clock=Clock())
    await admission.enter("a", Priority.NORMAL, session=AGENT)

    assert admission.turns.tokens_of("a", AGENT) == REQUEST_TOKENS
