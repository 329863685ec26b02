"""Messages of a step between the two halves of the connector, beyond vLLM's own.

All of it is plain picklable data: with several ranks it crosses processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from spillway_connector.engine.ipc.samples import Samples


@dataclass(slots=True)
class LoadPiece:
    """A part of load `job_id`; the job ends when `last` has been seen and every piece has ended.

    piece_id: a job id of its own. transfer_spec: (source, destination); None if there is nothing (more) to copy.
    lost_blocks: device blocks of the job that will not be filled.
    """

    job_id: int
    piece_id: int
    request_id: str
    transfer_spec: tuple[LoadStoreSpec, LoadStoreSpec] | None
    last: bool
    lost_blocks: list[int]


@dataclass(slots=True)
class StepLoad:
    """A load that the step itself reads, layer by layer. transfer_spec: (source, destination)."""

    job_id: int
    request_id: str
    transfer_spec: tuple[LoadStoreSpec, LoadStoreSpec]


@dataclass
class SpillwayConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler to workers: metadata of a step that sends pieces, loads what it reads, or waits for copies.

    awaits_copies: the step computes nothing, and copies to the device are all that the engine waits for.
    """

    pieces: list[LoadPiece] = field(default_factory=list)
    step_loads: list[StepLoad] = field(default_factory=list)
    awaits_copies: bool = False

    @classmethod
    def of(cls, metadata: OffloadingConnectorMetadata, *own: Any, **more: Any) -> SpillwayConnectorMetadata:
        """Return the jobs of vLLM's metadata with fields of this class's own."""
        return cls(metadata.load_jobs, metadata.store_jobs, metadata.jobs_to_flush, *own, **more)


@dataclass
class SpillwayWorkerMetadata(OffloadingWorkerMetadata):
    """The ranks' report to the scheduler: jobs that ended, and those of them that failed.

    A load within a step is reported as failed in that step, even while some of its copies still move.
    """

    failed_jobs: set[int] = field(default_factory=set)
    # LoRA adapters that were loaded within the step, by id: the state of their files, several if ranks disagree.
    adapters: dict[int, frozenset[bytes | None]] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)  # since 0.30, which takes no statistics from workers
    loaded_blocks: int = 0  # of the device, added up over the ranks
    loading_seconds: float = 0.0  # that copying them took, added up over the ranks

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """A job has failed when any rank's part of it has."""
        assert isinstance(other, SpillwayWorkerMetadata)
        adapters = dict(self.adapters)
        for lora_int_id, states in other.adapters.items():
            adapters[lora_int_id] = adapters.get(lora_int_id, frozenset()) | states
        samples = Samples()
        samples.merge(self.samples.samples())
        samples.merge(other.samples.samples())
        # vLLM's own fields, of which later versions have more, are added up by vLLM.
        added_up = vars(super().aggregate(other))
        failed_jobs = self.failed_jobs | other.failed_jobs
        return SpillwayWorkerMetadata(
            **added_up,
            failed_jobs=failed_jobs,
            adapters=adapters,
            samples=samples,
            loaded_blocks=self.loaded_blocks + other.loaded_blocks,
            loading_seconds=self.loading_seconds + other.loading_seconds,
        )
