"""A copier whose jobs run late, at random times, in order as on a device, and sometimes fail."""

from __future__ import annotations

import random

import numpy as np

from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.engine.worker.transports import OpenTransport
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan

_GARBAGE = 0xA5


class ManualCopier:
    """Bytes move at `advance` or `wait`, not at `submit`, which exposes blocks that were reused too early."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self.rng = random.Random(0)
        self.failing_share = 0.0
        self.refused_share = 0.0
        self.submitted_ids: set[int] = set()
        self.trace: list[str] = []
        self._queue: list[tuple[int, CopyPlan]] = []
        self._ended: list[CopyResult] = []
        self._credit = 0.0  # bytes that the oldest job could have moved

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        assert job_id not in self.submitted_ids, f"job {job_id} was submitted twice"
        self.submitted_ids.add(job_id)
        if self.rng.random() < self.refused_share:
            self.trace.append(f"  {self.direction.value} {job_id} refused")
            if self.direction is Direction.STORE:
                self.submitted_ids.discard(job_id)  # it may be part of a step's stores, of which each is tried alone
            raise DeviceCopyError("refused by the test")
        self._queue.append((job_id, plan))

    def advance(self, jobs: int) -> None:
        """Run the oldest `jobs` jobs."""
        for _ in range(min(jobs, len(self._queue))):
            job_id, plan = self._queue.pop(0)
            error = None
            if self.rng.random() < self.failing_share:
                garbage = np.full(int(plan.sizes_bytes.max(initial=1)), _GARBAGE, np.uint8)
                source = np.full(len(plan), garbage.ctypes.data, np.int64)
                if self.direction is Direction.STORE:
                    copy_spans(self.direction, CopyPlan(source, plan.host_addresses, plan.sizes_bytes))
                else:
                    copy_spans(self.direction, CopyPlan(plan.device_addresses, source, plan.sizes_bytes))
                error = DeviceCopyError("failed by the test")
            else:
                copy_spans(self.direction, plan)
            self.trace.append(f"  {self.direction.value} {job_id} {'failed' if error else 'copied'}")
            self._ended.append(CopyResult(job_id, plan.total_bytes, 0.001, error))

    def advance_for(self, seconds: float, bytes_per_second: float) -> int:
        """Run what such a link moves in that time, one job behind the other. Returns the bytes of what has ended."""
        self._credit = self._credit + seconds * bytes_per_second if self._queue else 0.0
        moved = 0
        while self._queue and (size := self._queue[0][1].total_bytes) <= self._credit:
            self._credit -= size
            moved += size
            self.advance(1)
        return moved

    def finished(self) -> list[CopyResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        last = max((at for at, (job_id, _) in enumerate(self._queue) if job_id in job_ids), default=-1)
        self.advance(last + 1)

    def hold_computation(self, job_id: int) -> Exception | None:
        self.wait({job_id})
        return next((result.error for result in self._ended if result.job_id == job_id), None)

    def close(self) -> None:
        self.advance(len(self._queue))

    @property
    def idle(self) -> bool:
        return not self._queue and not self._ended


class ManualSpec(SpillwayOffloadingSpec):
    """The spec that vLLM builds from `spec_name: ManualSpec`; the copiers of a worker are its `copiers`."""

    def _open_transport(self, region: HostRegion) -> OpenTransport:
        self.copiers: dict[Direction, ManualCopier] = {}

        def copier(direction: Direction) -> ManualCopier:
            self.copiers[direction] = ManualCopier(direction)
            return self.copiers[direction]

        return OpenTransport(copier)
