"""Lookups of keys in a tier without waiting for it: one batch per scheduler step, answered by a thread.

All methods but the thread's body run in the scheduler thread, so the state needs no lock; answers return through a
deque, whose append and popleft are atomic.

A batch is divided into pages. Each open key leads to its page and each page to the requests that wait for any of its
keys, so that an answer costs a few dictionary operations per key, however many requests wait. An answer may concern
65,536 keys: a step takes in some pages, the next steps the others.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import compress, islice, repeat
from typing import NamedTuple, cast

from spillway_connector.errors import RefusedReason, TierError, TierPartlyAsked, UnreachableReason, without_frames
from spillway_connector.plan.prefix_memo import ChangeLog, PresenceIndex
from spillway_connector.tiers.tier import Clock, Tier
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.calling_thread import Call, CallingThread, as_tier_error
from spillway_connector.transfer.renewals import Renewals
from spillway_connector.transfer.stats import LookupOutcome, Operation, TierCounters, Upkeep

_log = logging.getLogger(__name__)

ASKED_KEYS_MAX = 65_536  # waiting for an answer; more are answered MISS
WAITING_REQUESTS_MAX = 16_384
PAGE_KEYS = 256
TAKEN_IN_KEYS_MAX = 1024  # per step: well below a millisecond of the scheduler's thread
RESIDENT_SECONDS = 10.0  # between two readings of the tier's size
START_SECONDS = 5.0  # for the first one, which prepares the tier

ContainsNow = Callable[[Sequence[bytes]], "list[bool] | None"]
"""Tier.contains_now of a tier with a local index."""


class Lookup(Enum):
    """HIT: the tier holds it by its last valid answer. MISS: recompute. PENDING: ask again in the next step."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


# Keys put to a tier that answers at once: 1, 256, 65536, ... until one is absent. A batch costs some 50 microseconds
# whatever its size and 0.2 a key, a single key 5: smaller batches would only add to that.
_FIRST_ASKED, _ASKED_GROWTH = 1, 256


class Answers(NamedTuple):
    """The answers for a batch of keys, in order, up to and including the first MISS, where a prefix ends."""

    found: list[Lookup]
    valid_until: float  # from then on PENDING and MISS may change by the passing of time alone


@dataclass(slots=True, eq=False)
class _Page:
    """Open keys of one batch that are taken in together, and the requests that wait for any of them."""

    keys: list[bytes] = field(default_factory=list)
    waits: set[_Wait] = field(default_factory=set)
    answered: bool = False  # the answer waits to be taken in


@dataclass(slots=True, eq=False)
class _Wait:
    """Time for which one request may still wait for answers, over all its lookups."""

    request_id: str
    left_seconds: float
    since: float = 0.0
    pages: set[_Page] = field(default_factory=set)

    def expires_at(self, now: float) -> float:
        """Return when the wait is over; never while an answer waits to be taken in, as that delay is this process's,
        not the tier's."""
        if not self.pages:
            return now + self.left_seconds
        return math.inf if any(page.answered for page in self.pages) else self.since + self.left_seconds

    def expired(self, now: float) -> bool:
        return now >= self.expires_at(now)

    def begin(self, page: _Page, now: float) -> None:
        if not self.pages:
            self.since = now
        self.pages.add(page)
        page.waits.add(self)

    def end(self, page: _Page, answered_at: float) -> None:
        self.pages.discard(page)
        if not self.pages:
            self.left_seconds -= max(0.0, answered_at - self.since)


@dataclass(slots=True, eq=False)
class _Batch:
    pages: list[_Page]
    deadline: float
    answered_at: float = math.inf


class _Answer(NamedTuple):
    """An answer about one page, to be taken in. found: None if the tier gave none."""

    page: _Page
    found: list[bool] | None
    at: float


