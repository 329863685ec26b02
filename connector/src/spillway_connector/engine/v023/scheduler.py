"""The scheduler half in vLLM 0.23."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingSpec, OffloadKey, OffloadPolicy, ReqContext
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import context_of
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.scheduler.step_loads import StepLoadingHalf
from spillway_connector.engine.v023.scheduler_control import SchedulerControlV023
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.plan.sessions import SessionHint


class RequestState(RequestFields):
    """Names of vLLM 0.23."""

    @override
    def _hashes_per_chunk(self, group_config: Any) -> int:
        return int(group_config.hash_block_size_factor)

    @override
    def first_own_chunk(self, group_state: Any) -> int:
        return max(int(group_state.next_stored_block_idx), int(group_state.num_hit_blocks))

    @override
    def next_stored_chunk(self, group_state: Any) -> int:
        return int(group_state.next_stored_block_idx)


class ShortenedRequest(NamedTuple):
    """The part of a request that vLLM's search over the KV groups reads."""

    request_id: str
    num_tokens: int


class SpillwayConnectorScheduler(SchedulerHalf):
    """SchedulerHalf with what vLLM 0.23 lacks or does wrong."""

    manager: SpillwayTieringManager

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self._has_states = any(
            isinstance(group.kv_cache_spec, MambaSpec) for group in spec.kv_cache_config.kv_cache_groups
        )
        self._begin(
            settings=getattr(spec, "settings", None),
            vllm_config=spec.vllm_config,
            control=SchedulerControlV023(),
            specs=[group.kv_cache_spec for group in spec.kv_cache_config.kv_cache_groups],
            chunk_tokens=[group.offloaded_block_size for group in self.config.kv_group_configs],
            blocks_per_chunk=self.config.block_size_factor,
            one_prefix=len(self._lookup_groups) == 1 and not self._sliding_window_groups,
            loading=self._blocks_being_loaded,
        )

    @override
    def _state_of(self, request: Request, session: SessionHint | None) -> RequestFields:
        context = context_of(request, session, req_id=request.request_id, kv_transfer_params=request.kv_transfer_params)
        return RequestState(
            config=self.config,
            req=request,
            req_context=context,
            offloading_context=self.manager.on_new_request(context),
        )

    @override
    def _unread(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False  # vLLM's half would offer a load, which 0.23 would run

    @override
    def _ask(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = OffloadingConnectorScheduler.get_num_new_matched_tokens(
            self, request, num_computed_tokens
        )
        return answer

    @override
    def _look_up_groups(self, req_status: RequestFields, max_num_new_tokens: int | None) -> int | None:
        """vLLM's search over the KV groups.

        vLLM computes at least the last token. Attention can do that behind a whole block; a Mamba state cannot be
        rewound by one token, so for models with states a load ends at the last block boundary before it.
        """
        request, ends = req_status.req, []
        if self._has_states:
            ends.append((request.num_tokens - 1) // self._load_unit_tokens * self._load_unit_tokens + 1)
        if max_num_new_tokens is not None:
            ends.append(req_status.num_locally_computed_tokens + max_num_new_tokens)
        if not ends:
            found: int | None = OffloadingConnectorScheduler._lookup(self, req_status)
            return found
        shortened = ShortenedRequest(request.request_id, min(request.num_tokens, *ends))
        req_status.req = cast(Request, shortened)
        try:
            tokens: int | None = OffloadingConnectorScheduler._lookup(self, req_status)
        finally:
            req_status.req = request
        return tokens

    @override
    def _maximal_prefix_lookup(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> int | None:
        return self.manager.lookup_prefix(list(keys), req_context)

    @override
    def _touch_chunks(self, req_status: RequestFields) -> None:
        OffloadingConnectorScheduler._touch(self, req_status)

    @override
    def _store_job(self, request_id: str, device: LoadStoreSpec, rows: LoadStoreSpec) -> TransferJob:
        return TransferJob(req_id=request_id, transfer_spec=(device, rows))

    @override
    def _load_of(self, job_id: int) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        spec: tuple[LoadStoreSpec, LoadStoreSpec] = self._current_batch_load_jobs[job_id].transfer_spec
        return spec

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._flush_stores_of_preempted(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return super().build_connector_meta(scheduler_output)

    def _flush_stores_of_preempted(self, resumed: AbstractSet[str]) -> None:
        """Flush stores of requests that a reset of the prefix cache preempted.

        vLLM 0.23 reports to the connector only requests preempted by `schedule`. After a reset, their blocks may be
        allocated to others in this very step, so their stores must end first.

        resumed: ids of requests that this step has resumed; they have new blocks already.
        """
        for job_id, job in self._jobs.items():
            if job.is_store and (
                job.req_id in resumed or self._req_status[job.req_id].req.status is RequestStatus.PREEMPTED
            ):
                self._current_batch_jobs_to_flush.add(job_id)

    @override
    def reset_cache(self) -> None:
        super().reset_cache()
        # vLLM drops its jobs but not the requests' references to them: a finished request would never be removed, a
        # preempted one never scheduled again.
        for request_id, status in list(self._req_status.items()):
            status.transfer_jobs.clear()
            if status.req.is_finished():
                del self._req_status[request_id]


class StepLoadingScheduler(StepLoadingHalf, SpillwayConnectorScheduler):
    """StepLoadingHalf with the names of vLLM 0.23."""

    @override
    def _note_load(self, status: RequestFields, computed: int, tokens: int) -> None:
        (state,) = status.group_states
        if status.offloading_context.policy is OffloadPolicy.BLOCK_LEVEL:
            state.next_stored_block_idx = -(-(computed + tokens) // self._chunk_tokens)
