"""The scheduler half of an engine whose steps may read what they load (layerwise_loads: on).

Such a load differs from vLLM's asynchronous ones in what it is to the scheduler: its request runs in the same step and
may have stores under way beside it, its blocks are in the device's prefix cache from the start, and no request waits
for its end. So it is not among vLLM's jobs; it only pins rows of the CPU tier.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.ipc.messages import SpillwayConnectorMetadata, SpillwayWorkerMetadata, StepLoad
from spillway_connector.engine.manager.early_loads import PendingRows
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.scheduler.resets import ResetJob
from spillway_connector.plan.load_cost import LoadPolicy, RateMeter
from spillway_connector.plan.step_loads import OTHERS_WAIT_MS_MAX, load_within_step, whole_blocks_before_last_token


@dataclass(slots=True)
class _Load:
    """A load within a step, until every rank has reported its end."""

    keys: list[OffloadKey]
    context: ReqContext
    ranks_pending: int


class StepLoadingHalf(SchedulerHalf):
    """SchedulerHalf that plans a load within its request's step if that delays the others little."""

    @override
    def _begin(self, **options: Any) -> None:
        super()._begin(**options)
        self.others_wait_ms_max = OTHERS_WAIT_MS_MAX
        self._load_rate = RateMeter(LoadPolicy().half_life_seconds)  # device blocks a second, of one rank
        self._asked_in_step: str | None = None  # the request that was last offered a load within the step
        self._planned: list[StepLoad] = []  # of the step that is being scheduled
        self._planned_blocks = 0
        self._step_loads: dict[int, _Load] = {}
        # Keyed by load under way, including loads from before a reset.
        self._step_requests: dict[int, str] = {}
        self._step_blocks: dict[int, frozenset[int]] = {}  # of the device

    @abstractmethod
    def _note_load(self, status: RequestFields, computed: int, tokens: int) -> None:
        """Note in vLLM's state of the request that these tokens behind those computed are loaded."""

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Answer as SchedulerHalf does, or (n, False) if the request's step is to load these n tokens itself."""
        self._asked_in_step = None
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if not later or not tokens or request.pooling_params is not None:
            return tokens, later
        within = whole_blocks_before_last_token(num_computed_tokens, tokens, request.num_tokens, self._block_tokens)
        if within and self._may_load_within_step(request, num_computed_tokens, within):
            self._asked_in_step = request.request_id
            return within, False
        return tokens, later

    def _may_load_within_step(self, request: Request, computed: int, tokens: int) -> bool:
        keys = self._keys_of(request.request_id, computed, tokens)
        return self.manager.primary_tier.ready.issuperset(keys) and load_within_step(
            tokens // self._block_tokens,
            self._planned_blocks,
            others=bool(self._planned) or self._any_running(),
            blocks_per_second=self._load_rate.per_second,
            others_wait_ms_max=self.others_wait_ms_max,
        )

    def _any_running(self) -> bool:
        return any(status.req.status is RequestStatus.RUNNING for status in self._req_status.values())

    def _keys_of(self, request_id: str, computed: int, tokens: int) -> list[OffloadKey]:
        """The keys of the chunks that hold these tokens."""
        (state,) = self._req_status[request_id].group_states
        chunk_tokens = self._chunk_tokens
        keys: list[OffloadKey] = state.offload_keys[computed // chunk_tokens : -(-(computed + tokens) // chunk_tokens)]
        return keys

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        within, self._asked_in_step = self._asked_in_step == request.request_id, None
        if not within or not num_external_tokens:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        # vLLM's method is not called: it looks for the first block that is not in the device's prefix cache, and
        # vLLM has entered those of a load within the step already.
        status = self._req_status[request.request_id]
        if status.prefix is not None:
            status.prefix.matched = None  # asked again, it is looked up again
        computed = status.num_locally_computed_tokens
        keys = self._keys_of(request.request_id, computed, num_external_tokens)
        rows = self.manager.prepare_load(keys, status.req_context)
        assert not isinstance(rows, PendingRows), "the chunks were all there when the load was offered"
        self._admitted(request.request_id, num_external_tokens)
        first, count = computed // self._block_tokens, num_external_tokens // self._block_tokens
        device_blocks = [block.block_id for block in blocks.blocks[0][first : first + count]]
        self._current_batch_allocated_block_ids.update(device_blocks)
        self._note_load(status, computed, num_external_tokens)
        job_id = self._generate_job_id()
        device = GPULoadStoreSpec(device_blocks, group_sizes=[count], block_indices=[first])
        self._planned.append(StepLoad(job_id, request.request_id, (rows, device)))
        self._planned_blocks += count
        self._step_loads[job_id] = _Load(keys, status.req_context, self.config.num_workers)
        self._step_requests[job_id] = request.request_id
        self._step_blocks[job_id] = frozenset(device_blocks)

    def loads_within_steps(self, block_ids: Set[int]) -> bool:
        """Whether a load within a step is under way into one of these device blocks."""
        return any(not block_ids.isdisjoint(blocks) for blocks in self._step_blocks.values())

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, OffloadingConnectorMetadata)
        if not scheduler_output.num_scheduled_tokens and self._step_loads:
            # There might be no further step to learn of their end.
            metadata.jobs_to_flush = (metadata.jobs_to_flush or set()) | self._step_loads.keys()
        planned, self._planned, self._planned_blocks = self._planned, [], 0
        if not planned:
            return metadata
        self._prefill_timer.leave_out_step()  # it waits for copies
        pieces = metadata.pieces if isinstance(metadata, SpillwayConnectorMetadata) else []
        return SpillwayConnectorMetadata.of(metadata, pieces, planned)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SpillwayWorkerMetadata):
            self._load_rate.add(meta.loaded_blocks, meta.loading_seconds, time.monotonic())
            for job_id in meta.failed_jobs & self._step_requests.keys():
                meta.failed_jobs.discard(job_id)
                self._recompute(job_id)
            ended = [job_id for job_id in meta.completed_jobs if job_id in self._step_loads]
            for job_id in ended:
                load = self._step_loads[job_id]
                load.ranks_pending -= meta.completed_jobs.pop(job_id)
                if not load.ranks_pending:
                    del self._step_loads[job_id]
                    self.manager.complete_load(load.keys, load.context)
        super().update_connector_output(connector_output)
        for job_id in list(self._step_requests):
            if job_id not in self._step_loads and job_id not in self._reset_jobs:
                del self._step_requests[job_id], self._step_blocks[job_id]

    def _recompute(self, job_id: int) -> None:
        """A load failed within its step. vLLM takes the step back for the requests that hold its blocks; what was to be
        stored since may have been computed with them."""
        status = self._req_status.get(self._step_requests[job_id])
        if status is not None and not status.req.is_finished():
            self._recompute_only.add(status.req.request_id)
        for store_id, job in self._jobs.items():
            if job.is_store and store_id > job_id:
                self.manager.fail_store(job.keys)
        if self.late_stores is not None:
            self.late_stores.lose_all(since=job_id)

    @override
    def copies_under_way(self) -> bool:
        return bool(self._step_loads) or super().copies_under_way()

    @override
    def reset_cache(self) -> None:
        loads = dict(self._step_loads)
        for job_id, load in loads.items():
            rows = self.manager.primary_tier.rows_of(load.keys)
            self._reset_jobs[job_id] = ResetJob(load.ranks_pending, rows)
        self._step_loads.clear()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= loads.keys()
