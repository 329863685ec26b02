"""Asking for many keys at once against asking for one after the other, with the threads awaited."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.plan.changes import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.contracts import NAMESPACE, key_of
from spillway_connector.tiers import lookups
from spillway_connector.tiers.breaker import Breaker, BreakerPolicy
from spillway_connector.tiers.lookups import Lookup, LookupDesk
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.presence import PresenceIndex
from spillway_connector.tiers.stats import LookupOutcome, TierCounters

REAL_SECONDS = 30.0
KEYS = [key_of(number) for number in range(8)]


class SetTier(MemoryTier):
    """Holds the keys it is told to hold."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__(NAMESPACE, 16, MemoryStore(1 << 20), clock=clock)
        self.held: set[bytes] = set()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [key in self.held for key in keys]


class KnowingTier(SetTier):
    """Has its index in memory."""

    asked: list[list[bytes]]

    def contains_now(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked = [*getattr(self, "asked", []), list(keys)]
        return [key in self.held for key in keys]


class Desk:
    def __init__(self, kind: type[SetTier] = SetTier) -> None:
        self.clock = SteppedClock()
        self.tier = kind(self.clock)
        self.counters = TierCounters()
        self.changes = ChangeLog()
        self.presence = PresenceIndex(self.clock)
        self.answered = threading.Semaphore(0)
        breaker = Breaker(BreakerPolicy(), self.clock)
        self.desk = LookupDesk(
            self.tier,
            self.presence,
            self.counters,
            lookup_breaker=breaker,
            load_breaker=breaker,
            timeout_seconds=0.25,
            clock=self.clock,
            progress=self.answered.release,
            changes=self.changes,
        )

    def answer(self) -> None:
        """Let what was asked be answered."""
        if self.desk._unsent:
            self.desk.flush()
            assert self.answered.acquire(timeout=REAL_SECONDS)
        self.desk.collect()

    def one_by_one(self, keys: Sequence[bytes], request: str) -> list[Lookup]:
        found = []
        for key in keys:
            found.append(self.desk.lookup(key, request))
            if found[-1] is Lookup.MISS:
                break
        return found

    def close(self) -> None:
        self.desk.stop()
        self.desk.join(REAL_SECONDS)


actions = st.tuples(
    st.sampled_from(("ask", "ask", "answer", "hold", "wait", "forget")), st.integers(0, 7), st.sampled_from("ab")
)


@settings(max_examples=150, deadline=None)
@given(schedule=st.lists(actions, max_size=25), kind=st.sampled_from((SetTier, KnowingTier)))
def test_a_batch_is_answered_as_its_keys_one_by_one(schedule, kind):
    batch, single = Desk(kind), Desk(kind)
    try:
        for action, number, request in schedule:
            if action == "ask":
                keys = KEYS[number // 2 : number + 1]
                assert batch.desk.lookup_batch(keys, request).found == single.one_by_one(keys, request)
            for desk in (batch, single):
                if action == "answer":
                    desk.answer()
                elif action == "hold":
                    desk.tier.held ^= {KEYS[number]}
                elif action == "wait":
                    desk.clock.advance(0.03125 * number)
                elif action == "forget":
                    desk.desk.forget(request)
            assert batch.counters.lookups == single.counters.lookups
            assert batch.desk._asked == single.desk._asked
            assert batch.desk._unsent == single.desk._unsent
    finally:
        batch.close()
        single.close()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def test_the_keys_of_an_answer_are_logged_as_changed(desk: Desk):
    since = desk.changes.position
    assert desk.desk.lookup_batch(KEYS, "r").found == [Lookup.PENDING] * 8
    assert not desk.changes.touches(since, frozenset(KEYS))
    desk.answer()
    assert all(desk.changes.touches(since, frozenset([key])) for key in KEYS)


def test_an_answer_says_how_long_it_is_good(desk: Desk):
    desk.tier.held = set(KEYS[:2])
    assert desk.desk.lookup_batch(KEYS, "r").good_until == desk.clock() + 0.25, "the request's patience"
    desk.answer()
    found, good_until = desk.desk.lookup_batch(KEYS, "r")
    assert found == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    assert good_until == desk.clock() + 5.0, "the memory of what is absent"


def test_too_many_open_questions_are_a_miss_for_now(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookups, "ASKED_KEYS_MAX", 3)
    found, good_until = desk.desk.lookup_batch(KEYS, "r")
    assert found == [Lookup.PENDING] * 3 + [Lookup.MISS]
    assert good_until <= desk.clock(), "ask again at once"
    assert desk.counters.lookups == {LookupOutcome.REFUSED: 1}
    desk.answer()
    assert desk.desk.lookup_batch(KEYS[5:], "r").found == [Lookup.PENDING] * 3


def test_a_tier_that_knows_is_asked_at_once_and_about_one_key_where_that_says_all():
    desk = Desk(KnowingTier)
    try:
        assert desk.desk.lookup_batch(KEYS, "r").found == [Lookup.MISS]
        assert desk.tier.asked == [KEYS[:1]]
        desk.clock.advance(6.0)
        desk.tier.held = set(KEYS[:5])
        assert desk.desk.lookup_batch(KEYS, "r").found == [Lookup.HIT] * 5 + [Lookup.MISS]
        assert not desk.desk.has_work
    finally:
        desk.close()


def test_a_tier_that_knows_is_asked_in_few_batches_and_not_behind_the_first_absent_key():
    desk = Desk(KnowingTier)
    prompt = [key_of(number) for number in range(600)]
    desk.tier.held = set(prompt) - {prompt[300]}
    try:
        assert desk.desk.lookup_batch(prompt, "r").found == [Lookup.HIT] * 300 + [Lookup.MISS]
        assert [len(keys) for keys in desk.tier.asked] == [1, 1, 255, 343]
        assert desk.presence.get(prompt[301], desk.clock()) is None
        assert desk.desk.lookup_batch(prompt, "r").found == [Lookup.HIT] * 300 + [Lookup.MISS]
        assert len(desk.tier.asked) == 4, "remembered"
        assert desk.counters.lookups == {LookupOutcome.HIT: 600, LookupOutcome.MISS: 2}
    finally:
        desk.close()


@given(
    st.lists(st.sampled_from((None, 3.0, 7.0, -3.0, -7.0)), min_size=1, max_size=8),
)
def test_who_is_asked_is_everyone_without_an_answer_before_the_first_absent(expiries):
    now, keys = 5.0, KEYS[: len(expiries)]
    expected = []
    for key, expiry in zip(keys, expiries, strict=True):
        if expiry is None or abs(expiry) <= now:
            expected.append(key)
        elif expiry < 0:
            break
    assert list(lookups._unknown(keys, expiries, now)) == expected
