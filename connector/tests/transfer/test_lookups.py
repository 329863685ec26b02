"""Asking for many keys at once against asking for one after the other, with the threads awaited."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.limits import BreakerPolicy
from spillway_connector.plan.prefix_memo import ChangeLog, PresenceIndex
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, key_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer import lookups
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.lookups import Lookup, TierLookups
from spillway_connector.transfer.stats import LookupOutcome, TierCounters

REAL_SECONDS = 30.0
KEYS = [key_of(number) for number in range(8)]


class SetTier(MemoryTier):
    """Holds the keys that a test gives it."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__(NAMESPACE, 16, MemoryStore(1 << 20), clock=clock)
        self.held: set[bytes] = set()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [key in self.held for key in keys]


class KnowingTier(SetTier):
    """Has its index in memory."""

    asked: list[list[bytes]]
    has_local_index = True

    def contains_now(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked = [*getattr(self, "asked", []), list(keys)]
        return [key in self.held for key in keys]


class Desk:
    def __init__(self, kind: type[SetTier] = SetTier) -> None:
        self.clock = SteppedClock()
        self.tier = kind(self.clock)
        self.counters = TierCounters()
        self.answered_requests = ChangeLog()
        self.presence = PresenceIndex()
        self.answered = threading.Semaphore(0)
        breaker = Breaker(BreakerPolicy(), self.clock)
        self.desk = TierLookups(
            self.tier,
            self.presence,
            self.counters,
            lookup_breaker=breaker,
            load_breaker=breaker,
            timeout_seconds=0.25,
            clock=self.clock,
            progress=self.answered.release,
            answered_requests=self.answered_requests,
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


def unsent(desk: TierLookups) -> list[bytes]:
    return [key for page in desk._unsent for key in page.keys]


actions = st.tuples(
    st.sampled_from(("ask", "ask", "answer", "hold", "wait", "forget")), st.integers(0, 7), st.sampled_from("ab")
)


@settings(max_examples=3 * settings.default.max_examples // 2, deadline=None)
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
                    desk.desk.drop_request(request)
            assert batch.counters.lookups == single.counters.lookups
            assert batch.desk._asked.keys() == single.desk._asked.keys()
            assert unsent(batch.desk) == unsent(single.desk)
    finally:
        batch.close()
        single.close()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def test_an_answer_concerns_the_requests_that_wait_for_it_alone(desk: Desk):
    assert desk.desk.lookup_batch(KEYS[:4], "first").found == [Lookup.PENDING] * 4
    assert desk.desk.lookup_batch(KEYS[3:6], "second").found == [Lookup.PENDING] * 3
    since = desk.answered_requests.position
    desk.answer()
    assert set(desk.answered_requests.since(since)) == {"first", "second"}
    since = desk.answered_requests.position
    assert desk.desk.lookup_batch(KEYS[7:], "third").found == [Lookup.PENDING]
    assert not desk.answered_requests.since(since)
    desk.answer()
    assert desk.answered_requests.since(since) == ["third"]


def test_an_answer_says_how_long_it_is_good(desk: Desk):
    desk.tier.held = set(KEYS[:2])
    assert desk.desk.lookup_batch(KEYS, "r").valid_until == desk.clock() + 0.25, "the request's patience"
    desk.answer()
    found, valid_until = desk.desk.lookup_batch(KEYS, "r")
    assert found == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    assert valid_until == desk.clock() + 5.0, "the memory of what is absent"


def test_too_many_open_questions_are_a_miss_for_now(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookups, "ASKED_KEYS_MAX", 3)
    found, valid_until = desk.desk.lookup_batch(KEYS, "r")
    assert found == [Lookup.PENDING] * 3 + [Lookup.MISS]
    assert valid_until <= desk.clock(), "ask again at once"
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


class CountedKey(bytes):
    """Counts what is done with it: every entry into, removal from and question to a dict or set asks for its hash."""

    operations = 0

    def __hash__(self) -> int:
        CountedKey.operations += 1
        return super().__hash__()

    __eq__ = bytes.__eq__


@pytest.mark.parametrize(("requests", "keys_each"), [(256, 256), (64, 1024), (1, 65_536), (4096, 16)])
def test_an_answer_costs_a_few_operations_a_key_and_is_taken_in_by_steps(desk: Desk, requests: int, keys_each: int):
    asked = [[CountedKey(key_of(r * keys_each + n)) for n in range(keys_each)] for r in range(requests)]
    for number, keys in enumerate(asked):
        assert desk.desk.lookup_batch(keys, f"r{number}").found == [Lookup.PENDING] * keys_each
    desk.tier.held = set(asked[0])
    desk.desk.flush()
    assert desk.answered.acquire(timeout=REAL_SECONDS)
    steps = 0
    while desk.desk.has_work:
        open_before, CountedKey.operations = len(desk.desk._asked), 0
        desk.desk.collect()
        desk.desk.collect()  # as often as a step may ask
        taken_in = open_before - len(desk.desk._asked)
        assert 0 < taken_in <= lookups.TAKEN_IN_KEYS_MAX + lookups.PAGE_KEYS
        assert CountedKey.operations <= 8 * taken_in
        desk.desk.flush()
        steps += 1
    assert steps >= requests * keys_each / (lookups.TAKEN_IN_KEYS_MAX + lookups.PAGE_KEYS)
    assert desk.desk.lookup_batch(asked[0], "r0").found == [Lookup.HIT] * keys_each
    if requests > 1:
        assert desk.desk.lookup_batch(asked[-1], "last").found == [Lookup.MISS]


def test_a_request_whose_answer_is_there_does_not_expire_before_it_is_taken_in(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookups, "PAGE_KEYS", 2)
    monkeypatch.setattr(lookups, "TAKEN_IN_KEYS_MAX", 2)
    desk.tier.held = set(KEYS)
    for request, keys in (("a", KEYS[:4]), ("b", KEYS[4:])):
        assert desk.desk.lookup_batch(keys, request).found == [Lookup.PENDING] * 4
    desk.desk.flush()
    assert desk.answered.acquire(timeout=REAL_SECONDS)
    desk.clock.advance(0.2)
    desk.desk.collect()
    desk.clock.advance(10.0)  # steps that take longer than any request may wait for the tier
    assert desk.desk.lookup_batch(KEYS[4:], "b") == ([Lookup.PENDING] * 4, math.inf)
    for _ in range(3):
        desk.desk.flush()
        desk.desk.collect()
    assert desk.desk.lookup_batch(KEYS[4:], "b").found == [Lookup.HIT] * 4
    absent = [key_of(100)]
    assert desk.desk.lookup_batch(absent, "b") == ([Lookup.PENDING], desk.clock() + 0.25), "nothing of it was charged"


def test_requests_that_wait_for_the_same_key_all_end_with_its_answer(desk: Desk):
    begun = desk.clock()
    for request in "abc":
        assert desk.desk.lookup_batch(KEYS[:3], request).found == [Lookup.PENDING] * 3
    assert desk.desk.lookup_batch(KEYS[2:5], "d").found == [Lookup.PENDING] * 3
    assert unsent(desk.desk) == KEYS[:5], "each key once"
    desk.clock.advance(0.125)
    desk.answer()
    desk.clock.advance(50.0)
    for request in "abcd":
        assert desk.desk._waits[request].expires_at(desk.clock()) == desk.clock() + 0.125, "left of its patience"
    assert begun + 50.125 == desk.clock()


def test_what_nobody_answers_is_given_up_and_asked_again(desk: Desk):
    held = threading.Event()
    contains = desk.tier.contains
    desk.tier.contains = lambda keys, deadline: held.wait(REAL_SECONDS) and contains(keys, deadline)
    assert desk.desk.lookup_batch(KEYS, "a").found == [Lookup.PENDING] * 8
    desk.desk.flush()
    desk.clock.advance(0.25)
    assert desk.desk.lookup_batch(KEYS, "a").found == [Lookup.MISS]
    desk.desk.collect()
    assert not desk.desk.has_work
    assert desk.desk.lookup_batch(KEYS, "b").found == [Lookup.PENDING] * 8
    held.set()
    assert desk.answered.acquire(timeout=REAL_SECONDS)  # the late answer to the first question
    desk.answer()
    assert desk.desk.lookup_batch(KEYS, "b").found == [Lookup.MISS]
    assert desk.presence.get(KEYS[0], desk.clock()) is False
