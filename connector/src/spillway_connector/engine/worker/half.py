"""The worker half of all generations: submits each copy once, and turns every failure into a recompute.

What a generation's interfaces call things differs (where a job has its two sides, how a copy is submitted and its end
reported); its room completes the class.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from typing_extensions import override
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from spillway_connector.engine.ipc.messages import LoadPiece, SpillwayConnectorMetadata
from spillway_connector.engine.ipc.process_settings import ProcessSettings
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.namespace.adapters import AdapterLoads
from spillway_connector.engine.worker.copy_jobs import CopyJobs, EndedCopy, Sides, Submit
from spillway_connector.engine.worker.step_loads import LayerLoader, LayerwiseLoads

# A new request waits for the end of a step that computes nothing, so such a step stays short.
IDLE_STEP_SECONDS_MAX = 0.005
_POLL_SECONDS = 0.0002


class WorkerHalf(OffloadingConnectorWorker):
    """vLLM's worker half with methods replaced. Each rank's process, model-runner thread.

    vLLM asserts that every submit and every copy succeeds, and a failed assert ends the engine.
    """

    _awaits_copies = False

    def _begin(self, config: VllmConfig | None) -> None:
        """The rest of the constructor, after the constructor of vLLM's class."""
        self._jobs = CopyJobs(self._store)
        self._adapter_loads = AdapterLoads(None if config is None else config.lora_config)
        self.idle_step_seconds_max = 0.0 if config is None else idle_step_seconds_max(config.parallel_config)
        self._layerwise: LayerwiseLoads | None = None  # if a step may read what it loads

    def _load_layers_with(self, loader: LayerLoader | None) -> None:
        """Load layer by layer with this loader, if it knows the layers; called once the caches are registered."""
        if loader is not None and loader.layers is not None:
            self._layerwise = LayerwiseLoads(loader, self._jobs)

    def _take_samples(self) -> Samples:
        """Return the samples since the last call, and now and then the settings of this process."""
        samples = self._jobs.take_samples()
        settings: ProcessSettings | None = getattr(self.spec, "process_settings", None)
        if settings is not None:
            settings.add_to(samples)
        return samples

    @abstractmethod
    def _sides_of(self, job: Any) -> Sides:
        """Return the pair (source, destination) of a job in the metadata."""

    @abstractmethod
    def _store(self, copy_id: int, stores: Sequence[Sides]) -> bool:
        """Submit all stores as one copy. Returns False if the transport refused it: then nothing moves."""

    @abstractmethod
    def _load(self, job_id: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> Submit: ...

    def _start_loads(self, metadata: OffloadingConnectorMetadata) -> None:
        # Taken out of the metadata: it may be seen again in this step, and a job must be launched exactly once.
        load_jobs, metadata.load_jobs = metadata.load_jobs, {}
        for job_id, job in load_jobs.items():
            host, device = self._sides_of(job)
            assert isinstance(device, GPULoadStoreSpec)
            self._jobs.start_load(job_id, job.req_id, device.block_ids, self._load(job_id, host, device))
        if isinstance(metadata, SpillwayConnectorMetadata):
            pieces, metadata.pieces = metadata.pieces, []
            for piece in pieces:
                self._start_piece(piece)

    @override
    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """vLLM's contract, except that a load that cannot be submitted is reported as failed, not asserted on."""
        self._jobs.submit_stores()
        self._start_loads(metadata)
        self._awaits_copies = isinstance(metadata, SpillwayConnectorMetadata) and metadata.awaits_copies

    def start_step_loads(self, metadata: OffloadingConnectorMetadata, forward_context: Any) -> None:
        """Start the loads that the forward itself reads; after :meth:`start_kv_transfers`, before the forward."""
        if self._layerwise is not None and isinstance(metadata, SpillwayConnectorMetadata):
            loads, metadata.step_loads = metadata.step_loads, []
            self._layerwise.start(loads, forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._layerwise is not None:
            self._layerwise.wait_for_layer(layer_name)

    def _end_forward(self) -> None:
        """End the loads of the forward's step, before ended copies are processed."""
        if self._layerwise is not None:
            self._layerwise.end_step()

    def _ended_copies(self) -> list[Any]:
        """Return vLLM's results of the copies that ended since the last call.

        A step that computes nothing waits for the end of a load. Otherwise the engine core plans one empty step after
        another, and on CPUs its processes take the cores from the copy.
        """
        assert self.worker is not None
        results = list(self.worker.get_finished())
        if self._awaits_copies and self._jobs.loads_move:
            until = time.monotonic() + self.idle_step_seconds_max
            while not any(self._jobs.is_load(result.job_id) for result in results) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                results += self.worker.get_finished()
        return results

    @override
    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """vLLM's contract: queue the step's stores, for the start of the next one, behind what sampling copies."""
        store_jobs, metadata.store_jobs = metadata.store_jobs, {}  # taken out, as loads are
        for job_id, job in store_jobs.items():
            self._jobs.queue_store(job_id, self._sides_of(job))

    def _start_piece(self, piece: LoadPiece) -> None:
        copy = None
        if piece.transfer_spec is not None:
            host, device = piece.transfer_spec
            assert isinstance(device, GPULoadStoreSpec)
            copy = device.block_ids, self._load(piece.piece_id, host, device)
        self._jobs.start_piece(
            piece.piece_id, piece.job_id, piece.request_id, copy, last=piece.last, lost_blocks=piece.lost_blocks
        )

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call; call after get_finished, in the same step."""
        return self._jobs.take_invalid_blocks()


def idle_step_seconds_max(parallel: ParallelConfig) -> float:
    """Return how long a step that computes nothing may wait for the end of a load.

    Pipeline stages compute another step meanwhile, and data parallel ranks may step together: theirs waits for none.
    """
    alone = parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1
    return IDLE_STEP_SECONDS_MAX if alone else 0.0


def ended_copy(result: Any) -> EndedCopy:
    """result: vLLM's TransferResult."""
    return EndedCopy(result.job_id, bool(result.success), result.transfer_size, result.transfer_time)
