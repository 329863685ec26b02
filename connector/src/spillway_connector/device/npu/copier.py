"""Copies between NPU and host memory: the shared stream machinery, with CANN's two ways to enqueue a copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from typing_extensions import override

from spillway_connector.device.copier import Direction
from spillway_connector.device.npu.acl import (
    EVENT_SYNC,
    EVENT_SYNC_TIMEOUT,
    EVENT_TIME_LINE,
    FEATURE_NOT_SUPPORTED,
    STREAM_SYNC_TIMEOUT,
    Acl,
    AclError,
    CopyKind,
)
from spillway_connector.device.npu.acl_batch import CopyPath
from spillway_connector.device.spans import Spans
from spillway_connector.device.stream_copier import CopyLimits, StreamCopier, StreamJob
from spillway_connector.device.stream_events import ReusedEvents
from spillway_connector.errors import DeviceCopyError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.0005  # between queries if the runtime cannot wait for an event with a deadline


class NpuCopier(StreamCopier):
    """One direction of copies of an NPU. See copier.Copier for the contract; all methods run on the model thread."""

    _discard_stops_copies = True  # aclrtStreamAbort, or a destruction that waits

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
        limits: CopyLimits | None = None,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the copier of one direction. Raises AclError.

        Args:
            compute_stream: Called at every submit. torch_npu queues kernels on the host first, and reading a stream's
                handle flushes that queue: a barrier recorded on an older handle would come too early.
        """
        self._kind = CopyKind.DEVICE_TO_HOST if direction is Direction.STORE else CopyKind.HOST_TO_DEVICE
        self._acl = acl
        self._path = path
        self._host_pinned = host_pinned
        super().__init__(
            direction,
            acl,
            device,
            compute_stream,
            ReusedEvents(acl, EVENT_SYNC),
            ReusedEvents(acl, EVENT_TIME_LINE),
            host_boundaries=host_boundaries,
            limits=limits or CopyLimits(),
            on_close=on_close,
            clock=clock,
        )

    @override
    def _enqueue(self, job: StreamJob, stream: int) -> None:
        for batch in job.plan.batches(self._limits.descriptors):
            spans = Spans.of(self._direction, batch)
            if self._path.is_batch:
                call = self._acl.batch_call(spans, self._kind, self._device)
                job.keep.append(call)
                try:
                    call.submit(stream)
                    continue
                except AclError as error:
                    if error.code != FEATURE_NOT_SUPPORTED:
                        raise
                    self._path.fall_back(str(error))
            # Spans of a refused batch that went out after all are copied twice, the same bytes to the same place.
            self._acl.memcpy_each(spans, self._kind, stream, hold_gil=self._host_pinned)

    @override
    def _is_captured(self, stream: int) -> bool:
        return self._acl.is_captured(stream)

    @override
    def _stream_failure(self, stream: int) -> DeviceCopyError | None:
        """An event does not report that its task failed; synchronising the stream with timeout 0 does."""
        try:
            self._acl.synchronize_stream(stream, 0)
        except AclError as error:
            return None if error.code == STREAM_SYNC_TIMEOUT else error
        return None

    @override
    def _await_event(self, event: int) -> bool:
        timeout_seconds = min(self._limits.check_seconds, self._limits.job_seconds)
        if self._acl.has("aclrtSynchronizeEventWithTimeout"):
            try:
                self._acl.synchronize_event(event, max(1, int(timeout_seconds * 1e3)))
                return True
            except AclError as error:
                if error.code != EVENT_SYNC_TIMEOUT:
                    logger.warning("waiting for a %s job: %s", self._direction.value, error)
                return False
        return self._poll(event, timeout_seconds, _POLL_SECONDS)
