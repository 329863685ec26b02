"""The worker half in vLLM 0.30 and later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingSpec

from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.layouts.packed_blocks import first_spec
from spillway_connector.engine.spec_base import SpecBase
from spillway_connector.engine.v030.kv_blocks import place_kv_caches
from spillway_connector.engine.v030.offload_worker import CopyWorker, StepWorker
from spillway_connector.engine.worker.copy_jobs import CopyJobs, Received, Sides, Submit
from spillway_connector.engine.worker.half import WorkerHalf, ended_copy
from spillway_connector.engine.worker.transports import device_state


class SpillwayConnectorWorker(WorkerHalf):
    """A failed load is reported as received, and as failed: with its device blocks if the model has one list of
    blocks that attention reads whole (vLLM then keeps the prefix before them), else for the whole request, since vLLM
    cannot tell to which group a block belongs. Either way vLLM recomputes (`kv_load_failure_policy: recompute`).
    """

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._begin(vllm_config)
        self._names_blocks = names_failed_blocks(kv_cache_config)
        # If no block is zeroed within a step, loads begin before the forward pass, so that they do not queue behind it.
        self._loads_before_forward = not kv_cache_config.needs_kv_cache_zeroing
        self._reported_state: dict[str, float] = {}

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's contract, for more layouts: several tensors a layer, pages with padding, blocks of all layers.

        Raises ConfigError naming the layer whose layout cannot be copied block by block.
        """
        group_ids = get_offloading_group_ids(self.kv_cache_config)
        room_bytes = self.spec.geometry.rank_block_bytes if isinstance(self.spec, SpecBase) else None
        self._init_worker(place_kv_caches(kv_caches, self.kv_cache_config, group_ids, room_bytes))
        self._load_layers_with(self.worker if isinstance(self.worker, CopyWorker) else None)

    @override
    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """vLLM's contract, before the step's forward pass: blocks until the jobs to flush touch no device block.

        Stores that come with the same metadata are submitted before these. Here loads begin, too: vLLM begins them
        behind the forward pass, and then they wait for it.
        """
        flush = kv_connector_metadata.jobs_to_flush or set()
        for job_id in flush & kv_connector_metadata.store_jobs.keys():
            self._jobs.queue_store(job_id, self._sides_of(kv_connector_metadata.store_jobs.pop(job_id)))
        self._jobs.submit_stores()
        if flush:
            assert self.worker is not None
            self.worker.wait(self._jobs.copies_of(flush))
        if self._loads_before_forward:
            self._start_loads(kv_connector_metadata)

    def settle_copies(self) -> None:
        """Block until no copy touches the device any more. Their ends are reported as usual."""
        assert self.worker is not None
        self._jobs.submit_stores()
        self.worker.wait(self._jobs.under_way())

    @override
    def _sides_of(self, job: Any) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        return job.src_spec, job.dst_spec

    @override
    def _store(self, copy_id: int, stores: Sequence[Sides]) -> bool:
        assert isinstance(self.worker, StepWorker)
        return self.worker.submit_stores(copy_id, stores)

    @override
    def _load(self, job_id: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> Submit:
        worker = self.worker
        assert worker is not None
        return lambda: worker.submit_load(job_id, host, device)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """The requests whose load has ended since the last call, and those whose load failed as a whole."""
        received = self._finish()
        failed = set() if self._names_blocks else received.failed
        return KVConnectorTransferResults(finished_recving=received.requests, failed_recving=failed)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """vLLM's contract: (requests done sending: never any, requests whose load has ended)."""
        return set(), self._finish().requests

    def _finish(self) -> Received:
        assert self.worker is not None
        self._end_forward()
        results = self._ended_copies()
        for result in results:
            if result.success and result.transfer_size is not None and result.transfer_time is not None:
                of_step = self._connector_worker_meta.transfer_stats
                direction = of_step.load if self._jobs.is_load(result.job_id) else of_step.store
                direction.record(result.transfer_size, result.transfer_time)
        return self._jobs.finish(map(ended_copy, results))

    @override
    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks as the base does; none if failures are reported for whole requests."""
        invalid = super().take_invalid_blocks()
        return invalid if self._names_blocks else set()

    @override
    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """vLLM's contract: the report of this step, or None; here with failed jobs, loaded adapters and samples."""
        adapters, report = self._adapter_loads.take(), self._jobs.take_report()
        samples = self._take_samples()
        state = device_state(getattr(self.spec, "transport", None)).samples()
        if state != self._reported_state:
            self._reported_state = state
            samples.merge(state)
        if not report.completed and not report.failed and not adapters and not samples:
            return None
        meta, self._connector_worker_meta = self._connector_worker_meta, OffloadingWorkerMetadata()
        completed = dict.fromkeys(report.completed, 1)
        return SpillwayWorkerMetadata(
            completed_jobs=completed,
            transfer_stats=meta.transfer_stats,
            failed_jobs=report.failed,
            adapters=adapters,
            samples=samples,
            loaded_blocks=report.loaded_blocks,
            loading_seconds=report.loading_seconds,
        )

    @override
    def shutdown(self) -> None:
        self._jobs = CopyJobs(self._store)
        super().shutdown()


def names_failed_blocks(config: KVCacheConfig) -> bool:
    """Whether vLLM can cut a request back to the blocks before the first bad one.

    With several KV groups a block's id is not one request's position: 0.32 and later raise RuntimeError. With sliding
    windows alone, blocks outside the window are kept although they were never loaded.
    """
    groups = config.kv_cache_groups
    return len(groups) == 1 and isinstance(first_spec(groups[0]), FullAttentionSpec)
