"""Copies on a separate device stream, ordered against the computation by events. One direction, any runtime.

    compute stream   ... kernels that write KV ... [barrier]
                                                      |
    copy stream                              wait for barrier [start] copies [end]

The wait is in both directions: a store must see what the last kernel wrote (vllm#45704), a load must not overwrite
what an earlier kernel still reads or zeroes (vllm#47282). The model thread only enqueues and polls; it never
synchronises the device, except in `wait` and `close`, which block by contract.

What a platform adds: its runtime's calls (`StreamRuntime`), and how the copies of a job are enqueued (`_enqueue`).
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.errors import DeviceCopyError, without_frames
from spillway_connector.plan.copies import Addresses, CopyPlan

logger = logging.getLogger(__name__)


class StreamRuntime(Protocol):
    """Streams and events of one runtime, as integers. Every method raises DeviceCopyError."""

    def set_device(self, device: int) -> None: ...
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def discard_stream(self, stream: int) -> None: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def event_complete(self, event: int) -> bool: ...
    def elapsed_seconds(self, start: int, end: int) -> float: ...


class Events(Protocol):
    """Events of one sort, for reuse."""

    @property
    def reusable(self) -> bool: ...
    def take(self) -> int: ...
    def give_back(self, event: int) -> None: ...
    def retire(self, event: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Bounds of one direction."""

    descriptors: int = 4096  # a call
    jobs: int = 1024  # in flight; further ones are refused, and their requests recompute
    job_seconds: float = 60.0  # from the end of the job before it, the wait for the computation included
    check_seconds: float = 1.0  # after this long the stream of an unfinished job is checked for errors


@dataclass(slots=True)
class StreamJob:
    """A job in flight."""

    job_id: int
    plan: CopyPlan  # its arrays may be read by the runtime until the end event
    barrier: int
    start: int
    end: int
    submitted_at: float
    copied: int | None = None  # the event that computation waits for, of an awaited job
    keep: list[object] = field(default_factory=list)  # what else must live until the end event
    error: DeviceCopyError | None = None
    overdue: bool = False


