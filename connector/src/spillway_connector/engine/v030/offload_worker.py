"""vLLM's OffloadingWorker over Spillway's copiers: plans each job, and reports how it ended."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from spillway_connector.device.copier import Copier, CopyResult
from spillway_connector.engine.layouts.copy_layout import plan_job
from spillway_connector.engine.node_tier.row_checks import RowChecks
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyLayout, join_plans
from spillway_connector.plan.layer_groups import LayerGroups

logger = logging.getLogger(__name__)


class StepWorker(OffloadingWorker):
    """A worker that takes the stores of a step as one copy."""

    @abstractmethod
    def submit_stores(self, copy_id: int, stores: Sequence[tuple[GPULoadStoreSpec, LoadStoreSpec]]) -> bool:
        """Submit these stores. Returns False if they are refused; nothing moves then."""


class CopyWorker(StepWorker):
    """One batched copy a job. Each rank's process, model-runner thread.

    A job that a copier refuses is answered with False, never with an exception: stock callers assert on it, and
    engine/v030/worker.py has its request recompute.
    """

    def __init__(
        self,
        layout: CopyLayout,
        store: Copier,
        load: Copier,
        share: tuple[int, int] = (0, 1),
        *,
        checks: RowChecks | None = None,
        layers: LayerGroups | None = None,
    ) -> None:
        """share: the part of each store that this rank copies (ChunkGeometry.store_share). checks: the checks of
        loads, if engines share the rows. layers: loads layer by layer; None: no load goes so."""
        self._checks = checks
        self._layout = layout
        self._share = share
        self._store, self._load = store, load
        self.layers = layers

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self.submit_stores(job_id, [(src_spec, dst_spec)])

    @override
    def submit_stores(self, copy_id: int, stores: Sequence[tuple[GPULoadStoreSpec, LoadStoreSpec]]) -> bool:
        return self._submit(self._store, copy_id, stores, self._share)

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """expedited: an argument of vLLM 0.33, for a load that the model's thread waits for before the forward pass;
        the connector makes none (see load_layers)."""
        if self._checks is None:
            return self._submit(self._load, job_id, [(dst_spec, src_spec)], (0, 1))
        try:
            self._checks.require(src_spec)
        except DeviceCopyError as error:
            logger.warning("KV load %d: %s", job_id, error)
            return False
        if not self._submit(self._load, job_id, [(dst_spec, src_spec)], (0, 1)):
            return False
        self._checks.submitted(job_id, src_spec)
        return True

    def load_layers(self, copy_id: int, group: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> None:
        """See LayerLoader."""
        assert self.layers is not None
        self._load.submit(copy_id, plan_job(self.layers.layouts[group], device, host), awaited=True)

    def hold_computation(self, copy_id: int) -> Exception | None:
        """See LayerLoader."""
        return self._load.hold_computation(copy_id)

    def _submit(
        self,
        copier: Copier,
        copy_id: int,
        jobs: Sequence[tuple[GPULoadStoreSpec, LoadStoreSpec]],
        share: tuple[int, int],
    ) -> bool:
        try:
            plans = [plan_job(self._layout, device, host).share(*share) for device, host in jobs]
            copier.submit(copy_id, join_plans(plans))
        except Exception:  # of any kind: the engine goes on without this copy
            logger.exception("KV job %d cannot be copied", copy_id)
            return False
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        return [self._result(one) for copier in (self._store, self._load) for one in copier.finished()]

    def _result(self, result: CopyResult) -> TransferResult:
        if result.error is not None:
            logger.warning("KV job %d: %s", result.job_id, result.error)
        held = self._checks is None or self._checks.still_held(result.job_id)
        return TransferResult(
            job_id=result.job_id,
            success=held and result.error is None,
            transfer_size=result.size_bytes,
            transfer_time=result.seconds,
        )

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._store.wait(job_ids)
        self._load.wait(job_ids)

    @override
    def shutdown(self) -> None:
        self._store.close()
        self._load.close()
