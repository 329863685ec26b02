"""Asking a tier which keys it holds without waiting for it: one batch per scheduler step, answered by a thread.

All methods but the thread's body run in the scheduler thread, so the state needs no lock; answers come back through a
deque, whose append and popleft are atomic.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, cast

from spillway_connector.errors import RefusedReason, TierError, TierRefused, UnreachableReason, without_frames
from spillway_connector.plan.changes import ChangeLog
from spillway_connector.tiers.breaker import Breaker
from spillway_connector.tiers.presence import PresenceIndex
from spillway_connector.tiers.stats import LookupOutcome, Operation, TierCounters
from spillway_connector.tiers.tier import Clock, Tier

ASKED_KEYS_MAX = 65_536  # waiting for an answer; more are answered MISS
WAITING_REQUESTS_MAX = 16_384
RESIDENT_SECONDS = 10.0  # between two readings of the tier's size

ContainsNow = Callable[[Sequence[bytes]], "list[bool] | None"]
"""An optional `contains_now(keys)` of a tier whose index is in memory: answers without waiting, or None."""


class Lookup(Enum):
    """HIT: believed to be there. MISS: recompute. PENDING: ask again in the next step."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


# Keys put to a tier that answers at once: 1, 256, 65536, ... until one is absent. A batch costs some 50 microseconds
# whatever its size and 0.2 a key, a single key 5: smaller batches would only add to that.
_FIRST_ASKED, _ASKED_GROWTH = 1, 256


class Answers(NamedTuple):
    """About a batch of keys, in order, up to and including the first MISS: who needs a prefix asks no further."""

    found: list[Lookup]
    good_until: float  # PENDING and MISS may change by the passing of time alone from here on


@dataclass(slots=True, eq=False)
class _Wait:
    """How long one request may still wait for answers, over its whole life."""

    left_seconds: float
    since: float = 0.0
    keys: set[bytes] = field(default_factory=set)

    def expires_at(self, now: float) -> float:
        return (self.since if self.keys else now) + self.left_seconds

    def expired(self, now: float) -> bool:
        return now >= self.expires_at(now)

    def begin(self, keys: Collection[bytes], now: float) -> None:
        if not self.keys:
            self.since = now
        self.keys.update(keys)

    def end(self, keys: Collection[bytes], now: float) -> None:
        if self.keys.isdisjoint(keys):
            return
        self.keys.difference_update(keys)
        if not self.keys:
            self.left_seconds -= now - self.since


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    keys: list[bytes]
    deadline: float


