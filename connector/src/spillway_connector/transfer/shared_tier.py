"""Drives a shared tier, which may be slow, failing or hung, from vLLM's scheduler thread, which must never wait.

All methods of :class:`SharedTier` are called on the scheduler thread and return at once (``drain`` and ``close``
excepted). A thread of lookups.py answers lookups, the threads of movers.py move bytes; their results are taken in here,
so counters, the presence index and jobs belong to one thread.

Work is batched: the cost of a scheduler step depends on what changed in it, not on the number of blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.limits import DEFAULT_LIMITS, TransferLimits
from spillway_connector.plan.prefix_memo import ChangeLog, PresenceIndex
from spillway_connector.plan.request_frequency import FrequencySketch
from spillway_connector.plan.sessions import SessionFollower, SessionHint, session_tag
from spillway_connector.tiers.tier import NO_TENANT, BilledTier, Clock, SessionTier, Tier
from spillway_connector.transfer.announcements import Announcement, Announcements
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.jobs import JobOutcome, TransferJob, check_shape
from spillway_connector.transfer.lookups import Answers, Lookup, TierLookups
from spillway_connector.transfer.movers import Movers
from spillway_connector.transfer.open_jobs import OpenJobs
from spillway_connector.transfer.renewals import Renewals
from spillway_connector.transfer.stats import MissReason, Operation, SkipReason, TierCounters, TierStats

_SEEN_BEFORE = 2  # what a tier under pressure admits: this request and one before it asked for the chunk


class SharedTier:
    """Drives ``tier`` for one scheduler thread.

    rows: flat writable bytes of the CPU tier, row i at ``i * row_bytes``; its first ``payload_bytes`` are moved, the
    padding is not. ``tier`` is closed by close(). ``room_bytes``: what it has room for, if that is known.
    ``admits_all``: whether it takes what was asked for once also while it is short of room.
    ``announcements``: given if anybody hears them. ``answered_requests``: requests whose lookup may return something
    else than PENDING now. ``counters``: for the scheduler thread. ``before``: the object whose place this one takes,
    with another namespace; it goes on counting, and says from then on nothing of its own.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rows: memoryview,
        row_bytes: int,
        payload_bytes: int,
        limits: TransferLimits = DEFAULT_LIMITS,
        clock: Clock = time.monotonic,
        announcements: Announcements | None = None,
        room_bytes: int = 0,
        admits_all: bool = False,
        answered_requests: ChangeLog[str] | None = None,
        progress: threading.Event | None = None,
        before: SharedTier | None = None,
    ) -> None:
        if tier.payload_bytes != payload_bytes or not 0 < payload_bytes <= row_bytes:
            raise ValueError(f"payload_bytes: {payload_bytes}; the tier has {tier.payload_bytes}, a row {row_bytes}")
        self.answered_requests: ChangeLog[str] = ChangeLog() if answered_requests is None else answered_requests
        self._tier = tier
        self._rows_total = rows.nbytes // row_bytes
        self._payload_bytes = payload_bytes
        self._room_bytes = room_bytes
        self._admits_all = admits_all
        self._limits = limits
        self._clock = clock
        self.counters: TierCounters = TierCounters() if before is None else before.counters
        self._presence = PresenceIndex()
        self._frequency = FrequencySketch()
        self._session_tier = tier if isinstance(tier, SessionTier) else None
        self._sessions = SessionFollower()
        if before is not None and before._announcements is not None:
            announcements = before._announcements.successor()
        self._announcements: Announcements | None = announcements
        self._breakers = {operation: Breaker(limits.breaker, clock) for operation in Operation}
        self._lookup_breaker, self._load_breaker = (self._breakers[of] for of in (Operation.LOOKUP, Operation.LOAD))
        self._progress = threading.Event() if progress is None else progress
        self._renewals = Renewals(tier, clock)
        self._lookups = TierLookups(
            tier,
            self._presence,
            self.counters,
            lookup_breaker=self._breakers[Operation.LOOKUP],
            load_breaker=self._breakers[Operation.LOAD],
            timeout_seconds=limits.lookup_timeout_seconds,
            clock=clock,
            progress=self._progress.set,
            answered_requests=self.answered_requests,
            renewals=self._renewals,
        )
        self._movers = Movers(
            tier,
            np.frombuffer(rows, np.uint8),
            row_bytes=row_bytes,
            payload_bytes=payload_bytes,
            threads=limits.io_threads,
            store_queue_seconds_max=limits.store_queue_seconds_max,
            breakers=self._breakers,
            counters=self.counters,
            clock=clock,
            progress=self._progress.set,
        )
        self._jobs = OpenJobs(
            self._movers,
            self._presence,
            self.counters,
            payload_bytes=payload_bytes,
            limits=limits,
            breakers=self._breakers,
            clock=clock,
            progress=self._progress,
            announcements=announcements,
        )
        self._weights_changed = False
        self._closed = False

    # --- lookups --------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the tier accepts lookups: not while a breaker is open or after a change of weights."""
        closed = self._lookup_breaker.open_until is None and self._load_breaker.open_until is None
        return not self._weights_changed and (closed or self._lookups.open)

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Whether the tier holds ``key``. PENDING at most ``lookup_timeout_seconds`` per request in total."""
        return self.lookup_prefix((key,), request_id).found[0]

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> Answers:
        """Return :meth:`lookup`'s answers for ``keys`` (at least one), up to and including the first MISS."""
        self.counters.moved = True
        if self._weights_changed:
            self.counters.misses[MissReason.WEIGHTS_CHANGED] += 1
            return Answers([Lookup.MISS], float("inf"))
        answers = self._lookups.lookup_batch(keys, request_id)
        if self._announcements is not None:
            self._announce(self._announcements, keys, answers.found)
        return answers

    def count_request(self, keys: Sequence[bytes]) -> None:
        """Record the chunks of a new request, once: under pressure the tier admits chunks requested at least twice."""
        self._frequency.note(keys)

    def begin_request_of_session(self, tenant: bytes, hint: SessionHint) -> None:
        if self._session_tier is not None:
            self._sessions.begin_request(tenant, hint, self._clock())

    def use_session(self, tenant: bytes, hint: SessionHint, keys: Sequence[bytes]) -> None:
        """A request of the session uses these chunks, in the order of the prefix, whichever tier they came from."""
        if self._session_tier is not None:
            self._session_tier.use_session(self._sessions.use(tenant, hint, keys, self._clock()))

    def end_request_of_session(self, tenant: bytes, hint: SessionHint) -> None:
        if self._session_tier is not None:
            self._session_tier.use_session(self._sessions.end_request(tenant, hint, self._clock()))

    def retain(self, tenant: bytes, share: float, seconds: float, keys: Sequence[bytes]) -> None:
        """A client asks to retain these chunks, in the order of the prefix; share: of the tier, for its tenant."""
        self._renewals.hold(
            tenant,
            share,
            seconds,
            keys,
            room_bytes=max(self._room_bytes, self._lookups.resident_bytes),
            chunk_bytes=self._payload_bytes,
        )

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit_load(self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int]) -> None:
        """Fill the rows from the tier. The job is reported once by :meth:`finished`, at its deadline at the latest."""
        job = self._open(job_id, Operation.LOAD, keys, row_indices)
        if self._closed:
            self._jobs.refuse(job, keys, RefusedReason.CLOSED, "the tier is closed")
        elif self._weights_changed:
            self._jobs.refuse(job, keys, RefusedReason.CLOSED, "the model's weights have changed")
        else:
            room = self._jobs.room(Operation.LOAD, self._limits.load_queue_bytes_max, len(keys))
            self._jobs.start(job, list(keys[:room]), list(row_indices[:room]))
            limit = self._limits.load_queue_bytes_max
            self._jobs.refuse(
                job, keys[room:], RefusedReason.QUEUE_FULL, f"load_queue_bytes_max: {limit} bytes are in hand"
            )
        self._jobs.end_if_done(job)

    def submit_store(
        self,
        job_id: int,
        keys: Sequence[bytes],
        row_indices: Sequence[int],
        tenant: bytes = NO_TENANT,
        session: SessionHint | None = None,
        *,
        hand_over: bool = False,
    ) -> None:
        """Write the rows to the tier for ``tenant``; they must stay unchanged until the job is reported.

        session: the session of the chunks' request. hand_over: another engine is to load them as soon as they are
        announced, so they are announced when the store has ended, and a tier under pressure admits them. Keys that are
        there already, or on their way by another job, count as done; so do others that a tier under pressure does not
        admit, and all once the weights have changed. If the breaker is open or too many bytes are under way, the rest
        is dropped and counted: no request waits for a store.
        """
        job = self._open(job_id, Operation.STORE, keys, row_indices, tenant)
        job.hand_over = hand_over
        if session is not None and self._session_tier is not None:
            job.session = session_tag(session)
        if self._closed:
            self._jobs.refuse(job, keys, RefusedReason.CLOSED, "the tier is closed")
        elif self._weights_changed:
            self._jobs.skip(job, keys, SkipReason.WEIGHTS_CHANGED)
        else:
            known = self._presence.present_of(keys, job.queued_at)
            if known and self._announcements is not None:
                self._announcements.found(known)
            if not self._jobs.storing.isdisjoint(keys):
                known |= self._jobs.storing.intersection(keys)
            wanted, rows = list(keys), list(row_indices)
            if known:
                self._jobs.skip(job, known, SkipReason.PRESENT)
                wanted, rows = _those_not_in(known, wanted, rows)
            # The other engine asks next for the chunks that are handed over.
            if self._tier.under_pressure and not hand_over and not self._admits_all:
                rare = self._requested_once(wanted)
                rare -= self._renewals.held_of(rare)
                if job.session is not None and session is not None and self._sessions.is_expected(tenant, session):
                    job.own_room = frozenset(rare)  # they will be asked for: room is for the tenant to give
                else:
                    self._jobs.skip(job, rare, SkipReason.ADMISSION)
                    wanted, rows = _those_not_in(rare, wanted, rows)
            if not self._breakers[Operation.STORE].would_allow():
                self._jobs.refuse(
                    job, wanted, RefusedReason.BREAKER_OPEN, "the tier keeps failing; its circuit breaker is open"
                )
            else:
                limit = self._limits.store_queue_bytes_max
                room = self._jobs.room(Operation.STORE, limit, len(wanted))
                if room < len(wanted):
                    message = f"store_queue_bytes_max: {limit} bytes are in hand"
                    self._jobs.refuse(job, wanted[room:], RefusedReason.QUEUE_FULL, message)
                    wanted, rows = wanted[:room], rows[:room]
                self._jobs.storing.update(wanted)
                if self._announcements is not None and not hand_over:
                    self._announcements.storing(wanted)
                self._jobs.start(job, wanted, rows)
        self._jobs.end_if_done(job)

    def finished(self) -> list[JobOutcome]:
        """The jobs that ended since the last call, each exactly once. A failed load's keys are known missing before."""
        if not self._lookups.idle:
            self._lookups.collect()
        if self._weights_changed and self._jobs.loads:
            self._give_up_loads()  # a row that a worker held when they changed
        return self._jobs.finished()

    def arrived(self) -> list[tuple[int, list[bytes]]]:
        """(job, keys) of slow loads: keys whose rows were filled since the last call, each once. The jobs still end."""
        return self._jobs.arrived()

    def give_up_behind(self, seconds_per_chunk: float, spared: Callable[[int], bool]) -> None:
        """Give up the loads that computing has overtaken.

        seconds_per_chunk: to compute one. spared: whether the job of this id goes on, since no request waits for it.
        """
        if self._jobs.loads:
            self._jobs.give_up_behind(seconds_per_chunk, self._lookups.seconds, spared)

    def request_finished(self, request_id: str) -> None:
        """Drop the request's waiting time. Its jobs go on and are reported."""
        self._lookups.drop_request(request_id)

    def take_announcements(self) -> list[tuple[str, Announcement]]:
        """Return the announcements about the tier's contents since the last call, in order, each with the tier's name.

        Called once per scheduler step.
        """
        if self._announcements is None:
            return []
        taken = self._announcements.take(self._tier.store_id, self._lookups.ready and self.open)
        return [(self._tier.name, announcement) for announcement in taken]

    @property
    def introduced(self) -> bool:
        """Whether it was announced that this engine loads from the store; True if nothing is announced."""
        return self._announcements is None or self._announcements.introduced

    @property
    def tier_name(self) -> str:
        """The tier's metric label."""
        return self._tier.name

    def breaker_of(self, operation: Operation) -> Breaker:
        """Return the breaker, for what uses the tier beside this object."""
        return self._breakers[operation]

    def known_present(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of the chunks that the tier holds by its last valid answer; the tier is not asked."""
        return self._presence.present_of(keys, self._clock())

    def known(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of the chunks that the tier holds by its last valid answer, or that are on their way to it."""
        return self.known_present(keys) | self._jobs.storing.intersection(keys)

    def stores_in_hand(self) -> int:
        """Chunks of stores under way, whose rows cannot be evicted."""
        return sum(job.open_items for job in self._jobs.stores.values())

    def stored_by_others(self, keys: Sequence[bytes]) -> None:
        """Note that another part of this process has stored these chunks in the tier."""
        self._presence.put_many(list(keys), True, self._clock())
        if self._announcements is not None:
            self._announcements.storing(keys)

    def step_end(self) -> None:
        """Send this step's lookups as one batch. Called once per scheduler step."""
        self._lookups.flush()

    def has_work(self) -> bool:
        """Whether a job or a lookup is under way."""
        return self._jobs.busy or self._lookups.has_work

    def reset(self) -> None:
        """Drop all answers about keys (after a purge, or a repair of the store)."""
        self._presence.clear()
        self.answered_requests.add_all()

    def weights_changed(self) -> None:
        """The model's weights were changed: neither load nor store under this namespace any more.

        Stores under way were computed before and may end. Loads under way are given up. Final: another namespace
        needs another object.
        """
        self._weights_changed = self.counters.moved = True
        self.counters.weights_changes += 1
        self._give_up_loads()
        self._renewals.clear()
        self.reset()

    def snapshot(self) -> TierStats:
        """All counters and gauges now. Cheap."""
        waiting_since = self._movers.oldest_store_queued_at()
        return TierStats(
            **self.counters.copied(),
            tier=self._tier.name,
            quarantined=dict(self._tier.quarantined),
            evictions=self.evictions(),
            requests=dict(self._tier.requests) if isinstance(self._tier, BilledTier) else {},
            resident_bytes=self._lookups.resident_bytes,
            queued_store_bytes=self._jobs.queued_bytes[Operation.STORE],
            queued_load_bytes=self._jobs.queued_bytes[Operation.LOAD],
            oldest_store_seconds=0.0 if waiting_since is None else self._clock() - waiting_since,
            ready=self._lookups.ready,
            weights_changed=self._weights_changed,
            held_blocks=len(self._renewals),
            breakers={operation: breaker.state for operation, breaker in self._breakers.items()},
        )

    def evictions(self) -> dict[str, int]:
        """Undamaged frames that this process removed, by reason."""
        return {str(reason): count for reason, count in self._tier.evictions.items()}

    @property
    def evicted_frames(self) -> int:
        """All of :meth:`evictions` together."""
        return sum(self._tier.evictions.values())

    # --- the end ----------------------------------------------------------------------------------------------------

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """Block (real time) until a thread has reported a result since the last wait. For drains and tests."""
        came = self._progress.wait(timeout_seconds)
        self._progress.clear()
        return came

    def drain(self, timeout_seconds: float) -> bool:
        """Block until no thread touches a row: let jobs end for that long (real time), then cancel the rest.

        Every job is still reported by :meth:`finished`. False only if a memory copy did not end in another second.
        """
        return self._jobs.wait_until_idle(timeout_seconds) or self._jobs.cancel_all()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Drain, stop the threads, close the tier and drop the reference to the rows. Bounded in time; idempotent."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + timeout_seconds
        self.drain(timeout_seconds / 2)
        self._lookups.stop()
        self._movers.stop()
        self._tier.close()  # wakes threads that wait for a socket
        self._lookups.join(max(0.0, until - time.monotonic()))
        self._movers.join(max(0.0, until - time.monotonic()))

    def _announce(self, announcements: Announcements, keys: Sequence[bytes], found: list[Lookup]) -> None:
        """found: the answers about ``keys``, up to the first MISS, which may be for want of time or room."""
        hits = [key for key, answer in zip(keys, found, strict=False) if answer is Lookup.HIT]
        if hits:
            announcements.found(hits)
        if found[-1] is Lookup.MISS:
            key = keys[len(found) - 1]
            if self._presence.get(key, self._clock()) is False:
                announcements.missed(key)

    def _give_up_loads(self) -> None:
        changed = TierRefused(RefusedReason.CLOSED, "the model's weights have changed")
        for job in list(self._jobs.loads.values()):
            self._jobs.void(job, lambda _: changed)
            self._jobs.end_if_done(job)

    def _requested_once(self, keys: list[bytes]) -> set[bytes]:
        """Return the keys that were requested only once so far. A tier that is short of room does not admit them."""
        frequent = (self._frequency.estimate(keys) >= _SEEN_BEFORE).tolist()
        return {key for key, seen in zip(keys, frequent, strict=True) if not seen}

    def _open(
        self,
        job_id: int,
        operation: Operation,
        keys: Sequence[bytes],
        row_indices: Sequence[int],
        tenant: bytes = NO_TENANT,
    ) -> TransferJob:
        check_shape(keys, row_indices, self._rows_total)
        return self._jobs.open(job_id, operation, tenant)


def _those_not_in(known: set[bytes], keys: list[bytes], rows: list[int]) -> tuple[list[bytes], list[int]]:
    left = [(key, row) for key, row in zip(keys, rows, strict=True) if key not in known]
    return [key for key, _ in left], [row for _, row in left]


__all__ = ["JobOutcome", "Lookup", "SharedTier", "TransferLimits"]
