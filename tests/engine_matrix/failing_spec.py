"""Connectors whose device copies sometimes fail after they have overwritten their target, or are refused midway."""

from __future__ import annotations

from dataclasses import replace

from engine_matrix.changed_loads import ChangedLoads
from engine_matrix.changed_loads_spec import ChangedLoadsSpec
from spillway_connector.device.copier import Copier, CopyResult
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan

_SPOILT = 0x3F  # a block of 0.747 in float32 and bfloat16


class _EverySecondLoadFails(ChangedLoads):
    def __init__(self, inner: Copier) -> None:
        super().__init__(inner, _SPOILT)
        self._failing: set[int] = set()
        self._loads = 0

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        self._loads += 1
        if self._loads % 2:
            self._failing.add(job_id)
            plan = self.changed(plan)
        self._inner.submit(job_id, plan, awaited=awaited)

    def hold_computation(self, job_id: int) -> Exception | None:
        error = super().hold_computation(job_id)
        return DeviceCopyError("injected by the test") if job_id in self._failing else error

    def finished(self) -> list[CopyResult]:
        return [
            replace(result, error=DeviceCopyError("injected by the test")) if result.job_id in self._failing else result
            for result in super().finished()
        ]


class _EverySeventhCopyIsRefused(ChangedLoads):
    """Refuses a copy in the middle of a load that goes layer by layer in several copies."""

    def __init__(self, inner: Copier) -> None:
        super().__init__(inner, _SPOILT)
        self._copies = 0

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        self._copies += 1
        if self._copies % 7 == 3:
            raise DeviceCopyError("refused by the test")
        self._inner.submit(job_id, plan, awaited=awaited)


class FailingSpec(ChangedLoadsSpec):
    @staticmethod
    def _changed(copier: Copier) -> Copier:
        return _EverySecondLoadFails(copier)


class RefusingSpec(ChangedLoadsSpec):
    @staticmethod
    def _changed(copier: Copier) -> Copier:
        return _EverySeventhCopyIsRefused(copier)
