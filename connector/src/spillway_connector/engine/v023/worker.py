"""The worker half in vLLM 0.23."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingSpec
from vllm.v1.kv_offload.worker.worker import TransferSpec

from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.v023.ascend import canonical_kv_caches, has_ascend_layout
from spillway_connector.engine.v023.handlers import StepHandler
from spillway_connector.engine.v023.stats import SpillwayStats
from spillway_connector.engine.worker.copy_jobs import Sides, Submit
from spillway_connector.engine.worker.half import WorkerHalf, ended_copy
from spillway_connector.engine.worker.transports import device_state

logger = logging.getLogger(__name__)


class SpillwayConnectorWorker(WorkerHalf):
    """A failed load is reported as received with its device blocks marked invalid: the scheduler then recomputes them
    (`kv_load_failure_policy: recompute`). A failed store is reported as failed, so its row never becomes a hit.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self.kv_connector_stats = SpillwayStats()
        self._begin(getattr(spec, "vllm_config", None))

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        """vLLM's contract, and the layouts of vLLM-Ascend, which vLLM refuses.

        Raises ConfigError naming the layer whose layout cannot be copied block by block.
        """
        if has_ascend_layout(kv_caches):
            self._register_handlers(canonical_kv_caches(kv_caches, self.spec.kv_cache_config))
        else:
            super().register_kv_caches(kv_caches)

    @override
    def _register_handlers(self, kv_caches: CanonicalKVCaches) -> None:
        super()._register_handlers(kv_caches)
        self._load_layers_with(getattr(self.spec, "load_handler", None))

    @override
    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """vLLM's contract: blocks until the jobs to flush no longer touch device blocks; here pieces as well."""
        self._jobs.submit_stores()
        if kv_connector_metadata.jobs_to_flush:
            self.worker.wait(self._jobs.copies_of(set(kv_connector_metadata.jobs_to_flush)))

    @override
    def _sides_of(self, job: Any) -> TransferSpec:
        spec: TransferSpec = job.transfer_spec
        return spec

    @override
    def _load(self, job_id: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> Submit:
        # False if the handler raised: vLLM's worker logs the exception.
        return lambda: bool(self.worker.transfer_async(job_id, (host, device)))

    @override
    def _store(self, copy_id: int, stores: Sequence[Sides]) -> bool:
        source, destination = stores[0]
        handler = self.worker.transfer_type_to_handler[source.medium(), destination.medium()]
        assert isinstance(handler, StepHandler)
        try:
            handler.transfer_together(copy_id, stores)
        except Exception as error:  # of any kind: the engine goes on without these copies
            logger.warning("Spillway: KV store jobs %d and %d more: %r", copy_id, len(stores) - 1, error)
            return False
        return True

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """vLLM's contract: (requests done sending: never any, requests whose load has ended).

        vLLM asserts that copies succeed; here failed loads count as ended, with their blocks marked invalid.
        """
        self._end_forward()
        results = self._ended_copies()
        for result in results:
            if result.success and result.transfer_size is not None and result.transfer_time is not None:
                assert result.transfer_type is not None
                self.kv_connector_stats.record_transfer(
                    num_bytes=result.transfer_size, time=result.transfer_time, transfer_type=result.transfer_type
                )
        return set(), self._jobs.finish(map(ended_copy, results)).requests

    @override
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """vLLM's contract: the report of this step, or None; here with failed jobs and loaded adapters."""
        adapters, report = self._adapter_loads.take(), self._jobs.take_report()
        if not report.completed and not report.failed and not adapters:
            return None
        return SpillwayWorkerMetadata(
            dict.fromkeys(report.completed, 1),
            report.failed,
            adapters,
            loaded_blocks=report.loaded_blocks,
            loading_seconds=report.loading_seconds,
        )

    @override
    def get_kv_connector_stats(self) -> SpillwayStats:
        """Always return statistics: if workers have none, vLLM drops the scheduler's, too."""
        stats, self.kv_connector_stats = self.kv_connector_stats, SpillwayStats()
        assert isinstance(stats, SpillwayStats)
        stats.merge(self._take_samples().samples())
        stats.merge(device_state(getattr(self.spec, "transport", None)).samples())
        return stats
