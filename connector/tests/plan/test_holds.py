"""Chunks that clients asked to keep: shares, times, and that no tenant displaces another that holds less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan import holds as plan
from spillway_connector.plan.holds import SPANS_MAX, TOTAL_SHARE_MAX, Holds

Key = tuple[bytes, int]
CHUNKS = 40
TENANTS = (b"a", b"b", b"c")


def keys_of(tenant: bytes, first: int, count: int) -> list[Key]:
    """Keys of one tenant are never another's: the salt is in them."""
    return [(tenant, number) for number in range(first, first + count)]


def held_by(holds: Holds[Key], tenant: bytes, now: float) -> set[int]:
    return {number for number in range(100) if holds.is_held((tenant, number), now)}


requests = st.tuples(
    st.floats(0, 50),  # seconds since the one before
    st.sampled_from(TENANTS),
    st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    st.sampled_from([5.0, 60.0, 300.0]),
    st.integers(0, 30),
    st.integers(0, 40),
)


@given(st.lists(requests, max_size=30))
def test_no_tenant_exceeds_its_share_and_none_displaces_one_that_holds_less(steps):
    holds: Holds[Key] = Holds(CHUNKS)
    now = 0.0
    asked: dict[Key, float] = {}
    for pause, tenant, share, seconds, first, count in steps:
        now += pause
        before = {other: held_by(holds, other, now) for other in TENANTS}
        keys = keys_of(tenant, first, count)
        holds.hold(tenant, share, seconds, keys, now)
        asked.update((key, max(now + seconds, asked.get(key, 0.0))) for key in keys)
        after = {other: held_by(holds, other, now) for other in TENANTS}

        assert sum(map(len, after.values())) <= CHUNKS * TOTAL_SHARE_MAX
        if share and count:
            assert len(after[tenant]) <= CHUNKS * share
        else:
            assert after == before, "who asks for nothing changes nothing"
        for other in TENANTS:
            lost = before[other] - after[other]
            if other != tenant and lost:
                assert len(after[other]) + 1 >= len(after[tenant]), "it held less than the one that displaced it"
        for number in after[tenant]:
            assert now < asked[tenant, number], "held for longer than anybody asked"
        assert held_by(holds, tenant, now + 300.0) == set(), "no hold outlives the longest"
        assert {number for numbers in after.values() for number in numbers} <= {key[1] for key in asked}


@given(st.lists(requests, max_size=20))
def test_what_has_expired_takes_no_room(steps):
    """A new tenant, or a new hold of the same, gets what it would get in an empty tier once all others have expired."""
    holds: Holds[Key] = Holds(CHUNKS)
    now = 0.0
    for pause, tenant, share, seconds, first, count in steps:
        now += pause
        holds.hold(tenant, share, seconds, keys_of(tenant, first, count), now)
    now += 300.0

    for tenant in TENANTS:
        holds.hold(tenant, 0.25, 60.0, keys_of(tenant, 50, 15), now)

    assert sorted(len(held_by(holds, tenant, now)) for tenant in TENANTS) == [6, 7, 7]
    holds.expire(now)
    assert len(holds) == CHUNKS * TOTAL_SHARE_MAX
    holds.expire(now + 60.0)
    assert len(holds) == 0


def test_beyond_the_share_the_beginning_of_a_prefix_is_kept_and_the_oldest_goes():
    holds: Holds[Key] = Holds(CHUNKS)
    holds.hold(b"a", 0.25, 300.0, keys_of(b"a", 0, 25), 0.0)
    assert held_by(holds, b"a", 0.0) == set(range(10))

    holds.hold(b"a", 0.25, 300.0, keys_of(b"a", 50, 4), 1.0)
    assert held_by(holds, b"a", 1.0) == {0, 1, 2, 3, 4, 5, 50, 51, 52, 53}

    holds.hold(b"a", 0.25, 300.0, keys_of(b"a", 0, 6), 2.0)  # renewed
    holds.hold(b"a", 0.25, 300.0, keys_of(b"a", 60, 3), 3.0)
    assert held_by(holds, b"a", 3.0) == {0, 1, 2, 3, 4, 5, 50, 60, 61, 62}


def test_a_shorter_hold_does_not_cut_a_longer_one():
    holds: Holds[Key] = Holds(CHUNKS)
    holds.hold(b"a", 0.5, 3600.0, keys_of(b"a", 0, 2), 0.0)
    holds.hold(b"a", 0.5, 300.0, keys_of(b"a", 0, 4), 10.0)

    assert held_by(holds, b"a", 309.0) == {0, 1, 2, 3}
    assert held_by(holds, b"a", 3599.0) == {0, 1}


def test_of_a_tenant_that_has_a_short_hold_too_the_expired_one_goes_first():
    holds: Holds[Key] = Holds(CHUNKS)
    holds.hold(b"a", 0.25, 3600.0, keys_of(b"a", 0, 5), 0.0)
    holds.hold(b"a", 0.25, 10.0, keys_of(b"a", 10, 5), 1.0)
    holds.hold(b"a", 0.25, 3600.0, keys_of(b"a", 20, 5), 20.0)

    assert held_by(holds, b"a", 20.0) == {0, 1, 2, 3, 4, 20, 21, 22, 23, 24}


def test_many_lengths_and_many_tenants_are_bounded(monkeypatch):
    holds: Holds[Key] = Holds(CHUNKS)
    for number in range(SPANS_MAX + 5):
        holds.hold(b"a", 0.5, 100.0 + number, keys_of(b"a", number, 1), 0.0)
    assert held_by(holds, b"a", 99.0) == set(range(SPANS_MAX + 5))
    assert len(holds._tenants[b"a"].spans) == SPANS_MAX
    assert held_by(holds, b"a", 100.0 + SPANS_MAX) == set()

    monkeypatch.setattr(plan, "TENANTS_MAX", 2)
    holds.hold(b"b", 0.5, 10.0, keys_of(b"b", 0, 1), 0.0)
    holds.hold(b"c", 0.5, 10.0, keys_of(b"c", 0, 1), 1.0)
    assert not held_by(holds, b"c", 1.0)
    holds.hold(b"c", 0.5, 10.0, keys_of(b"c", 0, 1), 11.0)  # the holds of b have expired
    assert held_by(holds, b"c", 11.0) == {0}


@pytest.mark.parametrize("share, seconds", [(0.0, 60.0), (0.01, 60.0), (0.5, 0.0)])
def test_no_share_or_no_time_holds_nothing(share: float, seconds: float):
    holds: Holds[Key] = Holds(CHUNKS)
    holds.hold(b"a", share, seconds, keys_of(b"a", 0, 3), 0.0)
    assert len(holds) == 0 and not holds._tenants
