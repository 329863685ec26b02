"""Asking a tier which keys it holds without waiting for it: one batch per scheduler step, answered by a thread.

All methods but the thread's body run in the scheduler thread, so the state needs no lock; answers come back through a
deque, whose append and popleft are atomic.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from spillway_connector.errors import RefusedReason, TierError, TierRefused, UnreachableReason
from spillway_connector.tiers.breaker import Breaker
from spillway_connector.tiers.presence import PresenceIndex
from spillway_connector.tiers.stats import LookupOutcome, Operation, TierCounters
from spillway_connector.tiers.tier import Clock, Tier

ASKED_KEYS_MAX = 65_536  # waiting for an answer; more are answered MISS
WAITING_REQUESTS_MAX = 16_384
RESIDENT_SECONDS = 10.0  # between two readings of the tier's size


class Lookup(Enum):
    """HIT: believed to be there. MISS: recompute. PENDING: ask again in the next step."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


@dataclass(slots=True)
class _Wait:
    """How long one request may still wait for answers, over its whole life."""

    left_seconds: float
    since: float = 0.0
    keys: set[bytes] = field(default_factory=set)

    def expired(self, now: float) -> bool:
        return self.left_seconds - (now - self.since if self.keys else 0.0) <= 0

    def begin(self, key: bytes, now: float) -> None:
        if not self.keys:
            self.since = now
        self.keys.add(key)

    def end(self, key: bytes, now: float) -> None:
        self.keys.discard(key)
        if not self.keys:
            self.left_seconds -= now - self.since


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    keys: list[bytes]
    deadline: float


class LookupDesk:
    """Questions about keys of one tier. ``timeout_seconds`` bounds a batch and the total wait of one request."""

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
    ) -> None:
        self.resident_bytes = 0
        self._tier = tier
        self._presence = presence
        self._counters = counters
        self._lookup_breaker = lookup_breaker
        self._load_breaker = load_breaker
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._progress = progress
        self._waits: dict[str, _Wait] = {}
        self._asked: dict[bytes, list[_Wait]] = {}  # keys without an answer, and who waits for them
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

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Never blocks. A PENDING key is asked for at the next :meth:`flush`."""
        if not (self._lookup_breaker.would_allow() and self._load_breaker.would_allow()):
            return self._miss(LookupOutcome.REFUSED)
        if self._answers:
            self.collect()
        now = self._clock()
        present = self._presence.get(key, now)
        if present is not None:
            if not present:
                return self._miss(LookupOutcome.MISS)
            self._counters.lookups[LookupOutcome.HIT] += 1
            return Lookup.HIT
        wait = self._waits.get(request_id)
        if wait is None:
            while len(self._waits) >= WAITING_REQUESTS_MAX:
                del self._waits[next(iter(self._waits))]
            wait = self._waits[request_id] = _Wait(self._timeout_seconds)
        if wait.expired(now):
            return self._miss(LookupOutcome.EXPIRED)
        waiting = self._asked.get(key)
        if waiting is None:
            if len(self._asked) >= ASKED_KEYS_MAX:
                return self._miss(LookupOutcome.REFUSED)
            waiting = self._asked[key] = []
            self._unsent.append(key)
        if key not in wait.keys:
            wait.begin(key, now)
            waiting.append(wait)
        return Lookup.PENDING

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
            for key, present in zip(batch.keys, answer, strict=True):
                self._presence.put(key, present)
        if self._batches:
            now = self._clock()
            while self._batches:
                batch = next(iter(self._batches.values()))
                if now < batch.deadline:
                    break
                del self._batches[batch.number]
                self._end_waits(batch.keys)
                self._counters.failures[Operation.LOOKUP, UnreachableReason.TIMEOUT] += 1
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
        for key in keys:
            for wait in self._asked.pop(key, ()):
                wait.end(key, now)

    def _miss(self, outcome: LookupOutcome) -> Lookup:
        self._counters.lookups[outcome] += 1
        return Lookup.MISS

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
            return error
        except Exception as error:  # a defect of a tier must cost a miss, not the thread
            return unexpected(error)


def unexpected(error: Exception) -> TierError:
    """A tier broke its contract: counted as a refusal, so that the breaker learns; the cause is kept."""
    failure = TierRefused(RefusedReason.OTHER, f"the tier raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