class TierLookups:
    """Lookups in one tier. ``timeout_seconds`` bounds a batch and the total wait of one request.

    ``answered_requests`` receives the requests with a PENDING key that has been answered or given up.
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
        answered_requests: ChangeLog[str],
        renewals: Renewals,
    ) -> None:
        self._renewals = renewals
        self.resident_bytes = 0
        self.seconds = 0.0  # that the last answered batch took
        self.ready = False  # whether the tier answered when it was last asked how much it holds
        self._tier = tier
        self._contains_now: ContainsNow | None = tier.contains_now if tier.has_local_index else None
        self._presence = presence
        self._counters = counters
        self._lookup_breaker = lookup_breaker
        self._load_breaker = load_breaker
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._progress = progress
        self._answered_requests = answered_requests
        self._waits: OrderedDict[str, _Wait] = OrderedDict()  # of a dict the oldest is slow to find
        self._asked: dict[bytes, _Page] = {}  # open keys
        self._unsent: list[_Page] = []
        self._batches: dict[_Batch, None] = {}  # without an answer, in the order of their deadlines
        self._to_take_in: deque[_Answer] = deque()
        self._keys_left = TAKEN_IN_KEYS_MAX  # to take in during this step
        self._questions: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._answers: deque[tuple[_Batch, list[list[bool]] | TierError]] = deque()  # by page
        self._problem = ""
        self._thread = CallingThread(f"spillway-{tier.name}-lookup", self._answer)

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    @property
    def idle(self) -> bool:
        """Whether :meth:`collect` would find nothing to take in or to give up."""
        return not self._asked and not self._answers

    @property
    def open(self) -> bool:
        """Whether lookups are sent at all: not while their breaker or that of loads is open."""
        return self._lookup_breaker.would_allow() and self._load_breaker.would_allow()

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Look up one key without blocking. A PENDING key is asked for at the next :meth:`flush`."""
        return self.lookup_batch((key,), request_id).found[0]

    def lookup_batch(self, keys: Sequence[bytes], request_id: str) -> Answers:
        """Answer for one request's keys, at least one, as :meth:`lookup` would in sequence, up to the first MISS."""
        if not self.open:
            return self._miss(LookupOutcome.REFUSED)
        if self._answers:
            self.collect()
        now = self._clock()
        absent_until = self._absent_until(keys[0], now)
        if absent_until is not None:  # a prompt never seen before: its first chunk decides
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
        pending = 0
        unasked: list[bytes] = []
        ended_by: LookupOutcome | None = None
        valid_until = math.inf
        for key, expiry in zip(keys, expiries, strict=True):
            if expiry is not None and now < abs(expiry):
                if expiry < 0:
                    ended_by, valid_until = LookupOutcome.MISS, -expiry
                    break
                found.append(Lookup.HIT)
                continue
            wait = wait or self._wait_of(request_id)
            if wait.expired(now):
                ended_by = LookupOutcome.EXPIRED
                break
            page = self._asked.get(key)
            if page is not None:
                wait.begin(page, now)
            elif len(self._asked) + len(unasked) < ASKED_KEYS_MAX:
                unasked.append(key)
            else:
                ended_by, valid_until = LookupOutcome.REFUSED, now  # there may be room at any time
                break
            pending += 1
            found.append(Lookup.PENDING)
        if wait is not None and pending:
            self._ask(unasked, wait, now)
            valid_until = min(valid_until, wait.expires_at(now))
        if len(found) > pending:
            self._counters.lookups[LookupOutcome.HIT] += len(found) - pending
        if ended_by is not None:
            self._counters.count_lookup(ended_by)
            found.append(Lookup.MISS)
        return Answers(found, valid_until)

    def _ask_all(self, keys: Sequence[bytes], wait: _Wait, now: float) -> Answers:
        """Ask for all keys, if none has an answer: the usual new prompt, without a loop."""
        if wait.expired(now):
            return self._miss(LookupOutcome.EXPIRED)
        asked = self._asked
        if asked.keys().isdisjoint(keys):
            self._ask(keys, wait, now)
        else:
            for page in {asked[key] for key in keys if key in asked}:
                wait.begin(page, now)
            self._ask([key for key in keys if key not in asked], wait, now)
        return Answers([Lookup.PENDING] * len(keys), wait.expires_at(now))

    def _ask(self, keys: Sequence[bytes], wait: _Wait, now: float) -> None:
        """Have keys that are not open asked for at the next flush."""
        begin = 0
        while begin < len(keys):
            if not self._unsent or len(self._unsent[-1].keys) >= PAGE_KEYS:
                self._unsent.append(_Page())
            page = self._unsent[-1]
            end = begin + PAGE_KEYS - len(page.keys)
            page.keys += keys[begin:end]
            self._asked.update(dict.fromkeys(keys[begin:end], page))
            wait.begin(page, now)
            begin = end

    def _absent_until(self, key: bytes, now: float) -> float | None:
        """Ask a tier that can answer at once; return until when the key is known to be absent, or None."""
        known = self._presence.get(key, now)
        if known is None and self._contains_now is not None:
            answers = self._contains_now((key,))
            if answers is not None:
                known = answers[0]
                self._presence.put(key, known, now)
        return None if known is not False else self._presence.absent_until(key)

    def _known(self, keys: Sequence[bytes], now: float) -> list[float | None]:
        """presence.get_many, after asking a tier that answers at once; keys behind an absent one may lack answers."""
        expiries = self._presence.get_many(keys)
        if self._contains_now is None:
            return expiries
        unknown = _unknown(keys, expiries, now)
        return self._presence.get_many(keys) if self._ask_now(unknown, now) else expiries

    def _ask_now(self, keys: Sequence[bytes], now: float) -> bool:
        """Have the tier answer up to the first absent key, and store the answers. False: it gave none."""
        assert self._contains_now is not None
        begin, end = 0, _FIRST_ASKED
        while begin < len(keys):
            asked = keys[begin:end]
            answers = self._contains_now(asked)
            if answers is None:
                break
            there = len(asked) if all(answers) else answers.index(False)
            if there:
                self._presence.put_many(asked[:there], True, now)
            if there < len(asked):
                self._presence.put(asked[there], False, now)
                return True
            begin, end = end, end * _ASKED_GROWTH
        return begin > 0

    def _wait_of(self, request_id: str) -> _Wait:
        wait = self._waits.get(request_id)
        if wait is None:
            while len(self._waits) >= WAITING_REQUESTS_MAX:
                self._waits.popitem(last=False)
            wait = self._waits[request_id] = _Wait(request_id, self._timeout_seconds)
        return wait

    def flush(self) -> None:
        """The end of a step: send what was asked since the last one, as one batch."""
        self._keys_left = TAKEN_IN_KEYS_MAX
        if not self._unsent:
            return
        pages, self._unsent = self._unsent, []
        now = self._clock()
        if not self._lookup_breaker.allow():
            self._to_take_in.extend(_Answer(page, None, now) for page in pages)
            return
        self._thread.replace_if_stuck(now)
        batch = _Batch(pages, now + self._timeout_seconds)
        self._batches[batch] = None
        self._questions.put(batch)

    def collect(self) -> None:
        """Take in answers, as many as one step may, and give up batches beyond their deadline."""
        while self._answers:
            batch, answer = self._answers.popleft()
            if batch not in self._batches:
                continue  # given up before; its keys may have been asked for again
            del self._batches[batch]
            if isinstance(answer, TierError):
                self._counters.count_failure(Operation.LOOKUP, answer.reason)
                self._lookup_breaker.record_failure()
                absent = [False] * PAGE_KEYS
                answers = [absent[: len(page.keys)] for page in batch.pages]
            else:
                self._lookup_breaker.record_success()
                answers = answer
                self.seconds = max(0.0, batch.answered_at - (batch.deadline - self._timeout_seconds))
            for page, found in zip(batch.pages, answers, strict=True):
                page.answered = True
                self._to_take_in.append(_Answer(page, found, batch.answered_at))
        if self._batches:
            now = self._clock()
            while self._batches:
                batch = next(iter(self._batches))
                if now < batch.deadline:
                    break
                del self._batches[batch]
                self._to_take_in.extend(_Answer(page, None, now) for page in batch.pages)
                self._counters.count_failure(Operation.LOOKUP, UnreachableReason.TIMEOUT)
                self._counters.expiries[Operation.LOOKUP] += 1
                self._lookup_breaker.record_failure()
        while self._to_take_in and self._keys_left > 0:
            self._take_in(self._to_take_in.popleft())

    def drop_request(self, request_id: str) -> None:
        self._waits.pop(request_id, None)

    def stop(self) -> None:
        """Ask the thread to end; it may be stuck in a call."""
        self._questions.put(None)

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _take_in(self, answer: _Answer) -> None:
        page, found, at = answer
        self._keys_left -= len(page.keys)
        deque(map(self._asked.pop, page.keys, repeat(None)), maxlen=0)
        for wait in page.waits:
            wait.end(page, at)
        self._answered_requests.add([wait.request_id for wait in page.waits])
        page.waits.clear()
        if found is None:
            return
        now = self._clock()
        present = list(compress(page.keys, found))
        if present:
            self._presence.put_many(present, True, now)
        if len(present) < len(page.keys):
            absent = [key for key, there in zip(page.keys, found, strict=True) if not there]
            self._presence.put_many(absent, False, now)

    def _miss(self, outcome: LookupOutcome) -> Answers:
        self._counters.count_lookup(outcome)
        return Answers([Lookup.MISS], math.inf)

    def _answer(self, call: Call) -> None:
        """The lookup thread."""
        self._read_size(call, START_SECONDS)
        resident_due = self._clock() + RESIDENT_SECONDS
        while not call.lost:
            try:
                batch = self._questions.get(timeout=0.0 if self._renewals.waiting else RESIDENT_SECONDS)
            except queue.Empty:
                pass
            else:
                if batch is None:
                    return
                answer = self._answer_to(call, batch)
                batch.answered_at = self._clock()
                self._answers.append((batch, answer))
                self._progress()
            if self._clock() >= resident_due and self._lookup_breaker.would_allow():
                resident_due = self._clock() + RESIDENT_SECONDS
                self._read_size(call, self._timeout_seconds)
            if self._renewals.waiting:
                self._renew(call)

    def _renew(self, call: Call) -> None:
        try:
            deadline = call.deadline = self._clock() + self._timeout_seconds
            self._renewals.renew_page(deadline)
        except Exception as error:  # a defect of a tier must not cost the thread
            problem = self._count(Upkeep.RENEW, error)
            if not isinstance(error, TierError):
                _log.error("Shared tier %s: %s", self._tier.name, problem)
        call.deadline = None

    def _read_size(self, call: Call, timeout_seconds: float) -> None:
        """Ask the tier how much it holds, which also checks that it can be used, from the start on."""
        try:
            deadline = call.deadline = self._clock() + timeout_seconds
            self._tier.prepare(deadline)
            self.resident_bytes = self._tier.resident_bytes(deadline)
            ready, problem = True, ""
        except Exception as error:  # of the tier, or a defect of it, which must not cost the thread
            if as_tier_error(error).reason is RefusedReason.CLOSED:
                return  # by this process, which needs it no more
            ready, problem = False, self._count(Upkeep.CHECK, error)
        finally:
            call.deadline = None
        if call.lost:
            return
        if problem and problem != self._problem:
            _log.error("Shared tier %s cannot be used; the engine serves without it: %s", self._tier.name, problem)
        elif ready and self._problem:
            _log.warning("Shared tier %s can be used again", self._tier.name)
        self.ready, self._problem = ready, problem

    def _count(self, upkeep: Upkeep, error: Exception) -> str:
        """Count a failure, of which no breaker hears: only real work counts for one. Returns what the error says."""
        failure = as_tier_error(error)
        self._counters.count_failure(upkeep, failure.reason)
        return str(failure)

    def _answer_to(self, call: Call, batch: _Batch) -> list[list[bool]] | TierError:
        # Joined and split in this thread: for 65,536 keys that alone takes a millisecond.
        keys = [key for page in batch.pages for key in page.keys]
        call.deadline = batch.deadline
        try:
            try:
                found = iter(self._tier.contains(keys, batch.deadline))
            except TierPartlyAsked as error:
                self._counters.count_failure(Operation.LOOKUP, error.reason)
                found = iter(error.found)
            return [list(islice(found, len(page.keys))) for page in batch.pages]
        except Exception as error:  # a defect of a tier must cost a miss, not the thread
            return without_frames(as_tier_error(error))
        finally:
            call.deadline = None


def _unknown(keys: Sequence[bytes], expiries: list[float | None], now: float) -> Sequence[bytes]:
    """Return the keys without a valid answer, up to the first that is known to be absent."""
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
