"""The prompts that a step computes: none of a flood's while others have some, a short step's otherwise, and no flood
starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.step_shares import (
    FLOOD_STEPS,
    HELD_SHARE,
    LATELY_SECONDS,
    LEAST_TIMES_KEPT,
    LEAST_TOKENS,
    MEASURED_EVERY,
    PARTIES_MAX,
    STEP_TIMES,
    STEPS_WITHOUT_DECODES_MAX,
    STEPS_WITHOUT_FLOOD_MAX,
    Party,
    Step,
    StepShares,
)

STEP_TOKENS = 1000
USER, FLOOD = Party(b"a", b"user"), Party(b"b", b"flood")
SIBLING = Party(b"a", b"flood")
FLOODING = FLOOD_STEPS * STEP_TOKENS + 1


def of(party: Party, tokens: int | None = None) -> Step:
    return Step(frozenset({party}), tokens)


FLOOD_ONLY = of(FLOOD, LEAST_TOKENS)  # the first two of a flood's steps measure the least time that one takes


def shares_of(*parties: Party) -> StepShares:
    shares = StepShares(STEP_TOKENS)
    for party in parties:
        shares.came(party, 0.0)
    return shares


def test_one_party_alone_has_the_engines_own_steps() -> None:
    shares = shares_of(FLOOD)
    shares.computed_alone(100 * FLOODING, 0.0)
    assert shares.alone(1.0)
    assert shares.next_step([FLOOD], 1.0) is None


@pytest.mark.parametrize("flood", [FLOOD, SIBLING], ids=["another tenant", "another session"])
def test_a_prompt_goes_before_those_of_a_flood_which_gets_few_tokens_in_a_step(flood: Party) -> None:
    shares = shares_of(flood, USER)
    shares.computed({flood: FLOODING}, 0.0)

    assert shares.next_step([flood, USER], 0.0) == of(USER)
    assert shares.next_step([flood], 0.0) == of(flood, LEAST_TOKENS)


def test_what_a_flood_computed_alone_counts_once_another_comes() -> None:
    shares = shares_of(FLOOD)
    shares.computed_alone(2 * FLOODING, 0.0)
    shares.came(USER, 1.0)
    assert shares.next_step([FLOOD], 1.0) == FLOOD_ONLY


def test_those_that_get_about_as_much_have_the_engines_own_steps() -> None:
    shares = shares_of(USER, SIBLING, FLOOD)
    for _ in range(40):
        shares.computed({USER: STEP_TOKENS, SIBLING: STEP_TOKENS, FLOOD: 3 * STEP_TOKENS}, 0.0)
        assert shares.next_step([USER, SIBLING, FLOOD], 0.0) is None


def test_those_that_flood_nobody_share_a_step() -> None:
    shares = shares_of(USER, FLOOD, Party(b"c"))
    shares.computed({FLOOD: FLOODING}, 0.0)
    assert shares.next_step([FLOOD, USER, Party(b"c")], 0.0) == Step(frozenset({USER, Party(b"c")}), None)


def test_of_two_floods_the_one_that_got_less_is_next() -> None:
    other = Party(b"c")
    shares, steps = shares_of(USER, FLOOD, other), Counter[Party]()
    shares.computed({FLOOD: FLOODING, other: FLOODING}, 0.0)
    for _ in range(40):
        step = shares.next_step([FLOOD, other], 0.0)
        assert step is not None and step.tokens is not None
        (party,) = step.parties
        steps[party] += 1
        shares.computed({party: step.tokens}, 0.0)
    assert abs(steps[FLOOD] - steps[other]) <= 2


def test_who_takes_little_floods_nobody_however_little_others_take() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: FLOOD_STEPS * STEP_TOKENS}, 0.0)
    assert shares.next_step([FLOOD], 0.0) is None


def test_a_party_that_left_is_not_waited_for() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: FLOODING}, LATELY_SECONDS + 1)
    assert shares.alone(LATELY_SECONDS + 1)
    assert shares.next_step([FLOOD], LATELY_SECONDS + 1) is None


def test_a_tenant_floods_the_engine_however_many_sessions_it_has() -> None:
    sessions = [Party(b"b", b"%d" % number) for number in range(10)]
    shares = shares_of(USER, *sessions)
    shares.computed({session: FLOODING // 5 for session in sessions}, 0.0)
    assert shares.next_step([*sessions, USER], 0.0) == of(USER)


def test_a_party_whose_step_computes_nothing_is_passed_over_until_another_has_computed_something() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: FLOODING}, 0.0)

    assert shares.next_step([USER, FLOOD], 0.0) == of(USER)
    shares.passed_over({USER})
    assert shares.next_step([USER, FLOOD], 0.0) == Step(frozenset({FLOOD}), None, begins=False)
    shares.computed({FLOOD: 10}, 0.0)
    assert shares.next_step([USER, FLOOD], 0.0) == of(USER)


def test_a_flood_gets_the_engines_own_step_after_a_few_without_it() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: FLOODING}, 0.0)
    for _ in range(3):
        for _ in range(STEPS_WITHOUT_FLOOD_MAX):
            assert shares.next_step([USER, FLOOD], 0.0) == of(USER)
            shares.computed({USER: 10}, 0.0)
        assert shares.next_step([USER, FLOOD], 0.0) is None


@pytest.mark.parametrize("under_way", [0, 1], ids=["one step at a time", "the next one is planned meanwhile"])
@pytest.mark.parametrize(
    ("least_seconds", "free_tokens", "each"), [(0.02, 500, 4e-5), (0.3, 200, 1e-3), (0.012, 0, 2e-5)]
)
def test_a_floods_step_takes_little_longer_than_the_least(
    least_seconds: float, free_tokens: int, each: float, under_way: int
) -> None:
    """Tokens up to `free_tokens` cost nothing: they are computed while the weights are read."""

    def seconds_of(tokens: int) -> float:
        return least_seconds + max(0, tokens - free_tokens) * each

    shares, now = shares_of(USER, FLOOD), 1.0
    shares.computed({FLOOD: 2 * FLOODING}, now)
    took: list[float] = []
    for _ in range(600):
        shares.came(USER, now)
        step = shares.next_step([FLOOD], now, [USER])
        assert step is not None and step.tokens is not None and not step.held_seconds
        shares.computed({FLOOD: step.tokens}, now)
        took.append(seconds_of(step.tokens))
        now += took[-1 - under_way] if len(took) > under_way else 0.0
    settled, goal = took[300:], STEP_TIMES * seconds_of(LEAST_TOKENS)
    assert max(settled) <= 1.15 * goal
    assert sum(1 for one in settled if one >= goal / 1.15) > 0.9 * len(settled)


@pytest.mark.parametrize("planning", [0.001, 0.004, 0.01], ids="{} s".format)
def test_while_others_may_ask_a_floods_step_is_a_short_one_and_the_next_is_planned_late(planning: float) -> None:
    """Asynchronous scheduling makes a plan when the step before the last has ended, or later if it is held."""
    shares, now, ended, took = shares_of(USER, FLOOD), 1.0, [0.0, 1.0], 0.02
    shares.computed({FLOOD: 10 * FLOODING}, now)
    held_seconds, waits = 0.0, list[float]()
    for number in range(600):
        now = max(ended[-2] + held_seconds, now + planning)
        shares.came(USER, now)
        step = shares.next_step([FLOOD], now)
        assert step is not None and step.tokens is not None and (step.tokens == LEAST_TOKENS or number == 2)
        shares.computed({FLOOD: step.tokens}, now)
        held_seconds = step.held_seconds
        ended.append(max(ended[-1], now + planning) + took)
        waits.append(held_seconds)
    held = [each for each in waits[300:] if each]
    assert len(held) >= 300 * 61 // 64
    assert max(held) == pytest.approx(HELD_SHARE * took) and min(held) == pytest.approx(HELD_SHARE * took)


def test_a_plan_is_held_no_longer_than_the_last_measured_step_allows() -> None:
    shares, now = shares_of(USER, FLOOD), 0.0
    shares.computed({FLOOD: 10 * FLOODING}, now)

    def held_after(took: float) -> float:
        """The wait for a plan, behind so many steps that one of them is measured."""
        nonlocal now
        held_seconds = 0.0
        for _ in range(MEASURED_EVERY):
            shares.came(USER, now)
            step = shares.next_step([FLOOD], now)
            assert step is not None and step.tokens is not None
            shares.computed({FLOOD: step.tokens}, now)
            held_seconds = step.held_seconds or held_seconds
            now += max(took, step.held_seconds)
        return held_seconds

    for _ in range(LEAST_TIMES_KEPT):
        held_after(0.06)
    assert held_after(0.06) == pytest.approx(HELD_SHARE * 0.06)
    assert held_after(0.02) == pytest.approx(HELD_SHARE * 0.02), "steps became shorter"
    assert held_after(0.06) == pytest.approx(HELD_SHARE * 0.06), "one step was measured wrongly"
    assert held_after(0.09) == pytest.approx(HELD_SHARE * 0.06)


def test_others_who_have_a_request_in_the_engine_are_not_awaited() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: 10 * FLOODING}, 0.0)
    steps = [shares.next_step([FLOOD], 0.0, [USER]) for _ in range(4)]
    assert [step.tokens for step in steps if step is not None] == [LEAST_TOKENS, LEAST_TOKENS, 256, 256]


def test_who_takes_far_less_than_a_flood_is_none_however_little_a_third_takes() -> None:
    shares = shares_of(USER, FLOOD, Party(b"probe"))
    shares.computed({FLOOD: 20 * FLOODING, USER: FLOODING, Party(b"probe"): 1}, 0.0)
    assert shares.floods(FLOOD, 0.0) and not shares.floods(USER, 0.0)
    assert shares.next_step([USER, FLOOD], 0.0) == of(USER)


@given(
    st.lists(
        st.tuples(st.sampled_from(["flood", "both", "user"]), st.floats(0, 10), st.integers(0, 2_000)), max_size=200
    )
)
def test_whatever_steps_take_a_floods_step_has_some_tokens_and_no_more_than_the_engines(
    steps: list[tuple[str, float, int]],
) -> None:
    shares, now = shares_of(USER, FLOOD), 0.0
    shares.computed({FLOOD: 10**9}, now)
    for who, seconds, computed in steps:
        now += seconds
        shares.came(USER, now)
        waiting = {"flood": [FLOOD], "both": [FLOOD, USER], "user": [USER]}[who]
        step = shares.next_step(waiting, now)
        if step is not None:
            assert step.parties <= set(waiting)
            assert step.tokens is None or LEAST_TOKENS <= step.tokens <= STEP_TOKENS
        shares.computed({waiting[-1]: computed}, now)


def test_parties_that_compute_as_much_have_the_engines_own_steps_however_much_that_is() -> None:
    parties = [Party(b"a", b"%d" % number) for number in range(20)]
    shares = shares_of(*parties)
    for number in range(400):
        now = number * 0.3
        assert shares.next_step(parties, now) is None
        shares.computed(dict.fromkeys(parties, STEP_TOKENS), now)


def test_a_step_is_the_engines_own_once_nobody_can_compute_anything() -> None:
    shares = shares_of(USER, FLOOD)
    shares.computed({FLOOD: FLOODING}, 0.0)
    for party in (USER, FLOOD):
        step = shares.next_step([USER, FLOOD], 0.0)
        assert step is not None and step.parties == {party}
        shares.passed_over(step.parties)
    assert shares.next_step([USER, FLOOD], 0.0) is None
    assert shares.next_step([USER, FLOOD], 0.0) is not None


@given(st.lists(st.integers(1, 3), min_size=20, max_size=60))
def test_no_flood_starves_though_new_parties_come_for_ever(arrivals: list[int]) -> None:
    shares = shares_of(FLOOD, USER)
    shares.computed({FLOOD: 100 * FLOODING}, 0.0)
    newest, between = 0, 0
    waiting = [FLOOD]
    for count in arrivals:
        for _ in range(count):
            newest += 1
            waiting.append(Party(b"%d" % newest))
            shares.came(waiting[-1], 0.0)
        step = shares.next_step(waiting, 0.0)
        between = 0 if step is None or FLOOD in step.parties else between + 1
        assert between <= STEPS_WITHOUT_FLOOD_MAX
        shares.computed(dict.fromkeys(waiting if step is None else step.parties, 10), 0.0)
        waiting = [FLOOD]


@given(st.lists(st.tuples(st.sets(st.sampled_from([USER, FLOOD, SIBLING])), st.booleans()), max_size=60))
def test_no_request_is_left_out_of_two_steps_in_a_row_while_it_decodes(steps: list[tuple[set[Party], bool]]) -> None:
    shares = shares_of(USER, FLOOD, SIBLING)
    shares.computed({FLOOD: 100 * FLOODING, SIBLING: 10 * FLOODING}, 0.0)
    paused = 0
    for waiting, has_room in steps:
        step = shares.next_step(waiting, 0.0, [USER, FLOOD, SIBLING])
        pauses = step.pauses if step is not None else frozenset()
        assert step is None or (pauses <= {FLOOD, SIBLING} and step.parties.isdisjoint(pauses))
        paused = paused + 1 if pauses else 0
        assert paused <= STEPS_WITHOUT_DECODES_MAX
        if has_room:
            shares.computed(dict.fromkeys(waiting if step is None else step.parties, 10), 0.0)
        elif step is not None:
            shares.passed_over(step.parties)


def test_few_parties_are_remembered() -> None:
    shares = StepShares(STEP_TOKENS)
    for number in range(10 * PARTIES_MAX):
        party = Party(b"%d" % number)
        shares.came(party, 0.0)
        shares.computed({party: 1}, 0.0)
    assert len(shares._parties) == len(shares._tenants) == PARTIES_MAX
