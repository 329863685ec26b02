from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.sessions import (
    LATE_DEVIATIONS_MAX,
    Habits,
    SessionFollower,
    SessionHint,
    SessionTimes,
    SessionUse,
    expected_at,
    session_tag,
)

ANN, BOB = b"tenant-a", b"tenant-b"


def turn(follower: SessionFollower, hint: SessionHint, begin: float, end: float, tenant: bytes = ANN) -> SessionUse:
    follower.begin_request(tenant, hint, begin)
    return follower.end_request(tenant, hint, end)


def test_an_announced_return_counts_from_the_end_of_the_request():
    use = turn(SessionFollower(), SessionHint(b"one", return_seconds=30.0), 0.0, 8.0)
    assert use == SessionUse(ANN, session_tag(SessionHint(b"one")), (), False, 30.0, 30.0 + LATE_DEVIATIONS_MAX * 30.0)


def test_while_a_request_runs_its_session_cannot_be_late():
    follower, hint = SessionFollower(), SessionHint(b"one", return_seconds=1.0)
    follower.begin_request(ANN, hint, 0.0)
    use = follower.use(ANN, hint, [b"a"], 0.0)
    assert (use.due_seconds, use.late_seconds) == (1.0, None)
    assert follower.end_request(ANN, hint, 5.0).late_seconds == 61.0, "a minute, while nothing is known of its pauses"


def test_a_session_that_names_itself_is_expected_after_its_usual_pause():
    follower, hint = SessionFollower(), SessionHint(b"one")
    assert turn(follower, hint, 0.0, 8.0).due_seconds is None
    assert not follower.is_expected(ANN, hint)
    assert turn(follower, hint, 48.0, 50.0).due_seconds == 40.0
    assert follower.is_expected(ANN, hint) and not follower.is_expected(BOB, hint)
    assert turn(follower, hint, 70.0, 71.0).due_seconds == 30.0, "half of the newest"


def _tenant_with_pauses(pauses: Sequence[float]) -> tuple[SessionTimes, SessionTimes]:
    """Two sessions of a tenant that have ended a request, the first 4 s before the second, at 1000 s."""
    habits = Habits()
    first, second = SessionTimes(ANN, habits), SessionTimes(ANN, habits)
    for session, last in ((first, 996.0), (second, 1000.0)):
        habits.begun()
        now = last - sum(pauses) - len(pauses) - 1.0
        for pause in (*pauses, None):
            session.begin_request(None, now)
            session.end_request(now + 1.0)
            now += 1.0 + (pause or 0.0)
    return first, second


def test_of_sessions_with_regular_pauses_the_one_that_has_been_idle_for_longer_comes_back_first():
    first, second = _tenant_with_pauses([9.0, 11.0] * 10)
    assert first.habits.chance == 0.0
    assert first.due_from(1001.0) == first.due_at < second.due_from(1001.0) == second.due_at


def test_a_session_whose_pauses_are_chance_has_the_likelier_ended_the_longer_it_has_been_idle():
    rng = random.Random(1)
    first, second = _tenant_with_pauses([rng.expovariate(1 / 10.0) for _ in range(60)])
    assert first.habits.chance == 1.0
    away = [first.due_from(now) - now for now in (1000.0, 1015.0, 1030.0)]
    assert away == sorted(away) and away[0] > 0, "the longer, the later"
    assert first.due_from(1030.0) > second.due_from(1030.0)
    first.begin_request(7.0, 1030.0)
    first.end_request(1031.0)
    assert first.due_from(1032.0) == 1038.0, "its client announced it"


def test_a_session_whose_request_runs_comes_back_after_one_that_pauses_if_pauses_are_chance():
    first, second = _tenant_with_pauses([1.0, 20.0, 4.0, 30.0, 2.0] * 10)
    first.usual_duration = 60.0
    first.begin_request(None, 1000.0)
    first.used(1000.0)
    assert first.due_from(1001.0) > second.due_from(1001.0) + 50.0


@given(st.lists(st.floats(0.0, 1e6), max_size=30), st.floats(0.0, 1e9))
def test_a_session_is_due_at_a_time_whatever_its_pauses_were(pauses: list[float], idle: float):
    first, _ = _tenant_with_pauses(pauses)
    due = first.due_from(1000.0 + idle)
    assert due is None or not math.isnan(due)


def test_a_session_is_expected_the_later_the_longer_it_is_overdue():
    times = SessionTimes(ANN, Habits())
    for begin in (0.0, 3.0):
        times.begin_request(None, begin)
        times.end_request(begin + 2.0)
    assert times.due_from(5.5) == times.due_at == 6.0
    assert (times.due_from(7.0), times.due_from(9.0)) == (9.0, 15.0)
    times.begin_request(1.0, 10.0)
    times.end_request(10.0)
    assert times.due_from(12.0) == 14.0, "whatever its client announced"


def test_a_session_is_gone_after_several_of_its_tenants_pauses_unless_it_is_in_use():
    habits = Habits()
    times = SessionTimes(ANN, habits)
    times.end_request(0.0)
    assert not times.is_gone(1e6), "nothing is known of its pauses"
    for begin in (2.0, 6.0):
        times.begin_request(None, begin)
        assert not times.is_gone(1e6)
        times.end_request(begin + 2.0)
    assert times.due_at == 10.0
    assert not times.is_gone(15.0)
    assert times.is_gone(17.0)
    habits.paused(100.0, first=False)  # another session of the tenant: its own pauses may have been short by chance
    assert not times.is_gone(17.0)
    times.begin_request(None, 22.0)
    assert not times.is_gone(1e6)


