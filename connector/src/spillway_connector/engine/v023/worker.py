"""The worker half: submits each copy once, and turns every failure into a recompute instead of an assert."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec
from vllm.v1.kv_offload.worker.worker import TransferSpec

from spillway_connector import metrics
from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.transport import CudaTransport
from spillway_connector.device.npu.acl_batch import BATCH, LOOP
from spillway_connector.device.npu.transport import NpuTransport
from spillway_connector.engine.adapters import AdapterLoads
from spillway_connector.engine.messages import LoadPiece, SpillwayConnectorMetadata, SpillwayWorkerMetadata
from spillway_connector.engine.v023.ascend import canonical_kv_caches, has_ascend_layout
from spillway_connector.engine.v023.stats import SpillwayStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _LoadInPieces:
    """The pieces of one early load on this rank."""

    request_id: str
    moving: set[int] = field(default_factory=set)  # pieces
    last_seen: bool = False
    invalid_blocks: set[int] = field(default_factory=set)


class SpillwayConnectorWorker(OffloadingConnectorWorker):
    """Overrides upstream's worker half. Each rank's process, model-runner thread.

    Upstream asserts that every submit and every copy succeeds, and a failed assert ends the engine. A failed load is
    reported as received with its device blocks marked invalid: the scheduler then recomputes them
    (`kv_load_failure_policy: recompute`). A failed store is reported as failed, so its row never becomes a hit.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self.kv_connector_stats = SpillwayStats()
        self._connector_worker_meta = SpillwayWorkerMetadata()
        vllm_config = getattr(spec, "vllm_config", None)
        self._adapter_loads = AdapterLoads(getattr(vllm_config, "lora_config", None))
        # By load job: its device blocks, kept until its completion, which may be some steps later.
        self._load_blocks: dict[int, list[int]] = {}
        self._invalid_blocks: set[int] = set()
        self._refused_loads: list[int] = []  # never submitted; reported by the next get_finished
        self._loads_in_pieces: dict[int, _LoadInPieces] = {}
        self._pieces: dict[int, LoadPiece] = {}  # being copied

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
        self._submit_waiting_stores()
        if kv_connector_metadata.jobs_to_flush:
            jobs = set(kv_connector_metadata.jobs_to_flush)
            for job_id in jobs & self._loads_in_pieces.keys():
                jobs |= self._loads_in_pieces[job_id].moving
            self.worker.wait(jobs)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Upstream's contract, except that a load that cannot be submitted is reported as failed, not asserted on."""
        # Taken out of the metadata: it may be seen again in this step, and a job must be launched exactly once.
        load_jobs, metadata.load_jobs = metadata.load_jobs, {}
        self._submit_waiting_stores()
        for job_id, job in load_jobs.items():
            _, device = job.transfer_spec
            assert isinstance(device, GPULoadStoreSpec)
            self._load_jobs[job_id] = job.req_id
            self._load_blocks[job_id] = device.block_ids.tolist()
            if not self._submit(job_id, job.transfer_spec):
                self._refused_loads.append(job_id)
        if isinstance(metadata, SpillwayConnectorMetadata):
            pieces, metadata.pieces = metadata.pieces, []
            for piece in pieces:
                self._start_piece(piece)

    def _start_piece(self, piece: LoadPiece) -> None:
        load = self._loads_in_pieces.setdefault(piece.job_id, _LoadInPieces(piece.request_id))
        load.last_seen |= piece.last
        load.invalid_blocks.update(piece.lost_blocks)
        if piece.transfer_spec is None:
            return
        load.moving.add(piece.piece_id)
        self._pieces[piece.piece_id] = piece
        if not self._submit(piece.piece_id, piece.transfer_spec):
            self._end_piece(piece.piece_id, success=False)

    def _end_piece(self, piece_id: int, success: bool) -> None:
        piece = self._pieces.pop(piece_id)
        load = self._loads_in_pieces[piece.job_id]
        load.moving.discard(piece_id)
        if not success:
            assert piece.transfer_spec is not None
            device = piece.transfer_spec[1]
            assert isinstance(device, GPULoadStoreSpec)
            load.invalid_blocks.update(device.block_ids.tolist())
            self._stats.add(metrics.DEVICE_COPY_FAILURES, 1, Direction.LOAD.value)

    def _end_loads_in_pieces(self) -> set[str]:
        """The requests whose load has ended, piece by piece."""
        received: set[str] = set()
        for job_id, load in list(self._loads_in_pieces.items()):
            if load.moving or not load.last_seen:
                continue
            del self._loads_in_pieces[job_id]
            received.add(load.request_id)
            meta = self._connector_worker_meta
            assert isinstance(meta, SpillwayWorkerMetadata)
            meta.mark_completed(job_id)
            if load.invalid_blocks:
                meta.failed_jobs.add(job_id)
                self._invalid_blocks |= load.invalid_blocks
                logger.warning("KV load job %d is incomplete; its request recomputes the rest", job_id)
        return received

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Upstream's contract: queue the step's stores."""
        store_jobs, metadata.store_jobs = metadata.store_jobs, {}
        for job_id, job in store_jobs.items():
            # Submitted at the start of the next step, behind the copies that sampling needs.
            self._unsubmitted_store_jobs.append((job_id, job.transfer_spec))

    def _submit_waiting_stores(self) -> None:
        waiting, self._unsubmitted_store_jobs = self._unsubmitted_store_jobs, []
        for job_id, transfer_spec in waiting:
            if not self._submit(job_id, transfer_spec):
                self._report(job_id, failed=Direction.STORE)

    def _submit(self, job_id: int, transfer_spec: TransferSpec) -> bool:
        """False where the handler raised: upstream's worker logs the exception."""
        return bool(self.worker.transfer_async(job_id, transfer_spec))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Upstream's contract: (requests done sending: never any, requests whose load has ended).

        Upstream asserts that copies succeed; here failed loads count as ended, with their blocks marked invalid.
        """
        received: set[str] = set()
        refused, self._refused_loads = self._refused_loads, []
        for job_id in refused:
            received.add(self._load_jobs[job_id])
            self._report(job_id, failed=Direction.LOAD)
        for result in self.worker.get_finished():
            is_load, is_piece = result.job_id in self._load_jobs, result.job_id in self._pieces
            direction = Direction.LOAD if is_load or is_piece else Direction.STORE
            if is_load:
                received.add(self._load_jobs[result.job_id])
            if result.success and result.transfer_size is not None and result.transfer_time is not None:
                assert result.transfer_type is not None
                self.kv_connector_stats.record_transfer(
                    num_bytes=result.transfer_size, time=result.transfer_time, transfer_type=result.transfer_type
                )
                self._stats.add(metrics.DEVICE_COPY_BYTES, result.transfer_size, direction.value)
                self._stats.add(metrics.DEVICE_COPY_SECONDS, result.transfer_time, direction.value)
            if is_piece:
                self._end_piece(result.job_id, bool(result.success))
            else:
                self._report(result.job_id, failed=None if result.success else direction)
        return set(), received | self._end_loads_in_pieces()

    def _report(self, job_id: int, failed: Direction | None) -> None:
        """Report a job in the metadata for the scheduler, exactly once, and drop it here."""
        meta = self._connector_worker_meta
        assert isinstance(meta, SpillwayWorkerMetadata)
        meta.mark_completed(job_id)
        self._load_jobs.pop(job_id, None)
        blocks = self._load_blocks.pop(job_id, [])
        if failed is None:
            return
        meta.failed_jobs.add(job_id)
        self._invalid_blocks.update(blocks)
        self._stats.add(metrics.DEVICE_COPY_FAILURES, 1, failed.value)
        logger.warning(
            "KV %s job %d failed; %s", failed.value, job_id, "its request recomputes" if blocks else "dropped"
        )

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call; call after get_finished, in the same step."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Upstream's contract: the report of this step, or None; here with failed jobs and loaded adapters."""
        adapters = self._adapter_loads.take()
        if not self._connector_worker_meta.completed_jobs and not adapters:
            return None
        meta, self._connector_worker_meta = self._connector_worker_meta, SpillwayWorkerMetadata()
        assert isinstance(meta, SpillwayWorkerMetadata)
        meta.adapters = adapters
        return meta

    @property
    def _stats(self) -> SpillwayStats:
        assert isinstance(self.kv_connector_stats, SpillwayStats)
        return self.kv_connector_stats

    def get_kv_connector_stats(self) -> SpillwayStats:
        """Upstream returns None where nothing was copied; vLLM then drops the scheduler's statistics, so here never."""
        stats, self.kv_connector_stats = self._stats, SpillwayStats()
        transport: NpuTransport | CudaTransport | None = getattr(self.spec, "device_transport", None)
        if transport is not None:
            for path in (BATCH, LOOP):
                stats.add(metrics.DEVICE_COPY_PATH, int(transport.path.name == path), path)
            stats.add(metrics.HOST_MEMORY_PINNED, int(transport.pin.pinned), transport.pin.method.value)
        return stats
