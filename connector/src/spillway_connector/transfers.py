"""The shell between vLLM's scheduler thread, which must never wait, and a tier, which may be slow, sick or hung.

Scheduler thread: :class:`SharedTier`, every method of which returns at once (``drain`` and ``close`` excepted).
Worker threads: move items between rows of the CPU tier and the shared tier through page-aligned bounce buffers. A load
lands in the bounce buffer, is verified there by the tier, and is copied to its row only while its job still stands. A
store copies its row to the bounce buffer first. So a job can be reported at its deadline whatever its threads are
stuck in. Results come back through a deque; all counting and remembering happens in the scheduler thread.

xxhash, numpy.copyto and socket and file calls release the GIL on large buffers (slice assignment between memoryviews
does not: 24 ms for 1 GB), so workers do not hold up the scheduler.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spillway_connector.errors import (
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
)
from spillway_connector.tiers.breaker import Breaker, BreakerPolicy
from spillway_connector.tiers.jobs import JobOutcome, TransferItem, TransferJob, check_shape
from spillway_connector.tiers.lookups import Lookup, LookupDesk, unexpected
from spillway_connector.tiers.presence import PresenceIndex
from spillway_connector.tiers.stats import Operation, TierCounters, TierStats
from spillway_connector.tiers.tier import Clock, Tier

DISCARD_SECONDS = 1.0  # for removing an entry that was proven corrupt
_OUR_OWN = (RefusedReason.RESOURCES, RefusedReason.CLOSED, RefusedReason.QUEUE_AGE, RefusedReason.BREAKER_OPEN)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Every bound of one shared tier. The timeouts count from the submission of a batch or job."""

    io_threads: int = 4
    lookup_timeout_seconds: float = 0.2
    load_timeout_seconds: float = 2.0
    store_timeout_seconds: float = 10.0
    load_queue_bytes_max: int = 8 << 30
    store_queue_bytes_max: int = 1 << 30
    store_queue_seconds_max: float = 5.0  # a store that waited longer is dropped: its row is better freed
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)


@dataclass(frozen=True, slots=True)
class _Report:
    item: TransferItem
    error: TierError | None
    moved_bytes: int
    begun_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.begun_at