@given(requests=st.integers(1, 70), sessions=st.integers(3, 40), longer=st.integers(0, 40))
def test_a_session_is_over_after_as_many_requests_as_most_of_its_tenants_were(requests, sessions, longer):
    habits, now = Habits(), 0.0

    def served(count: int) -> SessionTimes:
        nonlocal now
        times = SessionTimes(ANN, habits)
        for _ in range(count):
            times.begin_request(None, now)
            times.end_request(now + 1.0)
            now += 2.0
        return times

    for _ in range(longer):
        served(requests + 1)
        now += 100.0
    for _ in range(sessions):
        served(requests)
        now += 100.0
    times = served(requests)
    counted = min(requests, 64)
    if requests < 64 and sessions + longer < 128:
        assert times.is_over == (longer + 2 < (sessions + longer + 2) / 3)
    assert not served(counted - 1).is_over
    times.begin_request(30.0, now)
    times.end_request(now + 1.0)
    assert not times.is_over, "its client announces another"


def test_a_name_that_is_used_again_after_its_session_was_gone_begins_again():
    habits, now = Habits(), 0.0
    for _ in range(6):
        times = SessionTimes(ANN, habits)
        for _ in range(3):
            times.begin_request(None, now)
            times.end_request(now + 1.0)
            now += 2.0
        assert times.due_at is not None
        now += 600.0
    assert times.is_gone(now) and times.is_over
    times.begin_request(None, now)
    times.end_request(now + 1.0)
    assert not times.is_over, "the first request of three"


def test_however_many_questions_are_asked_once_few_are_remembered_and_they_are_known_for_it():
    habits = Habits()
    for number in range(4000):
        times = SessionTimes(ANN, habits)
        times.begin_request(None, number / 50)
        times.end_request(number / 50)
        assert len(habits._idle) <= 128
    assert times.is_over
    times.begin_request(3600.0, 100.0)  # its client announces when it comes back
    times.end_request(100.0)
    assert times not in [other for other, _ in habits._idle]


def test_one_that_comes_back_after_a_day_changes_its_tenants_habits_little():
    habits = Habits()
    for pause in (0.0, *[2.0] * 100):
        habits.paused(pause, first=False)
    habits.paused(86_400.0, first=False)
    assert habits.pause is not None and habits.pause <= 2.6
    for _ in range(100):
        habits.paused(60.0, first=False)
    assert habits.pause == pytest.approx(60.0, rel=0.01), "a habit that changes is learned"


def test_a_session_that_comes_back_after_all_was_not_gone():
    habits, now = Habits(), 0.0
    sessions = [SessionTimes(ANN, habits) for _ in range(6)]
    for turn_number in range(2):
        for times in sessions:
            times.begin_request(None, now)
            times.end_request(now + 1.0)
            now += 100.0
        assert all(times.is_over for times in sessions) == (turn_number == 0)
    assert not habits.rarely_go_on(1)


@given(
    due=st.floats(-1e6, 1e6),
    late=st.floats(0, 1e4),
    now=st.floats(-1e6, 1e6),
    waits=st.floats(0, 1e6),
    other=st.floats(0, 1e6),
)
def test_an_idle_session_is_never_expected_in_the_past_nor_sooner_than_before(due, late, now, waits, other):
    expected = expected_at(due, due + late, now)
    assert expected >= max(due, now)
    assert expected_at(due, due + late, now + waits) >= expected, "a session is not expected sooner because time passes"
    assert expected_at(due, math.inf, due + waits) < math.inf, "one that cannot be late is expected"
    if max(due, due + other) < now <= due + late:
        later = expected_at(due + other, due + other + late, now)
        assert later <= expected, "of two that are overdue the one that is so for longer comes back last"


def test_a_session_has_ended_when_its_last_request_has():
    follower, last = SessionFollower(), SessionHint(b"one", ended=True)
    follower.begin_request(ANN, SessionHint(b"one"), 0.0)
    follower.begin_request(ANN, last, 1.0)
    assert not follower.end_request(ANN, last, 2.0).ended, "one still runs"
    assert follower.end_request(ANN, last, 3.0).ended
    assert turn(follower, SessionHint(b"one"), 9.0, 10.0).due_seconds is None, "what came before is forgotten"


def test_the_tag_is_the_names():
    tags = {session_tag(SessionHint(name)) for name in (b"one", b"two", b"one")}
    assert len(tags) == 2 and {len(tag) for tag in tags} == {8}


@given(st.lists(st.tuples(st.sampled_from([ANN, BOB]), st.integers(0, 9), st.booleans()), max_size=60))
def test_sessions_are_bounded_and_the_tenant_with_the_most_loses_its_oldest(steps):
    follower = SessionFollower(sessions_max=4)
    used: dict[tuple[bytes, int], None] = {}  # the least recently used first
    for at, (tenant, number, ended) in enumerate(steps):
        if (tenant, number) not in used and len(used) == 4:
            counts = Counter(name[0] for name in used)
            crowded = max(counts, key=lambda one: (counts[one], one == tenant))
            del used[next(name for name in used if name[0] == crowded)]
        used.pop((tenant, number), None)
        used[tenant, number] = None
        turn(follower, SessionHint(b"%d" % number, ended), float(at), float(at), tenant)
        if ended:
            del used[tenant, number]
        table = follower._sessions
        assert len(table) == len(used)
        assert all(table.get((name, b"%d" % other)) is not None for name, other in used)
