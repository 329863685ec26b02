"""A connector whose loads go through another copier: the base of those that are wrong on purpose."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from spillway_connector.device.copier import Copier, Direction
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.engine.worker.transports import OpenTransport


class ChangedLoadsSpec(SpillwayOffloadingSpec):
    @staticmethod
    @abstractmethod
    def _changed(copier: Copier) -> Copier:
        """Return the copier that the loads go through instead of this one."""

    def _open_transport(self, region: HostRegion) -> OpenTransport:
        transport = super()._open_transport(region)
        copier = transport.copier
        return replace(
            transport,
            copier=lambda direction: (
                self._changed(copier(direction)) if direction is Direction.LOAD else copier(direction)
            ),
        )
