"""The scheduler half in vLLM 0.30 and later.

vLLM itself flushes the stores of every preempted request there, lets requests that hold blocks go first, tries a failed
load again as a computation, and defers a request whose chunks are still being stored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    _create_req_context,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import context_of
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.scheduler.step_loads import StepLoadingHalf
from spillway_connector.engine.shared_tiers.events import shared_tier_events
from spillway_connector.engine.v030.scheduler_control import SchedulerControlV030
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.plan.sessions import SessionHint

_GROUP_BYTES = 4  # at the end of a key (make_offload_key)


class RequestState(RequestFields):
    """Names of vLLM 0.30 and later."""

    @override
    def _hashes_per_chunk(self, group_config: Any) -> int:
        return int(group_config.hashes_per_chunk)

    @override
    def first_own_chunk(self, group_state: Any) -> int:
        return max(int(group_state.next_stored_chunk_idx), int(group_state.num_hit_chunks))

    @override
    def next_stored_chunk(self, group_state: Any) -> int:
        return int(group_state.next_stored_chunk_idx)


class SpillwayConnectorScheduler(SchedulerHalf):
    """SchedulerHalf with what vLLM 0.30 and later call differently, and do in addition."""

    manager: SpillwayTieringManager

    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        groups = self.config.kv_group_configs
        self._rewinds_no_state = self._mamba_align_size is None and any(
            isinstance(group.kv_cache_spec, MambaSpec) for group in groups
        )
        self._begin(
            settings=getattr(spec, "settings", None),
            vllm_config=vllm_config,
            control=SchedulerControlV030(),
            specs=[group.kv_cache_spec for group in groups],
            chunk_tokens=[group.tokens_per_chunk for group in groups],
            blocks_per_chunk=self.config.blocks_per_chunk,
            one_prefix=len(groups) == 1
            and not self._sliding_window_groups
            and not groups[0].is_eagle_group
            # Events that describe themselves are recorded in vLLM's search.
            and not self._events_tracker.self_describing_enabled,
            loading=self._chunks_being_loaded,
            chooses_windows=self._chooses_windows(),
        )

    def _chooses_windows(self) -> bool:
        """Let one rule choose the chunks of windows and states that are stored; return whether it is Spillway's.

        vLLM 0.32's `prefix_cache_retention_interval` chooses as well. Its default, 0, would leave out those in
        answers, and those where prompts part unless the device holds that point. A number above 0 is the operator's
        choice.
        """
        interval = getattr(self.config, "retention_interval", None)
        if interval == 0:
            self.config = self.config._replace(retention_interval=None)
        return not interval

    @override
    def _state_of(self, request: Request, session: SessionHint | None) -> RequestFields:
        upstream = _create_req_context(request)
        fields = {field.name: getattr(upstream, field.name) for field in dataclasses.fields(upstream) if field.init}
        context = context_of(request, session, **fields)
        return RequestState(
            config=self.config,
            req=request,
            req_context=context,
            offloading_context=self.manager.on_new_request(context),
        )

    @override
    def _unread(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._ask(request, num_computed_tokens, None)  # vLLM keeps the request's state, and offers nothing

    @override
    def _ask(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = OffloadingConnectorScheduler.get_num_new_matched_tokens(
            self, request, num_computed_tokens, max_num_new_tokens
        )
        if not request.skip_reading_prefix_cache:
            self._touch(self._req_status[request.request_id])
        return answer

    @override
    def _look_up_groups(self, req_status: RequestFields, max_num_new_tokens: int | None) -> int | None:
        """vLLM's search over the KV groups.

        vLLM computes at least the last token. Attention can do that behind a whole block; a Mamba state cannot be
        rewound by one token, so for models with states a load ends at the last block boundary before it. vLLM sees
        to that in one of its modes of Mamba caches.
        """
        if self._rewinds_no_state:
            whole = (req_status.req.num_tokens - 1) // self._load_unit_tokens * self._load_unit_tokens
            bound = max(0, whole + 1 - req_status.num_locally_computed_tokens)
            max_num_new_tokens = bound if max_num_new_tokens is None else min(bound, max_num_new_tokens)
        tokens: int | None = OffloadingConnectorScheduler._lookup(self, req_status, max_num_new_tokens)
        return tokens

    @override
    def _maximal_prefix_lookup(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext,
        req: Request,
        group_config: GroupOffloadConfig,
        start_chunk_idx: int,
    ) -> int | None:
        wanted = list(keys)
        found = self.manager.lookup_prefix(wanted, req_context)
        if found and self._events_tracker.self_describing_enabled:
            for position, key in enumerate(wanted[:found]):
                self._events_tracker.record_lookup(req, group_config, start_chunk_idx + position, key)
        return found

    @override
    def _make_boundary_key(
        self, request: Request, group_idx: int, boundary_tokens: int, req_context: ReqContext | None = None
    ) -> OffloadKey:
        """vLLM's contract, with the adapter's identity in the key, as in those of whole chunks."""
        status = self._req_status[request.request_id]
        assert isinstance(status, RequestFields)
        adapter_key = (status.adapter.key or b"") if status.adapter is not None else b""
        block_hash = status.chunk_hashes()[boundary_tokens // self.config.tokens_per_hash - 1]
        return make_offload_key(block_hash + adapter_key, group_idx)

    @override
    def _build_partial_tail_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """vLLM's contract with two differences: a bound of 0 tokens counts as a bound (nothing of the request may
        be stored), and states with which no prefix ends are left out."""
        state = scheduler_output.kv_connector_block_state
        handoffs = (state.boundary_state_offloads if state else None) or {}
        for request_id in list(handoffs):
            status = self._req_status.get(request_id)
            if status is not None and status.max_offload_tokens == 0:
                del handoffs[request_id]
        self._leave_out_states(handoffs)
        jobs: dict[int, TransferJob] = super()._build_partial_tail_store_jobs(scheduler_output)
        return jobs

    def _leave_out_states(self, handed_over: dict[str, list[tuple[int, int, int]]]) -> None:
        """vLLM 0.32 hands states over by themselves, whatever a request's block ids are. handed_over: KV group, block
        and tokens before it, by request."""
        if self.window_stores is None:
            return
        index_of = {group.group_idx: index for index, group in enumerate(self.config.kv_group_configs)}
        for request_id, entries in handed_over.items():
            status = self.known_state(request_id)
            if status is not None:
                entries[:] = [
                    (group, block, tokens)
                    for group, block, tokens in entries
                    if self.window_stores.keeps_state(status, index_of[group], tokens)
                ]

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """vLLM's contract, also if a request is preempted and loads in one step.

        A reset preempts requests between two steps, so the next one may begin a load for one of them and report it as
        preempted as well. vLLM flushes the jobs of such requests and asserts that they are stores.
        """
        preempted = scheduler_output.preempted_req_ids
        if preempted and (loading := {one for one in preempted if self._loads(one)}):
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.preempted_req_ids = preempted - loading
        return super().build_connector_meta(scheduler_output)

    def _loads(self, request_id: str) -> bool:
        """Whether a load of this request is under way; it has no store then."""
        status = self._req_status.get(request_id)
        return status is not None and any(not self._jobs[job_id].is_store for job_id in status.transfer_jobs)

    @override
    def _touch_chunks(self, req_status: RequestFields) -> None:
        """All chunks of attention over the whole prefix; of a window, those that the request's own hit needs, and later
        ones. vLLM 0.32 leaves recency to the CPU tier's policy, which sees requests that finish."""
        for group, state in zip(self.config.kv_group_configs, req_status.group_states, strict=True):
            window = group.sliding_window_size_in_chunks
            skipped = 0 if window is None else max(0, state.num_hit_chunks - window)
            self.manager.touch(state.offload_keys[skipped:] if skipped else state.offload_keys, req_status.req_context)

    @override
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        status = self._req_status.get(request.request_id)
        if isinstance(status, RequestFields):
            self._touch_chunks(status)
        return super().request_finished(request)

    @override
    def _store_job(self, request_id: str, device: LoadStoreSpec, rows: LoadStoreSpec) -> TransferJob:
        return TransferJob(req_id=request_id, src_spec=device, dst_spec=rows)

    @override
    def _load_of(self, job_id: int) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        job = self._current_batch_load_jobs[job_id]
        return job.src_spec, job.dst_spec

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        """vLLM's contract, except that keys are cut to vLLM's block hashes, which vLLM may make numbers of, and
        that the contents of shared tiers and of the node's rows are announced too."""
        events = self._events_tracker.take_events(map(self._cut_keys, self.manager.take_events()))
        if self.manager.primary_tier.news is not None:
            deque(events, maxlen=0)
        else:
            yield from events
        yield from shared_tier_events(self.manager.take_announcements(), self._hash_bytes)

    def _cut_keys(self, event: OffloadingEvent) -> OffloadingEvent:
        usual_bytes, described = self._hash_bytes + _GROUP_BYTES, self._events_tracker._pending_event_metadata
        event.keys = [
            key
            if len(key) == usual_bytes or key in described
            else OffloadKey(key[: self._hash_bytes] + key[-_GROUP_BYTES:])
            for key in event.keys
        ]
        return event

    @override
    def has_pending_push_work(self) -> bool:
        """vLLM's contract: the engine steps on until all copies under way have been reported, including copies from
        before a reset, and while there is work without requests."""
        late = self.late_stores is not None and self.late_stores.under_way
        return late or bool(self._reset_jobs) or super().has_pending_push_work() or self.without_requests.wanted

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SpillwayWorkerMetadata) and meta.samples:
            self.manager.add_of_workers(meta.samples)


class StepLoadingScheduler(StepLoadingHalf, SpillwayConnectorScheduler):
    """StepLoadingHalf with the names of vLLM 0.30 and later."""

    @override
    def _note_load(self, status: RequestFields, computed: int, tokens: int) -> None:
        (state,) = status.group_states
        end, chunk_tokens = computed + tokens, self._chunk_tokens
        if status.offloading_context.policy is OffloadPolicy.CHUNK_LEVEL:
            state.next_stored_chunk_idx = -(-end // chunk_tokens)
        if hasattr(status, "load_key_ranges"):  # of which vLLM 0.32 and later learn which tier served a hit
            chunks = enumerate(self._keys_of(status.req.request_id, computed, tokens), computed // chunk_tokens)
            status.load_key_ranges[:] = [
                (max(computed, at * chunk_tokens), min(end, (at + 1) * chunk_tokens), key) for at, key in chunks
            ]

    @override
    def has_pending_push_work(self) -> bool:
        return bool(self._step_requests) or super().has_pending_push_work()
