from __future__ import annotations

import math
from collections import Counter

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
