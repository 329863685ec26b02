"""Asking for many keys at once against asking for one after the other, with the threads awaited."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_connector.errors import RefusedReason, TierPartlyAsked
from spillway_connector.limits import BreakerPolicy
from spillway_connector.plan.prefix_memo import ChangeLog, PresenceIndex
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, key_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer import lookups
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.lookups import Lookup, TierLookups
from spillway_connector.transfer.renewals import Renewals
from spillway_connector.transfer.stats import LookupOutcome, Operation, TierCounters

REAL_SECONDS = 30.0
KEYS = [key_of(number) for number in range(8)]


class SetTier(MemoryTier):
    """Holds the keys in `held`."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__(NAMESPACE, 16, MemoryStore(1 << 20), clock=clock)
        self.held: set[bytes] = set()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [key in self.held for key in keys]


class IndexedTier(SetTier):
    """A tier with its index in memory."""

    asked: list[list[bytes]]
    has_local_index = True

    def contains_now(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked = [*getattr(self, "asked", []), list(keys)]
        return [key in self.held for key in keys]


class Rig:
    def __init__(self, kind: type[SetTier] = SetTier) -> None:
        self.clock = SteppedClock()
        self.tier = kind(self.clock)
        self.counters = TierCounters()
        self.answered_requests = ChangeLog()
        self.presence = PresenceIndex()
        self.answered = threading.Semaphore(0)
        breaker = Breaker(BreakerPolicy(), self.clock)
        self.lookups = TierLookups(
            self.tier,
            self.presence,
            self.counters,
            lookup_breaker=breaker,
            load_breaker=breaker,
            timeout_seconds=0.25,
            clock=self.clock,
            progress=self.answered.release,
            answered_requests=self.answered_requests,
            renewals=Renewals(self.tier, self.clock),
        )

    def answer(self) -> None:
        """Let what was asked be answered."""
        if self.lookups._unsent:
            self.lookups.flush()
            assert self.answered.acquire(timeout=REAL_SECONDS)
        self.lookups.collect()

    def one_by_one(self, keys: Sequence[bytes], request: str) -> list[Lookup]:
        found = []
        for key in keys:
            found.append(self.lookups.lookup(key, request))
            if found[-1] is Lookup.MISS:
                break
        return found

    def close(self) -> None:
        self.lookups.stop()
        self.lookups.join(REAL_SECONDS)


def unsent(lookups: TierLookups) -> list[bytes]:
    return [key for page in lookups._unsent for key in page.keys]


actions = st.tuples(
    st.sampled_from(("ask", "ask", "answer", "hold", "wait", "drop")), st.integers(0, 7), st.sampled_from("ab")
)


@settings(max_examples=3 * settings.default.max_examples // 2, deadline=None)
@given(schedule=st.lists(actions, max_size=25), kind=st.sampled_from((SetTier, IndexedTier)))
def test_a_batch_is_answered_as_its_keys_one_by_one(schedule, kind):
    batch, single = Rig(kind), Rig(kind)
    try:
        for action, number, request in schedule:
            if action == "ask":
                keys = KEYS[number // 2 : number + 1]
                assert batch.lookups.lookup_batch(keys, request).found == single.one_by_one(keys, request)
            for rig in (batch, single):
                if action == "answer":
                    rig.answer()
                elif action == "hold":
                    rig.tier.held ^= {KEYS[number]}
                elif action == "wait":
                    rig.clock.advance(0.03125 * number)
                elif action == "drop":
                    rig.lookups.drop_request(request)
            assert batch.counters.lookups == single.counters.lookups
            assert batch.lookups._asked.keys() == single.lookups._asked.keys()
            assert unsent(batch.lookups) == unsent(single.lookups)
    finally:
        batch.close()
        single.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def test_an_answer_concerns_the_requests_that_wait_for_it_alone(rig: Rig):
    assert rig.lookups.lookup_batch(KEYS[:4], "first").found == [Lookup.PENDING] * 4
    assert rig.lookups.lookup_batch(KEYS[3:6], "second").found == [Lookup.PENDING] * 3
    since = rig.answered_requests.position
    rig.answer()
    assert set(rig.answered_requests.since(since)) == {"first", "second"}
    since = rig.answered_requests.position
    assert rig.lookups.lookup_batch(KEYS[7:], "third").found == [Lookup.PENDING]
    assert not rig.answered_requests.since(since)
    rig.answer()
    assert rig.answered_requests.since(since) == ["third"]


def test_an_answer_carries_its_expiry(rig: Rig):
    rig.tier.held = set(KEYS[:2])
    assert rig.lookups.lookup_batch(KEYS, "r").valid_until == rig.clock() + 0.25, "the request's waiting time"
    rig.answer()
    found, valid_until = rig.lookups.lookup_batch(KEYS, "r")
    assert found == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    assert valid_until == rig.clock() + 5.0, "until the answer 'absent' expires"


def test_too_many_open_questions_are_a_miss_for_now(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookups, "ASKED_KEYS_MAX", 3)
    found, valid_until = rig.lookups.lookup_batch(KEYS, "r")
    assert found == [Lookup.PENDING] * 3 + [Lookup.MISS]
    assert valid_until <= rig.clock(), "ask again at once"
    assert rig.counters.lookups == {LookupOutcome.REFUSED: 1}
    rig.answer()
    assert rig.lookups.lookup_batch(KEYS[5:], "r").found == [Lookup.PENDING] * 3


def test_a_tier_with_a_local_index_is_asked_at_once_and_about_one_key_where_that_decides():
    rig = Rig(IndexedTier)
    try:
        assert rig.lookups.lookup_batch(KEYS, "r").found == [Lookup.MISS]
        assert rig.tier.asked == [KEYS[:1]]
        rig.clock.advance(6.0)
        rig.tier.held = set(KEYS[:5])
        assert rig.lookups.lookup_batch(KEYS, "r").found == [Lookup.HIT] * 5 + [Lookup.MISS]
        assert not rig.lookups.has_work
    finally:
        rig.close()


def test_a_tier_with_a_local_index_is_asked_in_few_batches_and_not_behind_the_first_absent_key():
    rig = Rig(IndexedTier)
    prompt = [key_of(number) for number in range(600)]
    rig.tier.held = set(prompt) - {prompt[300]}
    try:
        assert rig.lookups.lookup_batch(prompt, "r").found == [Lookup.HIT] * 300 + [Lookup.MISS]
        assert [len(keys) for keys in rig.tier.asked] == [1, 1, 255, 343]
        assert rig.presence.get(prompt[301], rig.clock()) is None
        assert rig.lookups.lookup_batch(prompt, "r").found == [Lookup.HIT] * 300 + [Lookup.MISS]
        assert len(rig.tier.asked) == 4, "from the presence index"
        assert rig.counters.lookups == {LookupOutcome.HIT: 600, LookupOutcome.MISS: 2}
    finally:
        rig.close()


@given(
    st.lists(st.sampled_from((None, 3.0, 7.0, -3.0, -7.0)), min_size=1, max_size=8),
)
def test_keys_without_an_answer_before_the_first_absent_are_asked_for(expiries):
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
def test_an_answer_costs_a_few_operations_a_key_and_is_taken_in_by_steps(rig: Rig, requests: int, keys_each: int):
    asked = [[CountedKey((r * keys_each + n).to_bytes(32)) for n in range(keys_each)] for r in range(requests)]
    for number, keys in enumerate(asked):
        assert rig.lookups.lookup_batch(keys, f"r{number}").found == [Lookup.PENDING] * keys_each
    rig.tier.held = set(asked[0])
    rig.lookups.flush()
    assert rig.answered.acquire(timeout=REAL_SECONDS)
    steps = 0
    while rig.lookups.has_work:
        open_before, CountedKey.operations = len(rig.lookups._asked), 0
        rig.lookups.collect()
        rig.lookups.collect()  # as often as a step may ask
        taken_in = open_before - len(rig.lookups._asked)
        assert 0 < taken_in <= lookups.TAKEN_IN_KEYS_MAX + lookups.PAGE_KEYS
        assert CountedKey.operations <= 8 * taken_in
        rig.lookups.flush()
        steps += 1
    assert steps >= requests * keys_each / (lookups.TAKEN_IN_KEYS_MAX + lookups.PAGE_KEYS)
    assert rig.lookups.lookup_batch(asked[0], "r0").found == [Lookup.HIT] * keys_each
    if requests > 1:
        assert rig.lookups.lookup_batch(asked[-1], "last").found == [Lookup.MISS]


def test_a_request_whose_answer_is_there_does_not_expire_before_it_is_taken_in(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lookups, "PAGE_KEYS", 2)
    monkeypatch.setattr(lookups, "TAKEN_IN_KEYS_MAX", 2)
    rig.tier.held = set(KEYS)
    for request, keys in (("a", KEYS[:4]), ("b", KEYS[4:])):
        assert rig.lookups.lookup_batch(keys, request).found == [Lookup.PENDING] * 4
    rig.lookups.flush()
    assert rig.answered.acquire(timeout=REAL_SECONDS)
    rig.clock.advance(0.2)
    rig.lookups.collect()
    rig.clock.advance(10.0)  # steps that take longer than any request may wait for the tier
    assert rig.lookups.lookup_batch(KEYS[4:], "b") == ([Lookup.PENDING] * 4, math.inf)
    for _ in range(3):
        rig.lookups.flush()
        rig.lookups.collect()
    assert rig.lookups.lookup_batch(KEYS[4:], "b").found == [Lookup.HIT] * 4
    absent = [key_of(100)]
    assert rig.lookups.lookup_batch(absent, "b") == ([Lookup.PENDING], rig.clock() + 0.25), "nothing of it was charged"


def test_requests_that_wait_for_the_same_key_all_end_with_its_answer(rig: Rig):
    begun = rig.clock()
    for request in "abc":
        assert rig.lookups.lookup_batch(KEYS[:3], request).found == [Lookup.PENDING] * 3
    assert rig.lookups.lookup_batch(KEYS[2:5], "d").found == [Lookup.PENDING] * 3
    assert unsent(rig.lookups) == KEYS[:5], "each key once"
    rig.clock.advance(0.125)
    rig.answer()
    rig.clock.advance(50.0)
    for request in "abcd":
        assert rig.lookups._waits[request].expires_at(rig.clock()) == rig.clock() + 0.125, "left of its waiting time"
    assert begun + 50.125 == rig.clock()


def test_a_batch_without_an_answer_is_given_up_and_asked_again(rig: Rig):
    held = threading.Event()
    contains = rig.tier.contains
    rig.tier.contains = lambda keys, deadline: held.wait(REAL_SECONDS) and contains(keys, deadline)
    assert rig.lookups.lookup_batch(KEYS, "a").found == [Lookup.PENDING] * 8
    rig.lookups.flush()
    rig.clock.advance(0.25)
    assert rig.lookups.lookup_batch(KEYS, "a").found == [Lookup.MISS]
    rig.lookups.collect()
    assert not rig.lookups.has_work
    assert rig.lookups.lookup_batch(KEYS, "b").found == [Lookup.PENDING] * 8
    held.set()
    assert rig.answered.acquire(timeout=REAL_SECONDS)  # the late answer to the first question
    rig.answer()
    assert rig.lookups.lookup_batch(KEYS, "b").found == [Lookup.MISS]
    assert rig.presence.get(KEYS[0], rig.clock()) is False


def test_what_could_not_be_asked_for_is_counted_and_the_answers_before_it_are_used(rig: Rig):
    def some(keys: Sequence[bytes], deadline: float) -> list[bool]:
        raise TierPartlyAsked([key in KEYS[:3] for key in keys], "at most three")

    rig.tier.contains = some
    assert rig.lookups.lookup_batch(KEYS, "a").found == [Lookup.PENDING] * 8
    rig.answer()
    assert rig.lookups.lookup_batch(KEYS, "a").found == [*[Lookup.HIT] * 3, Lookup.MISS]
    assert dict(rig.counters.shed) == {(Operation.LOOKUP, RefusedReason.QUEUE_AGE): 1}
    assert not rig.counters.failures
    assert rig.lookups.open