class StreamCopier(abc.ABC):
    """The jobs of one direction, in order. See copier.Copier for the contract.

    All methods are called on the model thread.
    """

    def __init__(  # noqa: PLR0917 - what a subclass puts together
        self,
        direction: Direction,
        runtime: StreamRuntime,
        device: int,
        compute_stream: Callable[[], int],
        barriers: Events,
        timers: Events,
        *,
        host_boundaries: tuple[int, ...],
        limits: CopyLimits,
        on_close: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """compute_stream: called at every submit; the engine may compute on another stream by then.
        host_boundaries: addresses inside the host memory that no single copy may cross (ends of registrations).
        on_close: called once, when nothing of this direction touches memory any more.
        Raises DeviceCopyError.
        """
        self._direction = direction
        self._runtime = runtime
        self._device = device
        self._compute_stream = compute_stream
        self._barriers, self._timers = barriers, timers
        self._host_boundaries = host_boundaries
        self._limits = limits
        self._on_close = on_close
        self._clock = clock
        self._thread = 0
        self._jobs: dict[int, StreamJob] = {}  # in the order of their submission, which is the stream's
        self._ended: list[CopyResult] = []
        self._last_end = self._last_check = clock()
        self._closed = False
        self._enter_device()
        self._stream: int | None = runtime.create_stream()

    # -- implemented by each platform

    @abc.abstractmethod
    def _enqueue(self, job: StreamJob, stream: int) -> None:
        """Enqueue every copy of the job, so that an event recorded on `stream` afterwards comes after all of them.

        This holds after an exception, too, for the copies enqueued before it. Raises DeviceCopyError.
        """

    @abc.abstractmethod
    def _await_event(self, event: int) -> bool:
        """Block for at most `check_seconds`. False when the event is not complete, or its state is unknown."""

    def _stream_failure(self, stream: int) -> DeviceCopyError | None:
        """Return why a task of the stream has failed, for runtimes whose events do not report it."""
        return None

    def _is_captured(self, stream: int) -> bool:
        """Whether a graph is being captured on `stream`, for runtimes that have graphs."""
        return False

    def _job_ended(self, job: StreamJob) -> None:  # noqa: B027 - optional
        """Take a job's resources back, which may be used again once it has ended."""

    def _release(self) -> None:  # noqa: B027 - optional
        """Free what the subclass allocated; called when nothing of this direction runs any more."""

    def _poll(self, event: int, seconds: float, pause_seconds: float) -> bool:
        """`_await_event` by queries, for runtimes that cannot wait for an event with a deadline."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if self._runtime.event_complete(event):
                    return True
            except DeviceCopyError:
                return False
            time.sleep(pause_seconds)
        return False

    # Whether `discard_stream` also stops queued copies. If it does not, a late job cannot be reported as ended: the
    # device might write to its blocks after they were given to another request.
    _discard_stops_copies = False

    # -- the copier's contract

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
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
        compute_stream = self._compute_stream()
        if self._is_captured(compute_stream):
            # The barrier would tie the copy stream to the graph, whose every replay would repeat the copies.
            raise DeviceCopyError(f"{self._direction.value} job {job_id} came while a graph is captured")
        job = self._open_job(job_id, split_at(plan, self._host_boundaries), stream, compute_stream, awaited)
        try:
            self._enqueue(job, stream)
        except DeviceCopyError as error:
            job.error = without_frames(error)  # its frames hold the job
        except Exception as error:  # of any kind: copies may be in flight
            job.error = DeviceCopyError(f"{self._direction.value} job {job_id}: {error!r}")
        try:
            # After a refused copy, too: those before it are in flight and use their memory until this event is
            # complete. Only then is the job reported as failed.
            if job.copied is not None:
                self._runtime.record_event(job.copied, stream)
            self._runtime.record_event(job.end, stream)
        except DeviceCopyError as error:
            self._jobs[job_id] = job
            self._discard_stream(job.error or error)
            self._drop_result(job_id)
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

    def hold_computation(self, job_id: int) -> Exception | None:
        job = self._jobs.get(job_id)
        if job is None:
            return next((result.error for result in self._ended if result.job_id == job_id), None)
        self._enter_device()
        if job.copied is None:
            self.wait({job_id})
            return job.error
        try:
            self._runtime.stream_wait_event(self._compute_stream(), job.copied)
        except DeviceCopyError as error:
            self.wait({job_id})  # its blocks may be given to another request
            return job.error or error
        return job.error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._enter_device()
        self.wait(set(self._jobs))
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                self._runtime.destroy_stream(stream)
            except DeviceCopyError as error:
                logger.warning("closing the %s stream: %s", self._direction.value, error)
        self._release()
        self._barriers.close()
        self._timers.close()
        self._on_close()

    # -- submitting

    def _enter_device(self) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self._runtime.set_device(self._device)
            self._thread = thread

    def _require_stream(self) -> int:
        if self._closed:
            raise DeviceCopyError(f"the {self._direction.value} transport is closed")
        if self._stream is None:
            try:
                self._stream = self._runtime.create_stream()
            except DeviceCopyError as error:
                raise DeviceCopyError(f"no new {self._direction.value} stream after a failure: {error}") from error
        return self._stream

    def _open_job(self, job_id: int, plan: CopyPlan, stream: int, compute_stream: int, awaited: bool) -> StreamJob:
        """Everything before the first copy. A job that fails here has touched no memory."""
        taken: list[tuple[Events, int]] = []
        try:
            for events in (self._barriers, self._timers, self._timers):
                taken.append((events, events.take()))
            barrier, start, end = (event for _, event in taken)
            copied = None
            if awaited and self._barriers.reusable:
                copied = self._barriers.take()
                taken.append((self._barriers, copied))
            self._runtime.record_event(barrier, compute_stream)
            self._runtime.stream_wait_event(stream, barrier)
            self._runtime.record_event(start, stream)
        except Exception:
            for events, event in taken:
                events.retire(event)
            raise
        return StreamJob(job_id, plan, barrier, start, end, self._clock(), copied)

    # -- ending

    def _collect(self, suspect: bool = False) -> None:
        """Move ended jobs to the results. suspect: check the stream for errors now."""
        while self._jobs:
            job = next(iter(self._jobs.values()))
            try:
                if self._runtime.event_complete(job.end):
                    self._end(job)
                    continue
            except DeviceCopyError as error:
                self._discard_stream(error)
                return
            trouble = self._trouble(job, suspect)
            if trouble is not None:
                self._discard_stream(trouble)
            return

    def _end(self, job: StreamJob) -> None:
        del self._jobs[job.job_id]
        self._last_end = self._clock()
        try:
            seconds = self._runtime.elapsed_seconds(job.start, job.end)
        except DeviceCopyError:
            seconds = self._last_end - job.submitted_at
        self._ended.append(CopyResult(job.job_id, job.plan.total_bytes, seconds, job.error))
        self._barriers.give_back(job.barrier)
        if job.copied is not None:
            self._barriers.retire(job.copied)
        self._timers.give_back(job.start)
        self._timers.give_back(job.end)
        self._job_ended(job)

    def _trouble(self, oldest: StreamJob, suspect: bool) -> DeviceCopyError | None:
        """Return why the oldest job will never end; None while it may."""
        now = self._clock()
        waited = now - max(oldest.submitted_at, self._last_end)
        if waited > self._limits.job_seconds:
            late = DeviceCopyError(
                f"{self._direction.value} job {oldest.job_id} ({oldest.plan.total_bytes} bytes) has not ended "
                f"after {waited:.0f} s"
            )
            if self._discard_stops_copies:
                return late
            if not oldest.overdue:
                oldest.overdue = True
                logger.error("Spillway: %s; its blocks stay in use until the device answers", late)
        overdue = waited > self._limits.check_seconds and now - self._last_check > self._limits.check_seconds
        if not (suspect or overdue):
            return None
        self._last_check = now
        assert self._stream is not None
        return self._stream_failure(self._stream)

    def _discard_stream(self, cause: DeviceCopyError) -> None:
        """Destroy a stream that is in error or stuck. Its unfinished jobs have failed."""
        logger.error("Spillway: the %s stream is discarded: %s", self._direction.value, cause)
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                self._runtime.discard_stream(stream)
            except DeviceCopyError as error:
                logger.error("destroying it: %s", error)
        for job in list(self._jobs.values()):
            try:
                complete = self._runtime.event_complete(job.end)
            except DeviceCopyError:
                complete = False
            if not complete:
                job.error = job.error or DeviceCopyError(f"its stream was discarded: {cause}")
            self._end(job)

    def _drop_result(self, job_id: int) -> None:
        """A job whose submit raises has no result."""
        self._ended = [result for result in self._ended if result.job_id != job_id]


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
