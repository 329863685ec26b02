"""Copies between a CUDA device and pinned host memory: the shared stream machinery, with three ways to enqueue a copy.

Events of a failed task answer with the error themselves, and an error of the device is final for the process's
context: nothing runs after it. There is no call that stops a copy, so a late one is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.bursts import fits_words
from spillway_connector.device.cuda.driver import (
    EVENT_NO_TIMING,
    EVENT_TIMING,
    NOT_FOUND,
    NOT_SUPPORTED,
    CudaDriver,
    CudaError,
)
from spillway_connector.device.cuda.paths import CudaPaths
from spillway_connector.device.cuda.staging import CudaStaging
from spillway_connector.device.spans import Spans
from spillway_connector.device.stream_copier import CopyLimits, StreamCopier, StreamJob
from spillway_connector.device.stream_events import ReusedEvents
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copy_table import BATCH, STAGED

_POLL_SECONDS = 0.0001
_STAGED_PIECES_MIN = 16  # fewer are submitted by a batch before a kernel is launched


class CudaCopier(StreamCopier):
    """One direction of copies of a GPU. See copier.Copier for the contract; all methods run on the model thread."""

    def __init__(
        self,
        direction: Direction,
        driver: CudaDriver,
        device: int,
        paths: CudaPaths,
        compute_stream: Callable[[], int],
        *,
        staging: CudaStaging | None = None,
        host_boundaries: tuple[int, ...] = (),
        limits: CopyLimits | None = None,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the copier of one direction. Raises CudaError.

        Args:
            staging: None if the host memory is not pinned or there is no kernel.
        """
        self._driver = driver
        self._paths = paths
        self._staging = staging
        self._table_rows: dict[int, int] = {}  # of staged jobs in flight
        super().__init__(
            direction,
            driver,
            device,
            compute_stream,
            ReusedEvents(driver, EVENT_NO_TIMING),
            ReusedEvents(driver, EVENT_TIMING),
            host_boundaries=host_boundaries,
            limits=limits or CopyLimits(),
            on_close=on_close,
            clock=clock,
        )

    @override
    def _enqueue(self, job: StreamJob, stream: int) -> None:
        plan = job.plan
        path = self._paths.choose(self._direction, len(plan), plan.total_bytes)
        if path == STAGED and not self._stage(job, stream):
            path = BATCH if self._paths.batch else path
        elif path == STAGED:
            return
        for part in plan.batches(self._limits.descriptors):
            spans = Spans.of(self._direction, part)
            if path == BATCH and self._paths.batch:
                try:
                    self._driver.copy_batch(self._direction, spans, stream)
                    continue
                except CudaError as error:
                    if error.code not in (NOT_SUPPORTED, NOT_FOUND):
                        raise
                    self._paths.drop_batch(str(error))
            # Spans of a refused batch that went out after all are copied twice, the same bytes to the same place.
            self._driver.copy_each(self._direction, spans, stream)

    def _stage(self, job: StreamJob, stream: int) -> bool:
        """Enqueue the job through the staging slots. False when it needs another path; nothing was enqueued then."""
        if self._staging is None or len(job.plan) < _STAGED_PIECES_MIN or not fits_words(job.plan):
            return False
        try:
            first = self._staging.enqueue(job.plan, stream, batch=self._paths.batch)
        except DeviceCopyError as error:
            self._paths.drop_staged(str(error))
            raise
        if first is None:
            return False
        self._table_rows[job.job_id] = first
        return True

    @override
    def _job_ended(self, job: StreamJob) -> None:
        first = self._table_rows.pop(job.job_id, None)
        if first is not None:
            assert self._staging is not None
            self._staging.give_back(first)

    @override
    def _release(self) -> None:
        if self._staging is not None:
            self._staging.close()

    @override
    def _await_event(self, event: int) -> bool:
        return self._poll(event, self._limits.check_seconds, _POLL_SECONDS)