class SharedTier:
    """Drives ``tier`` for one scheduler thread.

    rows: flat writable bytes of the CPU tier, row i at ``i * row_bytes``; its first ``payload_bytes`` are moved, the
    padding is not. ``tier`` is owned from here on: close() closes it.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        rows: memoryview,
        row_bytes: int,
        payload_bytes: int,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        if tier.payload_bytes != payload_bytes or not 0 < payload_bytes <= row_bytes:
            raise ValueError(f"payload_bytes: {payload_bytes}; the tier has {tier.payload_bytes}, a row {row_bytes}")
        self._tier = tier
        self._rows: npt.NDArray[np.uint8] | None = np.frombuffer(rows, np.uint8)
        self._rows_total = self._rows.nbytes // row_bytes
        self._row_bytes = row_bytes
        self._payload_bytes = payload_bytes
        self._limits = limits
        self._clock = clock
        self._counters = TierCounters()
        self._presence = PresenceIndex(clock)
        self._breakers = {operation: Breaker(limits.breaker, clock) for operation in Operation}
        self._progress = threading.Event()
        self._desk = LookupDesk(
            tier,
            self._presence,
            self._counters,
            lookup_breaker=self._breakers[Operation.LOOKUP],
            load_breaker=self._breakers[Operation.LOAD],
            timeout_seconds=limits.lookup_timeout_seconds,
            clock=clock,
            progress=self._progress.set,
        )
        self._jobs: dict[Operation, dict[int, TransferJob]] = {Operation.LOAD: {}, Operation.STORE: {}}
        self._storing: set[bytes] = set()
        self._queued_bytes = {Operation.LOAD: 0, Operation.STORE: 0}
        self._finished: list[JobOutcome] = []
        self._closed = False
        # Workers take a token, then the oldest load, else the oldest store: loads are waited for, stores are not.
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._queues: dict[Operation, deque[TransferItem]] = {Operation.LOAD: deque(), Operation.STORE: deque()}
        self._store_slots = threading.Semaphore(max(1, limits.io_threads - 1))  # a thread stays free for loads
        self._reports: deque[_Report] = deque()
        self._workers = [
            threading.Thread(target=self._work, name=f"spillway-{tier.name}-{number}", daemon=True)
            for number in range(limits.io_threads)
        ]
        for worker in self._workers:
            worker.start()

    # --- scheduler thread -------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, request_id: str) -> Lookup:
        """Whether the tier holds ``key``. PENDING at most ``lookup_timeout_seconds`` per request in total."""
        return self._desk.lookup(key, request_id)

    def submit_load(self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int]) -> None:
        """Fill the rows from the tier. The job is reported once by :meth:`finished`, at its deadline at the latest."""
        job = self._new_job(job_id, Operation.LOAD, keys, row_indices)
        limit = self._limits.load_queue_bytes_max
        for key, row in zip(keys, row_indices, strict=True):
            if self._closed:
                self._refuse(job, key, RefusedReason.CLOSED, "the tier is closed")
            elif self._queued_bytes[Operation.LOAD] + self._payload_bytes > limit:
                self._refuse(job, key, RefusedReason.QUEUE_FULL, f"load_queue_bytes_max: {limit} bytes are in hand")
            else:
                self._enqueue(job, key, int(row))

    def submit_store(self, job_id: int, keys: Sequence[bytes], row_indices: Sequence[int]) -> None:
        """Write the rows to the tier; they must stay unchanged until the job is reported.

        Keys that are there already, or on their way by another job, count as done. With the breaker open or too many
        bytes in hand the rest is dropped and counted: nobody waits for a store.
        """
        job = self._new_job(job_id, Operation.STORE, keys, row_indices)
        now = self._clock()
        limit = self._limits.store_queue_bytes_max
        allowed = self._breakers[Operation.STORE].would_allow()
        for key, row in zip(keys, row_indices, strict=True):
            if self._closed:
                self._refuse(job, key, RefusedReason.CLOSED, "the tier is closed")
            elif key in self._storing or self._presence.get(key, now):
                self._counters.stores_skipped += 1
                job.done.append(key)
            elif not allowed:
                self._refuse(job, key, RefusedReason.BREAKER_OPEN, "the tier keeps failing and is left alone")
            elif self._queued_bytes[Operation.STORE] + self._payload_bytes > limit:
                self._refuse(job, key, RefusedReason.QUEUE_FULL, f"store_queue_bytes_max: {limit} bytes are in hand")
            else:
                self._storing.add(key)
                self._enqueue(job, key, int(row))

    def finished(self) -> list[JobOutcome]:
        """The jobs that ended since the last call, each exactly once. A failed load's keys are known missing before."""
        self._desk.collect()
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def request_finished(self, request_id: str) -> None:
        """Forget how long a request has waited. Its jobs go on and are reported."""
        self._desk.forget(request_id)

    def step_end(self) -> None:
        """Send this step's questions. Call it once per scheduler step."""
        self._desk.flush()

    def has_work(self) -> bool:
        """Whether anything is under way that :meth:`finished` or :meth:`lookup` will have news of."""
        return bool(self._finished or any(self._jobs.values()) or self._desk.has_work)

    def reset(self) -> None:
        """Forget what is known about keys (a purge, or a repaired store)."""
        self._presence.clear()

    def snapshot(self) -> TierStats:
        """All counters and gauges now. Cheap."""
        counters = self._counters
        return TierStats(
            tier=self._tier.name,
            lookups=dict(counters.lookups),
            read_bytes=counters.read_bytes,
            read_seconds=counters.read_seconds,
            written_bytes=counters.written_bytes,
            write_seconds=counters.write_seconds,
            failures=dict(counters.failures),
            stores_skipped=counters.stores_skipped,
            late_completions=counters.late_completions,
            evicted_frames=getattr(self._tier, "evicted_frames", 0),
            resident_bytes=self._desk.resident_bytes,
            queued_store_bytes=self._queued_bytes[Operation.STORE],
            queued_load_bytes=self._queued_bytes[Operation.LOAD],
            breakers={operation: breaker.state for operation, breaker in self._breakers.items()},
        )

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
        for _ in self._workers:
            self._tokens.put(False)
        self._tier.close()  # wakes threads that wait for a socket
        self._desk.join(max(0.0, until - time.monotonic()))
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        # A thread that is still stuck holds its own bounce buffer only; its job is dead, so it never asks for a row.
        self._rows = None

    def _new_job(
        self, job_id: int, operation: Operation, keys: Sequence[bytes], row_indices: Sequence[int]
    ) -> TransferJob:
        check_shape(keys, row_indices, self._rows_total)
        if any(job_id in jobs for jobs in self._jobs.values()):
            raise ValueError(f"job {job_id} is already under way")
        now = self._clock()
        timeout = (
            self._limits.load_timeout_seconds if operation is Operation.LOAD else self._limits.store_timeout_seconds
        )
        job = self._jobs[operation][job_id] = TransferJob(job_id, operation, now, now + timeout)
        return job

    def _enqueue(self, job: TransferJob, key: bytes, row: int) -> None:
        item = job.add(key, row)
        self._queued_bytes[job.operation] += self._payload_bytes
        self._queues[job.operation].append(item)
        self._tokens.put(True)

    def _refuse(self, job: TransferJob, key: bytes, reason: RefusedReason, message: str) -> None:
        self._fail(job.operation, key, TierRefused(reason, message))
        job.failed[key] = TierRefused(reason, message)

    def _fail(self, operation: Operation, key: bytes, error: TierError) -> None:
        self._counters.failures[operation, error.reason] += 1
        if operation is Operation.LOAD:
            # Before the job is reported, or the next lookup says HIT again and the request never ends (vllm#49176).
            self._presence.put(key, False)

    def _collect(self) -> None:
        while self._reports:
            self._take_in(self._reports.popleft())
        now = self._clock()
        for jobs in self._jobs.values():
            for job in list(jobs.values()):
                if job.open_items and now >= job.deadline:
                    self._expire(job)
                if not job.open_items:
                    del jobs[job.job_id]
                    self._finished.append(job.outcome())

    def _take_in(self, report: _Report) -> None:
        item, operation, counters = report.item, report.item.job.operation, self._counters
        if operation is Operation.LOAD:
            counters.read_bytes += report.moved_bytes
            counters.read_seconds += report.seconds
        else:
            counters.written_bytes += report.moved_bytes
            counters.write_seconds += report.seconds
        if not item.job.settle(item, report.error):
            counters.late_completions += 1
            if operation is Operation.STORE and report.error is None:
                self._presence.put(item.key, True)  # late, but true
            return
        self._queued_bytes[operation] -= self._payload_bytes
        if operation is Operation.STORE:
            self._storing.discard(item.key)
        if report.error is not None:
            self._fail(operation, item.key, report.error)
        else:
            self._presence.put(item.key, True)
            item.job.last_moved_at = max(report.ended_at, item.job.last_moved_at or 0.0)

    def _expire(self, job: TransferJob) -> None:
        seconds = job.deadline - job.queued_at
        voided = self._void(job, TierTimeout(f"{job.operation.value} not done within {seconds:g} s"))
        if voided:
            self._breakers[job.operation].record_failure()  # once per job: its keys share the fate

    def _void(self, job: TransferJob, error: TierError) -> list[TransferItem]:
        voided = job.give_up(error)
        for item in voided:
            self._queued_bytes[job.operation] -= self._payload_bytes
            self._storing.discard(item.key)
            self._fail(job.operation, item.key, error)
        return voided

    def _wait_until_idle(self, timeout_seconds: float) -> bool:
        until = time.monotonic() + timeout_seconds
        while True:
            self._collect()
            if not any(self._jobs.values()):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            # Woken by reports; the bound lets job deadlines of this clock pass meanwhile.
            self.wait_for_progress(min(left, 0.05))

    def _cancel_all(self) -> bool:
        until = time.monotonic() + 1.0
        while True:
            for jobs in self._jobs.values():
                for job in jobs.values():
                    self._void(job, TierRefused(RefusedReason.CLOSED, "cancelled while draining"))
            self._collect()
            if not any(self._jobs.values()):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.wait_for_progress(min(left, 0.01))

    # --- worker threads ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        # mmap gives page alignment, which direct I/O needs; the size is rounded up by the kernel anyway.
        view = memoryview(mmap.mmap(-1, self._payload_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        bounce = np.frombuffer(view, np.uint8)
        bounce.fill(0)  # fault the pages in now, not during the first load
        while self._tokens.get():
            loads, stores = self._queues[Operation.LOAD], self._queues[Operation.STORE]
            try:
                self._run(loads.popleft(), bounce, view)
                continue
            except IndexError:
                pass
            if not self._store_slots.acquire(blocking=False):
                continue  # whoever ends a store puts the token back
            try:
                self._run(stores.popleft(), bounce, view)
            except IndexError:
                pass
            finally:
                self._store_slots.release()
            if stores:
                self._tokens.put(True)

    def _run(self, item: TransferItem, bounce: npt.NDArray[np.uint8], view: memoryview) -> None:
        if item.dead:
            return
        begun = self._clock()
        error: TierError | None = None
        try:
            move = self._load if item.job.operation is Operation.LOAD else self._store
            if not move(item, bounce, view, begun):
                return  # given up meanwhile, before any I/O
        except TierError as raised:
            error = raised
        except Exception as raised:
            error = unexpected(raised)
        moved_bytes = self._payload_bytes if error is None else 0
        self._reports.append(_Report(item, error, moved_bytes, begun, self._clock()))
        self._progress.set()

    def _load(self, item: TransferItem, bounce: npt.NDArray[np.uint8], view: memoryview, now: float) -> bool:
        self._pass_breaker(Operation.LOAD)
        try:
            self._tier.load(item.key, view, item.job.deadline)
        except TierCorrupt as corrupt:
            self._breakers[Operation.LOAD].record_success()
            self._discard(item.key)
            raise corrupt
        except TierMiss:
            self._breakers[Operation.LOAD].record_success()
            raise
        except Exception as error:
            self._record_failure(item, error)
            raise
        if item.begin_copy():
            np.copyto(self._row(item.row), bounce)
            item.end_copy()
            self._breakers[Operation.LOAD].record_success()
        return True

    def _store(self, item: TransferItem, bounce: npt.NDArray[np.uint8], view: memoryview, now: float) -> bool:
        waited = now - item.job.queued_at
        if waited > self._limits.store_queue_seconds_max:
            raise TierRefused(RefusedReason.QUEUE_AGE, f"waited {waited:.1f} s for a thread")
        self._pass_breaker(Operation.STORE)
        if not item.begin_copy():
            return False
        np.copyto(bounce, self._row(item.row))
        item.end_copy()
        try:
            self._tier.store(item.key, view, item.job.deadline)
        except Exception as error:
            self._record_failure(item, error)
            raise
        if not item.dead:
            self._breakers[Operation.STORE].record_success()
        return True

    def _pass_breaker(self, operation: Operation) -> None:
        if not self._breakers[operation].allow():
            raise TierRefused(RefusedReason.BREAKER_OPEN, "the tier keeps failing and is left alone")

    def _record_failure(self, item: TransferItem, error: Exception) -> None:
        ours = isinstance(error, TierRefused) and error.reason in _OUR_OWN
        if not ours and not item.dead:  # a dead item's failure was recorded when its job was given up
            self._breakers[item.job.operation].record_failure()

    def _discard(self, key: bytes) -> None:
        try:
            self._tier.discard(key, self._clock() + DISCARD_SECONDS)
        except Exception:  # noqa: S110 - it stays, and stays a counted miss; the load's own error is the one to report
            pass

    def _row(self, row: int) -> npt.NDArray[np.uint8]:
        assert self._rows is not None
        start = row * self._row_bytes
        return self._rows[start : start + self._payload_bytes]


__all__ = ["JobOutcome", "Lookup", "SharedTier", "TransferLimits"]
