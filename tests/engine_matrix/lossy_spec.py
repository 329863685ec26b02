"""A connector whose loads are zeroes: the control that shows that the matrix detects wrong bytes."""

from __future__ import annotations

from dataclasses import replace

from engine_matrix.changed_loads import ChangedLoads
from spillway_connector.device.copier import Direction
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.engine.transports import OpenTransport


class LossySpec(SpillwayOffloadingSpec):
    def _open_transport(self, region: HostRegion) -> OpenTransport:
        transport = super()._open_transport(region)
        copier = transport.copier
        return replace(
            transport,
            copier=lambda direction: (
                ChangedLoads(copier(direction), 0) if direction is Direction.LOAD else copier(direction)
            ),
        )
