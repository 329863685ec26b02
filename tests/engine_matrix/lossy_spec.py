"""A connector whose loads bring nothing: the control that shows what the matrix would see if bytes went wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spillway_connector.device.copier import Copier, Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.plan.copies import CopyPlan


class _EmptyLoads(HostCopier):
    """Reports every job as done; loads have zeroed their blocks instead of filling them."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        if self._direction is Direction.LOAD:
            zeros = np.zeros(int(plan.sizes_bytes.max(initial=0)), np.uint8)
            plan = CopyPlan(plan.device_addresses, np.full(len(plan), zeros.ctypes.data, np.int64), plan.sizes_bytes)
            self._zeros = zeros  # for as long as the job may run
        super().submit(job_id, plan)


class LossySpec(SpillwayOffloadingSpec):
    def _open_transport(self, region: HostRegion) -> Callable[[Direction], Copier]:
        return _EmptyLoads
