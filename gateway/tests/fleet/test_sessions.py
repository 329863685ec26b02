from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.sessions import SessionKey, Sessions

TENANTS = ("a", "b", "c")
keys = st.builds(SessionKey, st.sampled_from(TENANTS), st.integers(0, 6))
served = st.lists(st.tuples(keys, st.sampled_from(["e0", "e1"])), max_size=60)


@given(served, st.integers(1, 4), st.integers(1, 8))
def test_the_bounds_hold_and_what_is_remembered_is_the_last_engine(
    steps: list[tuple[SessionKey, str]], tenant_max: int, entries_max: int
) -> None:
    sessions = Sessions(tenant_max, entries_max)
    last: dict[SessionKey, str] = {}
    for key, engine in steps:
        sessions.served(key, engine, 0.0)
        last[key] = engine
        assert sessions.engine_of(key) == engine  # the newest one is never the one that is forgotten
        known = [each for each in last if sessions.engine_of(each) is not None]
        assert len(known) == len(sessions) <= entries_max
        assert all(sessions.engine_of(each) == last[each] for each in known)
        for tenant in TENANTS:
            assert sum(each.tenant == tenant for each in known) <= tenant_max


def test_at_the_bound_of_all_the_tenant_that_was_served_least_recently_forgets_its_oldest() -> None:
    sessions = Sessions(10, 3)
    for tenant, digest in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        sessions.served(SessionKey(tenant, digest), "e0", 0.0)
    known = [sessions.engine_of(SessionKey(*key)) for key in (("a", 1), ("b", 2), ("a", 3), ("c", 4))]
    assert known == ["e0", None, "e0", "e0"]


@given(served)
def test_a_tenant_at_its_bound_forgets_its_own_and_oldest(steps: list[tuple[SessionKey, str]]) -> None:
    sessions = Sessions(2, 100)
    for key, engine in steps:
        sessions.served(key, engine, 0.0)
    for tenant in TENANTS:
        newest = list(dict.fromkeys(key for key, _ in reversed(steps) if key.tenant == tenant))
        assert [sessions.engine_of(key) is not None for key in newest] == [at < 2 for at in range(len(newest))]


def test_the_same_name_of_two_tenants_is_two_sessions() -> None:
    sessions = Sessions(10, 10)
    sessions.served(SessionKey.of("a", b"name"), "e0", 0.0)
    assert sessions.engine_of(SessionKey.of("a", b"name")) == "e0"
    assert sessions.engine_of(SessionKey.of("b", b"name")) is None
    assert sessions.engine_of(SessionKey.of("a", b"other")) is None


@given(
    st.lists(st.tuples(keys, st.sampled_from(["e0", "e1"]), st.integers(0, 3)), max_size=60),
    st.integers(0, 60),
)
def test_alive_are_those_that_were_served_since_then_on_their_last_engine(
    steps: list[tuple[SessionKey, str, int]], since: int
) -> None:
    sessions = Sessions(100, 100)
    last: dict[SessionKey, tuple[str, int]] = {}
    now = 0
    for key, engine, later in steps:
        now += later
        sessions.served(key, engine, float(now))
        last[key] = engine, now

    assert sessions.alive(float(since)) == Counter(engine for engine, at in last.values() if at >= since)