class LookupDesk:
    """Questions about keys of one tier. ``timeout_seconds`` bounds a batch and the total wait of one request.

    ``changes`` lists the keys whose PENDING has ended.
    """

    def __init__(
        self,
        tier: Tier,
        presence: PresenceIndex,
        counters: TierCounters,
        *,
        lookup_breaker: Breaker,
        load_breaker: Breaker,
        timeout_seconds: float,
        clock: Clock,
        progress: Callable[[], None],
        changes: ChangeLog,
    ) -> None:
        self.resident_bytes = 0
        self._tier = tier
        self._contains_now: ContainsNow | None = getattr(tier, "contains_now", None)
        self._presence = presence
        self._counters = counters
        self._lookup_breaker = lookup_breaker
        self._load_breaker = load_breaker
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._progress = progress
        self._changes = changes
        self._waits: dict[str, _Wait] = {}
        self._waiting: set[_Wait] = set()  # those with keys to be answered
        self._asked: set[bytes] = set()  # keys without an answer
        self._unsent: list[bytes] = []
        self._batches: dict[int, _Batch] = {}  # in the order of their deadlines
        self._next_number = 0
        self._questions: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._answers: deque[tuple[_Batch, list[bool] | TierError]] = deque()
        self._thread = threading.Thread(target=self._answer, name=f"spillway-{tier.name}-lookup", daemon=True)
        self._thread.start()

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    @property
    def idle(self) -> bool:
        """Whether :meth:`collect` would find nothing to take in or to give up."""
        return not self._asked and not self._answers

    @property
    def open(self) -> bool:
        """Whether anything is asked at all: not while what it would lead to rests."""
        return self._lookup_breaker.would_allow() and self._load_breaker.would_allow()

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Never blocks. A PENDING key is asked for at the next :meth:`flush`."""
        return self.lookup_batch((key,), request_id).found[0]

    def lookup_batch(self, keys: Sequence[bytes], request_id: str) -> Answers:
        """At least one key of one request, as :meth:`lookup` would answer one after the other up to the first MISS."""
        if not self.open:
            return self._miss(LookupOutcome.REFUSED)
        if self._answers:
            self.collect()
        now = self._clock()
        absent_until = self._absent_until(keys[0], now)
        if absent_until is not None:  # of a prompt that nobody has seen, the first says all
            self._counters.count_lookup(LookupOutcome.MISS)
            return Answers([Lookup.MISS], absent_until)
        expiries = self._known(keys, now)
        unknown = expiries.count(None)
        if not unknown and min(cast(list[float], expiries)) > now:
            self._counters.lookups[LookupOutcome.HIT] += len(keys)
            return Answers([Lookup.HIT] * len(keys), math.inf)
        if unknown == len(keys) and len(self._asked) + len(keys) <= ASKED_KEYS_MAX:
            return self._ask_all(keys, self._wait_of(request_id), now)
        wait: _Wait | None = None
        found: list[Lookup] = []
        pending: list[bytes] = []
        ended_by: LookupOutcome | None = None
        good_until = math.inf
        for key, expiry in zip(keys, expiries, strict=True):
            if expiry is not None and now < abs(expiry):
                if expiry < 0:
                    ended_by, good_until = LookupOutcome.MISS, -expiry
                    break
                found.append(Lookup.HIT)
                continue
            wait = wait or self._wait_of(request_id)
            if wait.expired(now):
                ended_by = LookupOutcome.EXPIRED
                break
            if key not in self._asked:
                if len(self._asked) >= ASKED_KEYS_MAX:
                    ended_by, good_until = LookupOutcome.REFUSED, now  # there may be room at any time
                    break
                self._asked.add(key)
                self._unsent.append(key)
            pending.append(key)
            found.append(Lookup.PENDING)
        if wait is not None and pending:
            wait.begin(pending, now)
            self._waiting.add(wait)
            good_until = min(good_until, wait.expires_at(now))
        if len(found) > len(pending):
            self._counters.lookups[LookupOutcome.HIT] += len(found) - len(pending)
        if ended_by is not None:
            self._counters.count_lookup(ended_by)
            found.append(Lookup.MISS)
        return Answers(found, good_until)

    def _ask_all(self, keys: Sequence[bytes], wait: _Wait, now: float) -> Answers:
        """Nothing is known of any of them: the usual new prompt, without a loop."""
        if wait.expired(now):
            return self._miss(LookupOutcome.EXPIRED)
        self._unsent += keys if self._asked.isdisjoint(keys) else [key for key in keys if key not in self._asked]
        self._asked.update(keys)
        wait.begin(keys, now)
        self._waiting.add(wait)
        return Answers([Lookup.PENDING] * len(keys), wait.expires_at(now))

    def _absent_until(self, key: bytes, now: float) -> float | None:
        """Until when the key is known to be absent, after asking a tier that can answer at once; else None."""
        known = self._presence.get(key, now)
        if known is None and self._contains_now is not None:
            answers = self._contains_now((key,))
            if answers is not None:
                known = answers[0]
                self._presence.put(key, known)
        return None if known is not False else self._presence.absent_until(key)

    def _known(self, keys: Sequence[bytes], now: float) -> list[float | None]:
        """Per key what presence.get_many says, after asking a tier that can answer at once; of keys behind an absent
        one perhaps nothing."""
        expiries = self._presence.get_many(keys)
        if self._contains_now is None:
            return expiries
        unknown = _unknown(keys, expiries, now)
        return self._presence.get_many(keys) if self._ask_now(unknown) else expiries

    def _ask_now(self, keys: Sequence[bytes]) -> bool:
        """Have the tier answer as far as the first absent key, and remember that. False: it has not."""
        assert self._contains_now is not None
        begin, end = 0, _FIRST_ASKED
        while begin < len(keys):
            asked = keys[begin:end]
            answers = self._contains_now(asked)
            if answers is None:
                break
            there = len(asked) if all(answers) else answers.index(False)
            if there:
                self._presence.put_many(asked[:there], True)
            if there < len(asked):
                self._presence.put(asked[there], False)
                return True
            begin, end = end, end * _ASKED_GROWTH
        return begin > 0

    def _wait_of(self, request_id: str) -> _Wait:
        wait = self._waits.get(request_id)
        if wait is None:
            while len(self._waits) >= WAITING_REQUESTS_MAX:
                del self._waits[next(iter(self._waits))]
            wait = self._waits[request_id] = _Wait(self._timeout_seconds)
        return wait

    def flush(self) -> None:
        """Send what was asked since the last call, as one batch."""
        if not self._unsent:
            return
        keys, self._unsent = self._unsent, []
        if not self._lookup_breaker.allow():
            self._end_waits(keys)
            return
        batch = _Batch(self._next_number, keys, self._clock() + self._timeout_seconds)
        self._next_number += 1
        self._batches[batch.number] = batch
        self._questions.put(batch)

    def collect(self) -> None:
        """Take in the answers that have come, and give up the batches whose deadline has passed."""
        while self._answers:
            batch, answer = self._answers.popleft()
            if self._batches.pop(batch.number, None) is None:
                continue  # given up before; its keys may have been asked for again
            self._end_waits(batch.keys)
            if isinstance(answer, TierError):
                self._counters.failures[Operation.LOOKUP, answer.reason] += 1
                self._lookup_breaker.record_failure()
                answer = [False] * len(batch.keys)
            else:
                self._lookup_breaker.record_success()
            for present in (True, False):
                answered = [key for key, found in zip(batch.keys, answer, strict=True) if bool(found) is present]
                if answered:
                    self._presence.put_many(answered, present)
        if self._batches:
            now = self._clock()
            while self._batches:
                batch = next(iter(self._batches.values()))
                if now < batch.deadline:
                    break
                del self._batches[batch.number]
                self._end_waits(batch.keys)
                self._counters.failures[Operation.LOOKUP, UnreachableReason.TIMEOUT] += 1
                self._counters.expiries[Operation.LOOKUP] += 1
                self._lookup_breaker.record_failure()

    def forget(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def stop(self) -> None:
        """Ask the thread to end; it may be stuck in a call."""
        self._questions.put(None)

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _end_waits(self, keys: list[bytes]) -> None:
        now = self._clock()
        self._asked.difference_update(keys)
        self._changes.add(keys)
        for wait in list(self._waiting):
            wait.end(keys, now)
            if not wait.keys:
                self._waiting.discard(wait)

    def _miss(self, outcome: LookupOutcome) -> Answers:
        self._counters.count_lookup(outcome)
        return Answers([Lookup.MISS], math.inf)

    def _answer(self) -> None:
        """The lookup thread."""
        resident_due = self._clock()
        while True:
            try:
                batch = self._questions.get(timeout=RESIDENT_SECONDS)
            except queue.Empty:
                pass
            else:
                if batch is None:
                    return
                self._answers.append((batch, self._ask(batch)))
                self._progress()
            if self._clock() >= resident_due and self._lookup_breaker.would_allow():
                resident_due = self._clock() + RESIDENT_SECONDS
                try:
                    self.resident_bytes = self._tier.resident_bytes(self._clock() + self._timeout_seconds)
                except TierError:
                    pass  # a gauge: the last known value stands, and the breaker learns from real work

    def _ask(self, batch: _Batch) -> list[bool] | TierError:
        try:
            return self._tier.contains(batch.keys, batch.deadline)
        except TierError as error:
            return without_frames(error)
        except Exception as error:  # a defect of a tier must cost a miss, not the thread
            return without_frames(unexpected(error))


def _unknown(keys: Sequence[bytes], expiries: list[float | None], now: float) -> Sequence[bytes]:
    """Those without a valid answer, before the first that is known to be absent."""
    known = len(keys) - expiries.count(None)
    head = expiries[:known]
    if None not in head and (not known or min(cast(list[float], head)) > now):
        return keys[known:]  # none, all, or those behind a prefix that is there: without a loop
    unknown = []
    for key, expiry in zip(keys, expiries, strict=True):
        if expiry is None or now >= abs(expiry):
            unknown.append(key)
        elif expiry < 0:
            break
    return unknown


def unexpected(error: Exception) -> TierError:
    """A tier broke its contract: counted as a refusal, so that the breaker learns; the cause is kept."""
    failure = TierRefused(RefusedReason.OTHER, f"the tier raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
