"""SpillwayConnector for vLLM 0.30 and later; engine/connector.py chooses it."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.layouts.equal_ranks import ranks_hold_the_same
from spillway_connector.engine.layouts.packed_blocks import is_packed, row_block_bytes
from spillway_connector.engine.patches.vllm_patches import V030
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.v030.scheduler import SpillwayConnectorScheduler, StepLoadingScheduler
from spillway_connector.engine.v030.seams import SEAMS
from spillway_connector.engine.v030.spec import SpillwayOffloadingSpec
from spillway_connector.engine.v030.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker.half import WorkerHalf


class SpillwayConnector(ConnectorBase):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half. What is not here is
    vLLM's: the required layout (LBHNC), `requires_kv_delivery` (no: a lost store is a later miss), the sources of
    hits, and pending work, for which the engine keeps stepping.
    """

    _seams, _patches = SEAMS, V030

    @override
    def _make_spec(self) -> OffloadingSpec:
        config = build_offloading_config(self._vllm_config, self._kv_cache_config)
        self._canonical_layout = config.canonical_layout  # which vLLM's methods read
        if config.parallel.pp_size > 1:  # vLLM's workers would each store a copy
            same = ranks_hold_the_same(self._vllm_config, self._kv_cache_config)
            config = replace(config, replicated_layout=same)
        if is_packed(self._kv_cache_config) and issubclass(
            OffloadingSpecFactory.get_spec_cls(config.extra_config), SpillwayOffloadingSpec
        ):
            held = row_block_bytes(self._kv_cache_config, config.worker_kv_bytes_per_block)
            config = replace(config, worker_kv_bytes_per_block=held)
        spec = OffloadingSpecFactory.create_spec(config)
        if isinstance(spec, SpillwayOffloadingSpec):
            spec.attach(self._vllm_config, self._kv_cache_config)
        return spec

    @override
    def _make_scheduler_half(self) -> SchedulerHalf:
        scheduler = StepLoadingScheduler if self._layerwise else SpillwayConnectorScheduler
        return scheduler(self._spec, self._vllm_config, self._kv_cache_config)

    @override
    def _make_worker_half(self) -> WorkerHalf:
        return SpillwayConnectorWorker(self._spec, self._vllm_config, self._kv_cache_config)

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_scheduler is None or self._statistics_due.take():
            return super().get_kv_connector_stats()
        return None

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert isinstance(self.connector_worker, SpillwayConnectorWorker)
        self._queue_stores()
        return self.connector_worker.get_transfer_results()

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.connector_worker is not None
        self._queue_stores()
        return self.connector_worker.get_finished(finished_req_ids)

    @override
    def wait_for_save(self) -> None:
        self._queue_stores()

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 and later call this before a sleep unmaps the device's KV; from now on no copy touches that memory.

        There is nothing to restore after it: vLLM maps the KV at the same addresses again, and what is page-locked or
        registered with the device are the rows of the CPU tier, which stay.
        """
        assert isinstance(self.connector_worker, SpillwayConnectorWorker)
        self.connector_worker.settle_copies()

    @override
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata:
        """Return a report of every step, never None: vLLM does not notify the scheduler half of a step without a
        forward pass and with nothing to report, but the prefill rate is measured from the end of one step to the end
        of the next."""
        report = super().build_connector_worker_meta()
        return report if report is not None else SpillwayWorkerMetadata()

    def _queue_stores(self) -> None:
        """Called once in every step: without a forward pass 0.30 skips wait_for_save, and metadata may be gone."""
        if self.has_connector_metadata():
            assert self.connector_worker is not None
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.prepare_store_kv(self._connector_metadata)
