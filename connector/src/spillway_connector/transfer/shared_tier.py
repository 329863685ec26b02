"""The shell between vLLM's scheduler thread, which must never wait, and a tier, which may be slow, sick or hung.

:class:`SharedTier` lives in the scheduler thread, and every method of it returns at once (``drain`` and ``close``
excepted). Questions are answered by a thread of lookups.py, bytes are moved by the threads of movers.py; what they
report is taken in here, so counters, the memory of what is where, and jobs belong to one thread.

Batches are the rule: what a scheduler step costs here depends on what changed in it, not on how many blocks are known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from spillway_connector.errors import RefusedReason, TierError, TierRefused, TierTimeout
from spillway_connector.limits import DEFAULT_LIMITS, TransferLimits
from spillway_connector.plan.prefix_memo import ChangeLog, PresenceIndex
from spillway_connector.plan.request_frequency import FrequencySketch
from spillway_connector.tiers.tier import NO_TENANT, Clock, Tier
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.jobs import JobOutcome, TransferJob, check_shape
from spillway_connector.transfer.lookups import Answers, Lookup, LookupDesk
from spillway_connector.transfer.movers import LateEnd, Movers
from spillway_connector.transfer.stats import (
    SHED_REASONS,
    MissReason,
    Operation,
    SkipReason,
    TierCounters,
    TierStats,
    miss_of_error,
)

ARRIVALS_REPORTED_SECONDS = 0.01  # a load that ends sooner is reported as a whole, which costs the scheduler less
_SEEN_BEFORE = 2  # what a tier under pressure admits: this request and one before it asked for the chunk


class SharedTier:
    """Drives ``tier`` for one scheduler thread.

    rows: flat writable bytes of the CPU tier, row i at ``i * row_bytes``; its first ``payload_bytes`` are moved, the
    padding is not. ``tier`` is owned from here on: close() closes it. ``answered_requests``:
    those whose lookup may return something else than PENDING now. ``counters``: to be read in the scheduler thread.
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
    ) -> None:
        if tier.payload_bytes != payload_bytes or not 0 < payload_bytes <= row_bytes:
            raise ValueError(f"payload_bytes: {payload_bytes}; the tier has {tier.payload_bytes}, a row {row_bytes}")
        self.answered_requests: ChangeLog[str] = ChangeLog()
        self.moved = True  # a counter or gauge may have; for its reader to clear
        self._tier = tier
        self._rows_total = rows.nbytes // row_bytes
        self._payload_bytes = payload_bytes
        self._limits = limits
        self._clock = clock
        self.counters = TierCounters()
        self._presence = PresenceIndex()
        self._frequency = FrequencySketch()
        self._breakers = {operation: Breaker(limits.breaker, clock) for operation in Operation}
        self._lookup_breaker, self._load_breaker = (self._breakers[of] for of in (Operation.LOOKUP, Operation.LOAD))
        self._progress = threading.Event()
        self._desk = LookupDesk(
            tier,
            self._presence,
            self.counters,
            lookup_breaker=self._breakers[Operation.LOOKUP],
            load_breaker=self._breakers[Operation.LOAD],
            timeout_seconds=limits.lookup_timeout_seconds,
            clock=clock,
            progress=self._progress.set,
            answered_requests=self.answered_requests,
        )
        self._movers = Movers(
            tier,
            np.frombuffer(rows, np.uint8),
            row_bytes=row_bytes,
            payload_bytes=payload_bytes,
            threads=limits.io_threads,
            store_queue_seconds_max=limits.store_queue_seconds_max,
            breakers=self._breakers,
            clock=clock,
            progress=self._progress.set,
        )
        # In the order of their deadlines: one timeout per operation.
        self._loads: dict[int, TransferJob] = {}
        self._stores: dict[int, TransferJob] = {}
        self._jobs = {Operation.LOAD: self._loads, Operation.STORE: self._stores}
        self._ended: list[TransferJob] = []
        self._storing: set[bytes] = set()
        self._queued_bytes = {Operation.LOAD: 0, Operation.STORE: 0}
        self._weights_changed = False
        self._closed = False

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether a lookup is worth asking: not while the tier rests."""
        closed = self._lookup_breaker.open_until is None and self._load_breaker.open_until is None
        return not self._weights_changed and (closed or self._desk.open)

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Whether the tier holds ``key``. PENDING at most ``lookup_timeout_seconds`` per request in total."""
        return self.lookup_prefix((key,), request_id).found[0]

    def lookup_prefix(self, keys: Sequence[bytes], request_id: str) -> Answers:
        """What :meth:`lookup` would say of each of ``keys`` (at least one), up to and including the first MISS."""
        self.moved = True
        if self._weights_changed:
            self.counters.misses[MissReason.WEIGHTS_CHANGED] += 1
            return Answers([Lookup.MISS], float("inf"))
        return self._desk.lookup_batch(keys, request_id)

    def count_request(self, keys: Sequence[bytes]) -> None:
        """The chunks of a new request, once: what is asked for twice is worth keeping when room is short."""
        self._frequency.note(keys)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit_load(self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int]) -> None:
        """Fill the rows from the tier. The job is reported once by :meth:`finished`, at its deadline at the latest."""
        job = self._new_job(job_id, Operation.LOAD, keys, row_indices)
        if self._closed:
            self._refuse(job, keys, RefusedReason.CLOSED, "the tier is closed")
        elif self._weights_changed:
            self._refuse(job, keys, RefusedReason.CLOSED, "the model's weights have changed")
        else:
            room = self._room(Operation.LOAD, self._limits.load_queue_bytes_max, len(keys))
            self._start(job, list(keys[:room]), list(row_indices[:room]))
            limit = self._limits.load_queue_bytes_max
            self._refuse(job, keys[room:], RefusedReason.QUEUE_FULL, f"load_queue_bytes_max: {limit} bytes are in hand")
        self._end_if_done(job)

    def submit_store(
        self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int], tenant: bytes = NO_TENANT
    ) -> None:
        """Write the rows to the tier for ``tenant``; they must stay unchanged until the job is reported.

        Keys that are there already, or on their way by another job, count as done; so do those that a tier under
        pressure does not admit, and all once the weights have changed. With the breaker open or too many bytes in hand
        the rest is dropped and counted: nobody waits for a store.
        """
        job = self._new_job(job_id, Operation.STORE, keys, row_indices, tenant)
        if self._closed:
            self._refuse(job, keys, RefusedReason.CLOSED, "the tier is closed")
        elif self._weights_changed:
            self._skip(job, keys, SkipReason.WEIGHTS_CHANGED)
        else:
            known = self._presence.present_of(keys, job.queued_at)
            if not self._storing.isdisjoint(keys):
                known |= self._storing.intersection(keys)
            wanted, rows = list(keys), list(row_indices)
            if known:
                self._skip(job, known, SkipReason.PRESENT)
                wanted, rows = _those_not_in(known, wanted, rows)
            if self._tier.under_pressure:
                wanted, rows = _those_not_in(self._not_admitted(job, wanted), wanted, rows)
            if not self._breakers[Operation.STORE].would_allow():
                self._refuse(job, wanted, RefusedReason.BREAKER_OPEN, "the tier keeps failing and is left alone")
            else:
                limit = self._limits.store_queue_bytes_max
                room = self._room(Operation.STORE, limit, len(wanted))
                if room < len(wanted):
                    message = f"store_queue_bytes_max: {limit} bytes are in hand"
                    self._refuse(job, wanted[room:], RefusedReason.QUEUE_FULL, message)
                    wanted, rows = wanted[:room], rows[:room]
                self._storing.update(wanted)
                self._start(job, wanted, rows)
        self._end_if_done(job)

    def finished(self) -> list[JobOutcome]:
        """The jobs that ended since the last call, each exactly once. A failed load's keys are known missing before."""
        if not self._desk.idle:
            self._desk.collect()
        if self._loads or self._stores or self._movers.late:
            self._collect()
        if not self._ended:
            return []
        self.moved = True
        loads_first = sorted(self._ended, key=lambda job: job.operation is Operation.STORE)  # they are waited for
        outcomes = [job.outcome() for job in loads_first]
        self._ended.clear()
        return outcomes

    def arrived(self) -> list[tuple[int, list[bytes]]]:
        """Of loads that take their time: job and keys whose rows were filled since the last call. Their jobs still end.

        A key is told once, and only where its row has its bytes.
        """
        if not self._loads:
            return []
        slow_since = self._clock() - ARRIVALS_REPORTED_SECONDS
        news: list[tuple[int, list[bytes]]] = []
        for job in self._loads.values():
            if job.queued_at > slow_since:
                break  # and so are those behind it
            keys = job.take_arrived()
            if keys:
                news.append((job.job_id, keys))
        return news

    def request_finished(self, request_id: str) -> None:
        """Forget how long a request has waited. Its jobs go on and are reported."""
        self._desk.forget(request_id)

    def step_end(self) -> None:
        """Send this step's questions. Call it once per scheduler step."""
        self._desk.flush()

    def has_work(self) -> bool:
        """Whether anything is under way that :meth:`finished` or :meth:`lookup` will have news of."""
        return bool(self._ended or self._loads or self._stores or self._desk.has_work)

    def reset(self) -> None:
        """Forget what is known about keys (a purge, or a repaired store)."""
        self._presence.clear()
        self.answered_requests.add_all()

    def weights_changed(self) -> None:
        """The model computes something else from now on: neither serve nor store under this namespace any more.

        Stores under way were computed before and may end. Loads under way are given up. There is no way back: a new
        namespace takes a new process.
        """
        self._weights_changed = self.moved = True
        self.counters.weights_changes += 1
        changed = TierRefused(RefusedReason.CLOSED, "the model's weights have changed")
        for job in list(self._loads.values()):
            self._void(job, lambda _: changed)
            self._end_if_done(job)
        self.reset()

    def snapshot(self) -> TierStats:
        """All counters and gauges now. Cheap."""
        counters = self.counters
        waiting_since = self._movers.oldest_store_queued_at()
        return TierStats(
            tier=self._tier.name,
            lookups=dict(counters.lookups),
            misses=dict(counters.misses),
            read_bytes=counters.read_bytes,
            read_seconds=counters.read_seconds,
            written_bytes=counters.written_bytes,
            write_seconds=counters.write_seconds,
            failures=dict(counters.failures),
            shed=dict(counters.shed),
            expiries=dict(counters.expiries),
            skipped=dict(counters.skipped),
            late_completions=counters.late_completions,
            quarantined=dict(self._tier.quarantined),
            evictions=self.evictions(),
            resident_bytes=self._desk.resident_bytes,
            queued_store_bytes=self._queued_bytes[Operation.STORE],
            queued_load_bytes=self._queued_bytes[Operation.LOAD],
            oldest_store_seconds=0.0 if waiting_since is None else self._clock() - waiting_since,
            ready=self._desk.ready,
            weights_changed=self._weights_changed,
            breakers={operation: breaker.state for operation, breaker in self._breakers.items()},
        )

    def evictions(self) -> dict[str, int]:
        """Frames that this process removed though nothing was wrong with them, by reason."""
        return {str(reason): count for reason, count in self._tier.evictions.items()}

    # --- the end ----------------------------------------------------------------------------------------------------

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """Block (real time) until a thread has reported something since the last wait. For drains and tests."""
        came = self._progress.wait(timeout_seconds)
        self._progress.clear()
        return came

    def drain(self, timeout_seconds: float) -> bool:
        """Block until no thread touches a row: let jobs end for that long (real time), then cancel the rest.

        Every job is still reported by :meth:`finished`. False only if a memory copy did not end in another second.
        """
        if self._wait_until_idle(timeout_seconds):
            return True
        return self._cancel_all()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Drain, stop the threads, close the tier and let go of the rows. Bounded; twice is harmless."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + timeout_seconds
        self.drain(timeout_seconds / 2)
        self._desk.stop()
        self._movers.stop()
        self._tier.close()  # wakes threads that wait for a socket
        self._desk.join(max(0.0, until - time.monotonic()))
        self._movers.join(max(0.0, until - time.monotonic()))

    # --- within ------------------------------------------------------------------------------------------------------

    def _new_job(
        self,
        job_id: int,
        operation: Operation,
        keys: Sequence[bytes],
        row_indices: Sequence[int],
        tenant: bytes = NO_TENANT,
    ) -> TransferJob:
        self.moved = True
        check_shape(keys, row_indices, self._rows_total)
        if job_id in self._loads or job_id in self._stores:
            raise ValueError(f"job {job_id} is already under way")
        now = self._clock()
        limits = self._limits
        timeout = limits.load_timeout_seconds if operation is Operation.LOAD else limits.store_timeout_seconds
        job = self._jobs[operation][job_id] = TransferJob(job_id, operation, now, now + timeout, tenant)
        return job

    def _room(self, operation: Operation, limit_bytes: int, wanted: int) -> int:
        """How many of ``wanted`` chunks may be in hand beside those that are."""
        payload_bytes = self._payload_bytes
        # Jobs are counted in full until they end; what workers have settled in them matters only when room is short.
        if self._queued_bytes[operation] + wanted * payload_bytes <= limit_bytes:
            return wanted
        open_items = sum(job.open_items for job in self._jobs[operation].values())
        return min(wanted, max(0, limit_bytes // payload_bytes - open_items))

    def _start(self, job: TransferJob, keys: list[bytes], rows: list[int]) -> None:
        if keys:
            job.fill(keys, rows)
            self._queued_bytes[job.operation] += len(keys) * self._payload_bytes
            self._movers.submit(job)

    def _not_admitted(self, job: TransferJob, keys: list[bytes]) -> set[bytes]:
        """Those that a tier short of room does not take: asked for once only."""
        seen = (self._frequency.estimate(keys) >= _SEEN_BEFORE).tolist()
        unseen = {key for key, known in zip(keys, seen, strict=True) if not known}
        self._skip(job, unseen, SkipReason.ADMISSION)
        return unseen

    def _skip(self, job: TransferJob, keys: Sequence[bytes] | set[bytes], reason: SkipReason) -> None:
        if keys:
            self.counters.skipped[reason] += len(keys)
            job.done += keys

    def _refuse(self, job: TransferJob, keys: Sequence[bytes], reason: RefusedReason, message: str) -> None:
        if keys:
            error = TierRefused(reason, message)
            job.failed.update(dict.fromkeys(keys, error))
            self._fail(job.operation, keys, error)

    def _fail(self, operation: Operation, keys: Sequence[bytes], error: TierError) -> None:
        counts = self.counters.shed if error.reason in SHED_REASONS else self.counters.failures
        counts[operation, error.reason] += len(keys)
        if operation is Operation.LOAD:
            self.counters.misses[miss_of_error(error)] += len(keys)
            # Before the job is reported, or the next lookup says HIT again and the request never ends (vllm#49176).
            self._presence.put_many(keys, False, self._clock())

    def _collect(self) -> None:
        movers = self._movers
        while movers.ended:
            self._end_if_done(movers.ended.popleft())
        while movers.late:
            self._take_in_late(movers.late.popleft())
        now: float | None = None
        for jobs in self._jobs.values():
            if not jobs:
                continue
            now = self._clock() if now is None else now
            # The oldest is the first to pass its deadline.
            if now >= next(iter(jobs.values())).deadline:
                for job in list(jobs.values()):
                    if now < job.deadline:
                        break
                    self._expire(job)
                    self._end_if_done(job)

    def _end_if_done(self, job: TransferJob) -> None:
        if job.open_items or self._jobs[job.operation].pop(job.job_id, None) is None:
            return
        self.moved = True
        self._ended.append(job)
        if not job.keys:
            return
        operation, moved = job.operation, job.moved()
        self._queued_bytes[operation] -= len(job.keys) * self._payload_bytes
        if operation is Operation.STORE:
            self._storing.difference_update(job.keys)
        self._count_transfer(operation, len(moved), job.busy_seconds)
        if moved:
            job.done += moved
            self._presence.put_many(moved, True, self._clock())
        self._skip(job, [job.keys[index] for index in job.pending], SkipReason.PENDING)
        for index, error in job.errors.items():
            key = job.keys[index]
            job.failed[key] = error
            self._fail(operation, (key,), error)

    def _take_in_late(self, late: LateEnd) -> None:
        self.moved = True
        self.counters.late_completions += 1
        operation = late.item.job.operation
        self._count_transfer(operation, 0 if late.error or late.pending else 1, late.seconds)
        if operation is Operation.STORE and late.error is None and not late.pending:
            self._presence.put(late.item.key, True, self._clock())  # late, but true

    def _count_transfer(self, operation: Operation, items: int, seconds: float) -> None:
        counters = self.counters
        if operation is Operation.LOAD:
            counters.read_seconds += seconds
            counters.read_bytes += items * self._payload_bytes
        else:
            counters.write_seconds += seconds
            counters.written_bytes += items * self._payload_bytes

    def _expire(self, job: TransferJob) -> None:
        seconds = job.deadline - job.queued_at
        late = TierTimeout(f"{job.operation.value} not done within {seconds:g} s")
        shed = TierRefused(RefusedReason.QUEUE_AGE, f"no thread was free for it within {seconds:g} s")
        movers, begun_at = self._movers, job.begun_at
        voided = self._void(job, lambda index: shed if movers.kept_waiting(job, begun_at.get(index)) else late)
        if late in voided:
            self.counters.expiries[job.operation] += 1
            self._breakers[job.operation].record_failure()  # once per job: its keys share the fate

    def _void(self, job: TransferJob, error_of: Callable[[int], TierError]) -> list[TierError]:
        """Give up what can be given up; the errors that it was given up with."""
        keys_by_error: dict[TierError, list[bytes]] = {}
        for key, error in job.give_up(error_of).items():
            keys_by_error.setdefault(error, []).append(key)
        for error, keys in keys_by_error.items():
            self._fail(job.operation, keys, error)
        return list(keys_by_error)

    def _wait_until_idle(self, timeout_seconds: float) -> bool:
        until = time.monotonic() + timeout_seconds
        while True:
            self._collect()
            if not (self._loads or self._stores):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            # Woken by reports; the bound lets job deadlines of this clock pass meanwhile.
            self.wait_for_progress(min(left, 0.05))

    def _cancel_all(self) -> bool:
        until = time.monotonic() + 1.0
        cancelled = TierRefused(RefusedReason.CLOSED, "cancelled while draining")
        while True:
            self._collect()
            for jobs in self._jobs.values():
                for job in list(jobs.values()):
                    self._void(job, lambda _: cancelled)
                    self._end_if_done(job)
            if not (self._loads or self._stores):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.wait_for_progress(min(left, 0.01))


def _those_not_in(known: set[bytes], keys: list[bytes], rows: list[int]) -> tuple[list[bytes], list[int]]:
    left = [(key, row) for key, row in zip(keys, rows, strict=True) if key not in known]
    return [key for key, _ in left], [row for _, row in left]


__all__ = ["JobOutcome", "Lookup", "SharedTier", "TransferLimits"]
