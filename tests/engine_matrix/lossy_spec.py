"""A connector whose loads are zeroes: the control that shows that the matrix detects wrong bytes."""

from __future__ import annotations

from collections.abc import Callable

from engine_matrix.changed_loads import ChangedLoads
from spillway_connector.device.copier import Copier, Direction
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec


class LossySpec(SpillwayOffloadingSpec):
    def _open_transport(self, region: HostRegion) -> Callable[[Direction], Copier]:
        copier = super()._open_transport(region)
        return lambda direction: (
            ChangedLoads(copier(direction), 0) if direction is Direction.LOAD else copier(direction)
        )
