"""A connector whose device copies fail now and then, after they have spoilt their target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from spillway_connector.device.copier import Copier, CopyResult, Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan


class _EverySecondLoadFails(HostCopier):
    def __init__(self, direction: Direction) -> None:
        super().__init__(direction)
        self._failing: set[int] = set()
        self._spoilt = np.empty(0, np.uint8)
        self._loads = 0

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        if self._direction is Direction.LOAD:
            self._loads += 1
            if self._loads % 2:
                self._failing.add(job_id)
                self._spoilt = np.full(int(plan.sizes_bytes.max(initial=0)), 0x3F, np.uint8)  # 0.747 in float32
                host = np.full(len(plan), self._spoilt.ctypes.data, np.int64)
                plan = CopyPlan(plan.device_addresses, host, plan.sizes_bytes)
        super().submit(job_id, plan)

    def finished(self) -> list[CopyResult]:
        return [
            replace(result, error=DeviceCopyError("as the test wants it")) if result.job_id in self._failing else result
            for result in super().finished()
        ]


class FailingSpec(SpillwayOffloadingSpec):
    def _open_transport(self, region: HostRegion) -> Callable[[Direction], Copier]:
        return _EverySecondLoadFails
