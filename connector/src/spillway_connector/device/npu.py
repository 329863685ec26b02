"""Copies between NPU and host memory on a stream of our own, ordered against the computation by events.

    compute stream   ... kernels that write KV ... [barrier]
                                                      |
    copy stream                              wait for barrier [start] copies [end]

The wait is in both directions: a store must see what the last kernel wrote (vllm#45704), a load must not overwrite
what an earlier kernel still reads or zeroes (vllm#47282). The model thread only enqueues and asks; it never
synchronises the device, except in `wait` and `close`, whose callers want that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spillway_connector.device.acl import (
    EVENT_SYNC,
    EVENT_SYNC_TIMEOUT,
    EVENT_TIME_LINE,
    FEATURE_NOT_SUPPORTED,
    STREAM_SYNC_TIMEOUT,
    Acl,
    AclError,
    BatchCall,
    CopyKind,
    Spans,
)
from spillway_connector.device.acl_batch import CopyPath
from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.device.npu_events import EventPool
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import Addresses, CopyPlan

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.0005  # between queries where the runtime cannot wait for an event with a deadline


@dataclass(frozen=True, slots=True)
class NpuLimits:
    """Bounds of one direction."""

    descriptors: int = 4096  # a call: the runtime's own limit for the synchronous batch, kept for this one
    jobs: int = 1024  # in flight; further ones are refused, and their requests recompute
    job_seconds: float = 60.0  # behind the computation it waits for; then the stream is given up
    check_seconds: float = 1.0  # after this long a job is suspected: an event cannot say that its task failed


@dataclass(slots=True)
class _Job:
    job_id: int
    plan: CopyPlan  # its arrays are read by the runtime until the end event
    barrier: int
    start: int
    end: int
    submitted_at: float
    calls: list[BatchCall] = field(default_factory=list)
    error: DeviceCopyError | None = None


class NpuCopier:
    """One direction's jobs, in order. All methods are called on the model thread."""

    def __init__(
        self,
        direction: Direction,
        acl: Acl,
        device: int,
        path: CopyPath,
        compute_stream: Callable[[], int],
        *,
        host_pinned: bool,
        host_boundaries: tuple[int, ...] = (),
        limits: NpuLimits | None = None,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compute_stream: asked at every submit, never kept. torch_npu queues kernels on the host first, and reading
            a stream's handle is what flushes that queue: a barrier recorded on an older handle would come too early.
        host_boundaries: addresses inside the host memory that no single copy may cross (ends of registrations).
        on_close: called once, when nothing of this direction touches memory any more.
        Raises AclError.
        """
        self._direction = direction
        self._kind = CopyKind.DEVICE_TO_HOST if direction is Direction.STORE else CopyKind.HOST_TO_DEVICE
        self._acl = acl
        self._device = device
        self._path = path
        self._compute_stream = compute_stream
        self._host_pinned = host_pinned
        self._host_boundaries = host_boundaries
        self._limits = limits or NpuLimits()
        self._on_close = on_close
        self._clock = clock
        self._thread = 0
        self._jobs: dict[int, _Job] = {}  # in the order of their submission, which is the stream's
        self._ended: list[CopyResult] = []
        self._last_end = self._last_check = clock()
        self._closed = False
        self._enter_device()
        self._barriers = EventPool(acl, EVENT_SYNC)
        self._timers = EventPool(acl, EVENT_TIME_LINE)
        self._stream: int | None = acl.create_stream()

    # -- the copier's contract

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        self._enter_device()
        stream = self._require_stream()
        if job_id in self._jobs:
            raise DeviceCopyError(f"{self._direction.value} job {job_id} is in flight already")
        if len(self._jobs) >= self._limits.jobs:
            self._collect()
            if len(self._jobs) >= self._limits.jobs:
                raise DeviceCopyError(f"{self._limits.jobs} {self._direction.value} jobs are in flight")
        if len(plan) == 0:
            self._ended.append(CopyResult(job_id, 0, 0.0))
            return
        job = self._open_job(job_id, split_at(plan, self._host_boundaries), stream)
        try:
            self._enqueue(job, stream)
        except DeviceCopyError as error:
            job.error = error
        except Exception as error:  # whatever it is, copies may be in flight
            job.error = DeviceCopyError(f"{self._direction.value} job {job_id}: {error!r}")
        try:
            # Also behind a copy that was refused: those before it are in flight, and their memory is in use until
            # this event has come. Only then is the job reported as failed.
            self._acl.record_event(job.end, stream)
        except AclError as error:
            self._jobs[job_id] = job
            self._give_up_stream(job.error or error)
            self._take_back(job_id)
            raise (job.error or error) from error
        self._jobs[job_id] = job

    def finished(self) -> list[CopyResult]:
        if self._jobs:
            self._enter_device()
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        newest = next((job for job in reversed(self._jobs.values()) if job.job_id in job_ids), None)
        if newest is None:
            return
        self._enter_device()
        while newest.job_id in self._jobs:
            in_time = self._await_event(newest.end)
            self._collect(suspect=not in_time)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._enter_device()
        self.wait(set(self._jobs))
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                self._acl.destroy_stream(stream)
            except AclError as error:
                logger.warning("closing the %s stream: %s", self._direction.value, error)
        self._barriers.close()
        self._timers.close()
        self._on_close()

    # -- submitting

    def _enter_device(self) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self._acl.set_device(self._device)
            self._thread = thread

    def _require_stream(self) -> int:
        if self._closed:
            raise DeviceCopyError(f"the {self._direction.value} transport is closed")
        if self._stream is None:
            try:
                self._stream = self._acl.create_stream()
            except AclError as error:
                raise DeviceCopyError(f"no new {self._direction.value} stream after a failure: {error}") from error
        return self._stream

    def _open_job(self, job_id: int, plan: CopyPlan, stream: int) -> _Job:
        """Everything before the first copy; what fails here has touched no memory."""
        taken: list[tuple[EventPool, int]] = []
        try:
            for pool in (self._barriers, self._timers, self._timers):
                taken.append((pool, pool.take()))
            barrier, start, end = (event for _, event in taken)
            self._acl.record_event(barrier, self._compute_stream())
            self._acl.stream_wait_event(stream, barrier)
            self._acl.record_event(start, stream)
        except Exception:
            for pool, event in taken:
                pool.retire(event)
            raise
        return _Job(job_id, plan, barrier, start, end, self._clock())

    def _enqueue(self, job: _Job, stream: int) -> None:
        for batch in job.plan.batches(self._limits.descriptors):
            if self._direction is Direction.LOAD:
                spans = Spans(batch.device_addresses, batch.host_addresses, batch.sizes_bytes)
            else:
                spans = Spans(batch.host_addresses, batch.device_addresses, batch.sizes_bytes)
            if self._path.is_batch:
                call = self._acl.batch_call(spans, self._kind, self._device)
                job.calls.append(call)
                try:
                    call.submit(stream)
                    continue
                except AclError as error:
                    if error.code != FEATURE_NOT_SUPPORTED:
                        raise
                    self._path.fall_back(str(error))
            # Spans of a refused batch that went out after all are copied twice, the same bytes to the same place.
            self._acl.memcpy_each(spans, self._kind, stream, hold_gil=self._host_pinned)

    # -- ending

    def _collect(self, suspect: bool = False) -> None:
        """Move ended jobs to the results. `suspect`: look for a dead stream now."""
        while self._jobs:
            job = next(iter(self._jobs.values()))
            try:
                if self._acl.event_complete(job.end):
                    self._end(job)
                    continue
            except AclError as error:
                self._give_up_stream(error)
                return
            trouble = self._trouble(job, suspect)
            if trouble is not None:
                self._give_up_stream(trouble)
            return

    def _end(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        self._last_end = self._clock()
        try:
            seconds = self._acl.elapsed_seconds(job.start, job.end)
        except AclError:
            seconds = self._last_end - job.submitted_at
        self._ended.append(CopyResult(job.job_id, job.plan.total_bytes, seconds, job.error))
        self._barriers.give_back(job.barrier)
        self._timers.give_back(job.start)
        self._timers.give_back(job.end)

    def _trouble(self, oldest: _Job, suspect: bool) -> DeviceCopyError | None:
        """Why the oldest job will never end, if so."""
        now = self._clock()
        waited = now - max(oldest.submitted_at, self._last_end)
        if waited > self._limits.job_seconds:
            return DeviceCopyError(
                f"{self._direction.value} job {oldest.job_id} ({oldest.plan.total_bytes} bytes) has not ended "
                f"after {waited:.0f} s"
            )
        overdue = waited > self._limits.check_seconds and now - self._last_check > self._limits.check_seconds
        if not (suspect or overdue):
            return None
        self._last_check = now
        assert self._stream is not None
        try:
            self._acl.synchronize_stream(self._stream, 0)
        except AclError as error:
            return None if error.code == STREAM_SYNC_TIMEOUT else error
        return None

    def _give_up_stream(self, cause: DeviceCopyError) -> None:
        """The stream is in error or stuck: nothing on it runs after this, and its unfinished jobs have failed."""
        logger.error("Spillway: the %s stream is given up: %s", self._direction.value, cause)
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                self._acl.discard_stream(stream)
            except AclError as error:
                logger.error("destroying it: %s", error)
        for job in list(self._jobs.values()):
            try:
                complete = self._acl.event_complete(job.end)
            except AclError:
                complete = False
            if not complete:
                job.error = job.error or DeviceCopyError(f"its stream was given up: {cause}")
            self._end(job)

    def _take_back(self, job_id: int) -> None:
        """A submit that raises reports its job by that alone."""
        self._ended = [result for result in self._ended if result.job_id != job_id]

    def _await_event(self, event: int) -> bool:
        """False after `check_seconds`, or when the runtime cannot tell."""
        timeout_seconds = min(self._limits.check_seconds, self._limits.job_seconds)
        if self._acl.has("aclrtSynchronizeEventWithTimeout"):
            try:
                self._acl.synchronize_event(event, max(1, int(timeout_seconds * 1e3)))
                return True
            except AclError as error:
                if error.code != EVENT_SYNC_TIMEOUT:
                    logger.warning("waiting for a %s job: %s", self._direction.value, error)
                return False
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            try:
                if self._acl.event_complete(event):
                    return True
            except AclError:
                return False
            time.sleep(_POLL_SECONDS)
        return False


def split_at(plan: CopyPlan, host_boundaries: tuple[int, ...]) -> CopyPlan:
    """The plan with every span that crosses a boundary of the host memory cut in two there."""
    for boundary in host_boundaries:
        host, sizes = plan.host_addresses, plan.sizes_bytes
        crossing = np.flatnonzero((host < boundary) & (host + sizes > boundary))
        if not len(crossing):
            continue
        heads = boundary - host[crossing]
        plan = CopyPlan(
            np.insert(plan.device_addresses, crossing + 1, plan.device_addresses[crossing] + heads),
            np.insert(host, crossing + 1, boundary),
            _insert_tails(sizes, crossing, heads),
        )
    return plan


def _insert_tails(sizes: Addresses, crossing: Addresses, heads: Addresses) -> Addresses:
    cut = sizes.copy()
    cut[crossing] = heads
    return np.insert(cut, crossing + 1, sizes[crossing] - heads)
