"""The worker half: submits each copy once, and turns every failure into a recompute instead of an assert."""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec
from vllm.v1.kv_offload.worker.worker import TransferSpec

from spillway_connector.engine.adapters import AdapterLoads
from spillway_connector.engine.copy_jobs import CopyJobs, EndedCopy, Submit
from spillway_connector.engine.messages import LoadPiece, SpillwayConnectorMetadata, SpillwayWorkerMetadata
from spillway_connector.engine.transports import device_state
from spillway_connector.engine.v023.ascend import canonical_kv_caches, has_ascend_layout
from spillway_connector.engine.v023.stats import SpillwayStats


class SpillwayConnectorWorker(OffloadingConnectorWorker):
    """Overrides upstream's worker half. Each rank's process, model-runner thread.

    Upstream asserts that every submit and every copy succeeds, and a failed assert ends the engine. A failed load is
    reported as received with its device blocks marked invalid: the scheduler then recomputes them
    (`kv_load_failure_policy: recompute`). A failed store is reported as failed, so its row never becomes a hit.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self.kv_connector_stats = SpillwayStats()
        vllm_config = getattr(spec, "vllm_config", None)
        self._adapter_loads = AdapterLoads(getattr(vllm_config, "lora_config", None))
        self._jobs = CopyJobs()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor | list[torch.Tensor]]) -> None:
        """Upstream's contract, and the layouts of vLLM-Ascend, which upstream refuses.

        Raises ConfigError naming the layer whose layout cannot be copied block by block.
        """
        if has_ascend_layout(kv_caches):
            self._register_handlers(canonical_kv_caches(kv_caches, self.spec.kv_cache_config))
        else:
            super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Upstream's contract: blocks until the jobs to flush no longer touch device blocks; here pieces as well."""
        self._jobs.submit_stores()
        if kv_connector_metadata.jobs_to_flush:
            self.worker.wait(self._jobs.copies_of(set(kv_connector_metadata.jobs_to_flush)))

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Upstream's contract, except that a load that cannot be submitted is reported as failed, not asserted on."""
        # Taken out of the metadata: it may be seen again in this step, and a job must be launched exactly once.
        load_jobs, metadata.load_jobs = metadata.load_jobs, {}
        self._jobs.submit_stores()
        for job_id, job in load_jobs.items():
            _, device = job.transfer_spec
            assert isinstance(device, GPULoadStoreSpec)
            self._jobs.start_load(job_id, job.req_id, device.block_ids, self._copy(job_id, job.transfer_spec))
        if isinstance(metadata, SpillwayConnectorMetadata):
            pieces, metadata.pieces = metadata.pieces, []
            for piece in pieces:
                self._start_piece(piece)

    def _start_piece(self, piece: LoadPiece) -> None:
        copy = None
        if piece.transfer_spec is not None:
            device = piece.transfer_spec[1]
            assert isinstance(device, GPULoadStoreSpec)
            copy = device.block_ids, self._copy(piece.piece_id, piece.transfer_spec)
        self._jobs.start_piece(
            piece.piece_id, piece.job_id, piece.request_id, copy, last=piece.last, lost_blocks=piece.lost_blocks
        )

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Upstream's contract: queue the step's stores."""
        store_jobs, metadata.store_jobs = metadata.store_jobs, {}
        for job_id, job in store_jobs.items():
            # Submitted at the start of the next step, behind the copies that sampling needs.
            self._jobs.queue_store(job_id, self._copy(job_id, job.transfer_spec))

    def _copy(self, job_id: int, transfer_spec: TransferSpec) -> Submit:
        """False where the handler raised: upstream's worker logs the exception."""
        return lambda: bool(self.worker.transfer_async(job_id, transfer_spec))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Upstream's contract: (requests done sending: never any, requests whose load has ended).

        Upstream asserts that copies succeed; here failed loads count as ended, with their blocks marked invalid.
        """
        results = self.worker.get_finished()
        for result in results:
            if result.success and result.transfer_size is not None and result.transfer_time is not None:
                assert result.transfer_type is not None
                self.kv_connector_stats.record_transfer(
                    num_bytes=result.transfer_size, time=result.transfer_time, transfer_type=result.transfer_type
                )
        received = self._jobs.finish(
            EndedCopy(result.job_id, bool(result.success), result.transfer_size, result.transfer_time)
            for result in results
        )
        return set(), received.requests

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call; call after get_finished, in the same step."""
        return self._jobs.take_invalid_blocks()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Upstream's contract: the report of this step, or None; here with failed jobs and loaded adapters."""
        adapters, report = self._adapter_loads.take(), self._jobs.take_report()
        if not report.completed and not adapters:
            return None
        return SpillwayWorkerMetadata(dict.fromkeys(report.completed, 1), report.failed, adapters)

    def get_kv_connector_stats(self) -> SpillwayStats:
        """Upstream returns None where nothing was copied; vLLM then drops the scheduler's statistics, so here never."""
        stats, self.kv_connector_stats = self.kv_connector_stats, SpillwayStats()
        assert isinstance(stats, SpillwayStats)
        stats.merge(self._jobs.take_samples().samples())
        stats.merge(device_state(getattr(self.spec, "transport", None)).samples())
        return stats
