"""A connector whose loads are zeroes: the control that shows that the matrix detects wrong bytes."""

from __future__ import annotations

from engine_matrix.changed_loads import ChangedLoads
from engine_matrix.changed_loads_spec import ChangedLoadsSpec
from spillway_connector.device.copier import Copier


class LossySpec(ChangedLoadsSpec):
    @staticmethod
    def _changed(copier: Copier) -> Copier:
        return ChangedLoads(copier, 0)
