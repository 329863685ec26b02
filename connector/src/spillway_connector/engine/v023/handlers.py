"""Turns vLLM's transfer jobs into plans for a copier: one handler per direction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from typing_extensions import override
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

from spillway_connector.device.copier import Copier, Direction
from spillway_connector.engine.layouts.copy_layout import plan_job
from spillway_connector.engine.node_tier.row_checks import RowChecks
from spillway_connector.plan.copies import CopyLayout, CopyPlan, join_plans
from spillway_connector.plan.layer_groups import LayerGroups

_TRANSFER_TYPE = {Direction.STORE: ("GPU", "CPU"), Direction.LOAD: ("CPU", "GPU")}  # vLLM's words for its metrics


class StepHandler(OffloadingHandler):
    """A handler that takes the jobs of a step as one copy."""

    @abstractmethod
    def transfer_together(self, copy_id: int, specs: Sequence[TransferSpec]) -> None:
        """Start one copy of several jobs. Raises PlanError or DeviceCopyError; nothing moves then."""


class CopyHandler(StepHandler):
    """vLLM's OffloadingHandler for one direction: plans jobs and reports results. Each rank's process, model thread."""

    def __init__(
        self,
        direction: Direction,
        layout: CopyLayout,
        copier: Copier,
        share: tuple[int, int] = (0, 1),
        *,
        layers: LayerGroups | None = None,
        checks: RowChecks | None = None,
    ) -> None:
        """share: the part of each job that this rank copies (ChunkGeometry.store_share). layers: where loads may go
        layer by layer. checks: the checks of loads, if engines share the rows."""
        self._direction = direction
        self._layout = layout
        self._copier = copier
        self._share = share
        self.layers = layers
        self._checks = checks

    @override
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Raises PlanError or DeviceCopyError; vLLM's worker turns either into a refused job."""
        self.transfer_together(job_id, [spec])
        return True

    @override
    def transfer_together(self, copy_id: int, specs: Sequence[TransferSpec]) -> None:
        plans = [self._plan(spec).share(*self._share) for spec in specs]
        if self._checks is None:
            self._copier.submit(copy_id, join_plans(plans))
            return
        ((rows, _),) = specs  # a load is a copy of its own
        self._checks.require(rows)
        self._copier.submit(copy_id, join_plans(plans))
        self._checks.submitted(copy_id, rows)

    def load_layers(self, copy_id: int, group: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> None:
        """See LayerLoader."""
        assert self.layers is not None
        self._copier.submit(copy_id, plan_job(self.layers.layouts[group], device, host), awaited=True)

    def hold_computation(self, copy_id: int) -> Exception | None:
        """See LayerLoader."""
        return self._copier.hold_computation(copy_id)

    def _plan(self, spec: TransferSpec) -> CopyPlan:
        device, host = spec if self._direction is Direction.STORE else spec[::-1]
        assert isinstance(device, GPULoadStoreSpec)
        return plan_job(self._layout, device, host)

    @override
    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.error is None and (self._checks is None or self._checks.still_held(result.job_id)),
                transfer_size=result.size_bytes,
                transfer_time=result.seconds,
                transfer_type=_TRANSFER_TYPE[self._direction],
            )
            for result in self._copier.finished()
        ]

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._copier.close()
