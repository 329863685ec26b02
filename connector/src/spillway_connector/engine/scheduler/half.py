"""The scheduler half of the connector: vLLM's, except that it handles failed jobs and never waits without a bound.

vLLM's class has the same duties in every generation, but its names differ. Each generation's room completes this class.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.features.ahead import AheadPromotions
from spillway_connector.engine.features.fair_steps import FairSteps
from spillway_connector.engine.features.feature import Feature, feature_of
from spillway_connector.engine.features.late_stores import LateStores
from spillway_connector.engine.features.meetings import Meetings, SchedulerControl
from spillway_connector.engine.features.queue_order import QueueOrder
from spillway_connector.engine.features.window_stores import WindowStores, group_names
from spillway_connector.engine.ipc.messages import SpillwayConnectorMetadata, SpillwayWorkerMetadata
from spillway_connector.engine.manager.early_loads import EarlyLoad, EarlyLoads, PendingRows
from spillway_connector.engine.namespace.adapters import AdapterRegistry, adapter_of, lora_mixes_weights
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import hands_over, session_of
from spillway_connector.engine.requests.transfer_params import accepted
from spillway_connector.engine.scheduler.chunk_uses import ChunkUses
from spillway_connector.engine.scheduler.partial_chunks import PartialChunks, load_unit_tokens, whole_chunks
from spillway_connector.engine.scheduler.resets import ResettableHalf
from spillway_connector.engine.scheduler.settling import HAND_OVER_SECONDS, StepsWithoutRequests
from spillway_connector.engine.scheduler.suspect_stores import blocks_of, fail_stores, has_replaced_adapter, holds_any
from spillway_connector.engine.scheduler.waiting import WaitingRequests
from spillway_connector.engine.scheduler.written_blocks import next_step_blocks, written_blocks
from spillway_connector.engine.shared_tiers.events import shared_tier_events
from spillway_connector.plan.conversations import Conversations
from spillway_connector.plan.leaving import LeavingWindow
from spillway_connector.plan.load_cost import PrefillTimer
from spillway_connector.plan.sessions import SessionHint

_BLOCK_ID = attrgetter("block_id")
_TOUCH_SECONDS = 1.0  # between two renewals of a request's chunks in the CPU tier


class SchedulerHalf(ResettableHalf):
    """vLLM's scheduler half with methods replaced. EngineCore process, scheduler thread; no method blocks.

    Every override keeps the contract of vLLM's KVConnectorBase_V1 unless its docstring names a difference.
    """

    def _begin(
        self,
        *,
        settings: ConnectorConfig | None,
        vllm_config: VllmConfig,
        control: SchedulerControl,
        specs: list[KVCacheSpec],
        chunk_tokens: list[int],
        blocks_per_chunk: int,
        one_prefix: bool,
        loading: set[OffloadKey] | None,
        chooses_windows: bool = True,
    ) -> None:
        """Complete the construction after vLLM's constructor.

        Args:
            settings: None if vLLM's spec is not Spillway's, as in vLLM's own tests.
            control: How this generation's scheduler computes and loads a prompt at the same time.
            specs: The spec of a layer of each KV group.
            chunk_tokens: The tokens of a chunk, by KV group.
            blocks_per_chunk: The device blocks of a chunk.
            one_prefix: Whether one lookup of a prefix answers for the model: attention reads all of its one KV group.
            loading: vLLM's set of chunks that are being loaded to the device; None without a prefix cache there.
            chooses_windows: Whether Spillway, instead of vLLM, chooses which chunks of sliding windows are stored.
        """
        self._chunk_tokens, self._largest_chunk_tokens = chunk_tokens[0], max(chunk_tokens)
        self._load_unit_tokens = load_unit_tokens(specs, chunk_tokens)
        self._block_tokens = chunk_tokens[0] // blocks_per_chunk
        self._one_prefix = one_prefix
        self._being_loaded = loading
        self._begin_resets(has_device_cache=loading is not None)
        self._failed_jobs: set[int] = set()  # failed on some rank, not yet reported by all
        self._recompute_only: set[str] = set()  # requests whose load failed once: never offered a load again
        self._prefill_timer = PrefillTimer(self.manager.prefill_rate)
        self._early_loads = EarlyLoads(self.manager.primary_tier, self._generate_job_id)
        self._loaded: set[str] = set()  # requests whose load has ended and that do not run yet
        self._gridlock = False
        self.adapters = AdapterRegistry()
        self._conversations = Conversations()
        self._uses = ChunkUses(self.manager, chunk_tokens)
        self._hash_bytes = 0  # of vLLM's block hashes, once there is one
        self._step_tokens = step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.window_stores: WindowStores | None = None
        if chooses_windows and (settings is None or settings.window_chunks == "last"):
            drafts = vllm_config.speculative_config is not None
            self.window_stores = WindowStores.of(specs, chunk_tokens, blocks_per_chunk, step_tokens, drafts=drafts)
        self._partial_chunks = PartialChunks.of(specs, chunk_tokens, blocks_per_chunk)
        self._stores_adapters_alone = lora_mixes_weights(vllm_config)
        self.chunk_tokens, self.blocks_per_chunk = chunk_tokens[0], blocks_per_chunk
        self.without_requests = StepsWithoutRequests(
            self.manager, self._copying_chunks, lambda: 0 if self.late_stores is None else self.late_stores.alone
        )
        rows_max = self.manager.ahead_rows_max if one_prefix else 0
        self.ahead = AheadPromotions(self.manager, self, rows_max=rows_max, blocks_per_chunk=blocks_per_chunk)
        self.features: list[Feature] = [self.ahead, WaitingRequests(self.manager, self.known_state)]
        self.late_stores: LateStores | None = None
        self.meetings: Meetings | None = None
        one_block = one_prefix and blocks_per_chunk == 1  # a chunk's key is the hash of a block on the device
        if settings is not None:
            if one_block and loading is not None:
                half_of_rows = self.manager.primary_tier.free_rows() // 2  # of a tier that holds nothing yet
                window = LeavingWindow(-(-step_tokens // self._block_tokens), half_of_rows)
                self.late_stores = LateStores.wanted(self.manager, settings, window, ranks=self.config.num_workers)
            if settings.queue_order == "prefix" and one_prefix:
                self.features.append(QueueOrder(self, settings.queue_overtake_seconds))
            if settings.fair_steps == "on":
                self.features.append(FairSteps(self.known_state, step_tokens))
            # Without a prefix cache on the device, a preempted request finds no block there.
            if settings.compute_while_loading == "on" and one_prefix and loading is not None:
                self.meetings = Meetings(self.manager, control, self._prefill_timer, self._chunk_tokens)
                self.features.append(self.meetings)
        self._storing = "eager" if settings is None or self.late_stores is None else settings.storing
        groups = group_names([group.group_idx for group in self.config.kv_group_configs], specs)
        self.manager.serve_half(loads_begin_early=one_block, late_stores=self.late_stores, kv_groups=groups)

    def settings(self) -> dict[str, object]:
        """The settings that this half and its manager use, by name."""
        generated_tokens = "off" if self.config.offload_prompt_only else "on"
        return {
            **self.manager.settings(),
            "generated_tokens": generated_tokens if self.manager.answers is None else "auto",
            "storing": self._storing,
            "queue_order": "arrival" if feature_of(self.features, QueueOrder) is None else "prefix",
            "fair_steps": "off" if feature_of(self.features, FairSteps) is None else "on",
            "window_chunks": "all" if self.window_stores is None else "last",
        }

    def _copying_chunks(self) -> int:
        stores = sum(len(job.keys) for job in self._jobs.values() if job.is_store)
        return stores + (0 if self.late_stores is None else self.late_stores.copying)

    def known_state(self, request_id: str) -> RequestFields | None:
        """Return the state of a request that vLLM has announced and that has not ended, or None."""
        status = self._req_status.get(request_id)
        return status if isinstance(status, RequestFields) else None

    @abstractmethod
    def _state_of(self, request: Request, session: SessionHint | None) -> RequestFields:
        """Make the state of a new request, of this generation's class, and announce the request to the manager."""

    @abstractmethod
    def _unread(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer for a request that asked to skip the prefix cache."""

    @abstractmethod
    def _ask(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None
    ) -> tuple[int | None, bool]:
        """Return vLLM's answer, which calls `_lookup`."""

    @abstractmethod
    def _look_up_groups(self, req_status: RequestFields, max_num_new_tokens: int | None) -> int | None:
        """Run vLLM's search over the KV groups, which asks the manager about each."""

    @abstractmethod
    def _touch_chunks(self, req_status: RequestFields) -> None:
        """Mark the request's chunks as recently used."""

    @abstractmethod
    def _store_job(self, request_id: str, device: LoadStoreSpec, rows: LoadStoreSpec) -> Any:
        """Make the metadata of a store."""

    @abstractmethod
    def _load_of(self, job_id: int) -> tuple[LoadStoreSpec, LoadStoreSpec]:
        """Return source and destination of a load of this step."""

    @override
    def on_new_request(self, request: Request) -> None:
        given, request.kv_transfer_params = request.kv_transfer_params, accepted(request.kv_transfer_params)
        session = session_of(request.kv_transfer_params) or self._conversations.session_of(request.block_hashes)
        status = self._state_of(request, session)
        if isinstance(given, dict):
            request.kv_transfer_params = given  # what other connectors of this engine read
        if getattr(request, "lora_request", None) is not None:
            status.has_adapter, status.identified, status.adapter = True, False, adapter_of(request)
        elif self._stores_adapters_alone:
            status.is_unsound = True
        status.is_stale = self._device_is_stale
        self._req_status[request.request_id] = status
        if not self._hash_bytes and request.block_hashes:
            self._hash_bytes = len(request.block_hashes[0])
        for feature in self.features:
            feature.came(status)

    def prefix_expected(self, request: Request, hashing_seconds: float) -> None:
        """Take a hint (engine/features/hints.py). Its request is in no queue, and may never come."""
        self.ahead.expect(self._state_of(request, session_of(request.kv_transfer_params)), hashing_seconds)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """vLLM's contract: (tokens that can be loaded behind those computed, or None: ask again; asynchronously).

        Unlike in vLLM, nothing is offered to a request that asked to skip the prefix cache, whose adapter's digest is
        unknown, or whose load has failed before; and while a waiting request's answer is current it is not looked up.
        """
        meetings = self.meetings
        if meetings is not None:
            if request.skip_reading_prefix_cache or request.request_id in self._recompute_only:  # it loads nothing
                meetings = None
            else:
                meetings.consider(request)
        status = self._req_status[request.request_id]
        prefix, answer = status.prefix, None
        if prefix is not None and prefix.matched is not None and max_num_new_tokens is None:  # its turn has come
            memo, step = self.manager.memo, self.manager.step or self.manager.begin_step()
            if (
                prefix.computed_tokens == num_computed_tokens
                and prefix.total_tokens == request.num_tokens
                # Most of the time one comparison: is_current's first two, without the call.
                and (
                    (prefix.stamp == memo.stamp and step.now < prefix.valid_until)
                    or memo.is_current(prefix, request.request_id, step)
                )
                and (not self._being_loaded or prefix.matched[0] is None)
                and not (status.has_adapter and (status.adapter is None or status.adapter.key is None))
                and not self._gridlock
            ):
                status.num_locally_computed_tokens = num_computed_tokens
                if prefix.chunks and step.now - status.touched_at >= _TOUCH_SECONDS:
                    self._touch(status)
                answer = prefix.matched
        if answer is None:
            answer = self._look_up(request, status, num_computed_tokens, max_num_new_tokens)
        if meetings is not None and answer[0] is not None:
            keys = status.group_states[0].offload_keys[: request.num_tokens // self._chunk_tokens]
            if meetings.keeps_waiting(request, status.req_context, keys, num_computed_tokens + answer[0]):
                return None, False
        return answer

    def _look_up(
        self, request: Request, status: RequestFields, num_computed_tokens: int, max_num_new_tokens: int | None
    ) -> tuple[int | None, bool]:
        """Answer a request that has no current answer."""
        if request.request_id in self.ahead.waiting:
            self.ahead.turn_came(status)
        if request.skip_reading_prefix_cache:
            # It needs a forward pass over the whole prompt (`prompt_logprobs`, pooling over all tokens). vLLM skips the
            # device's prefix cache for it, but asks the connector nevertheless.
            return self._unread(request, num_computed_tokens)
        if self._gridlock:
            # vLLM asks about requests without computed tokens: a load of this one, if any, failed as a whole.
            self._loaded.discard(request.request_id)
            return None, False  # requests that hold their blocks already go first
        status.num_locally_computed_tokens = num_computed_tokens
        if status.has_adapter and (status.adapter is None or status.adapter.key is None):
            return 0, False  # without the adapter's digest there are no keys
        if request.request_id in self._recompute_only:
            return 0, False
        if status.transfer_jobs:
            # A preempted request is scheduled again while its stores still read its old blocks; vLLM asserts that
            # a request never has a load and a store at once. The flush of its preemption ends the stores this step.
            return None, False
        if status.prefix is not None:
            status.prefix.matched = None
        answer = self._ask(request, num_computed_tokens, max_num_new_tokens)
        if status.counted_keys is None:
            self._uses.begin(status)
            self._follow_answers()
        return answer

    def _follow_answers(self) -> None:
        answers, config = self.manager.answers, self.config
        if answers is not None and answers.keeps is config.offload_prompt_only:
            self.config = config._replace(offload_prompt_only=self._uses.prompt_only(config.offload_prompt_only))

    @override
    def _lookup(self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None) -> int | None:
        """vLLM's contract: tokens that can be loaded behind those computed; None: ask again.

        Models with one KV group need one lookup of a prefix; with several, vLLM's search over the groups calls
        `_maximal_prefix_lookup` for each.
        """
        assert isinstance(req_status, RequestFields)
        if req_status.lacks_only_last_chunk(self._largest_chunk_tokens):
            return 0
        if not self._one_prefix or max_num_new_tokens is not None or req_status.max_load_tokens is not None:
            return whole_chunks(self._look_up_groups, req_status, max_num_new_tokens, self._load_unit_tokens)
        computed, total = req_status.num_locally_computed_tokens, req_status.req.num_tokens
        chunk_tokens, all_keys = self._chunk_tokens, req_status.group_states[0].offload_keys
        limit = min(total, len(all_keys) * chunk_tokens)
        if limit - computed < chunk_tokens:
            return 0
        manager, prefix, first = self.manager, req_status.prefix, computed // chunk_tokens
        step = manager.step or manager.begin_step()
        if (
            prefix is None
            or prefix.computed_tokens != computed
            or prefix.total_tokens != total
            or not manager.memo.is_current(prefix, req_status.req_context.req_id, step)
        ):
            prefix = manager.find_prefix(all_keys[first : -(-limit // chunk_tokens)], req_status.req_context, step)
            req_status.prefix, prefix.computed_tokens, prefix.total_tokens = prefix, computed, total
        chunks = prefix.chunks
        if chunks is None and manager.loads_begin_early and manager.may_begin_load(prefix):
            chunks = prefix.expected
        if not chunks:
            prefix.matched = chunks, False
            return chunks
        found = min(limit, (first + chunks) * chunk_tokens) - computed
        if found < chunk_tokens:
            prefix.matched = prefix.chunks and 0, False
            return prefix.chunks and 0
        prefix.matched = found, True  # unless another request is loading some of it
        if self._being_loaded and not self._being_loaded.isdisjoint(prefix.keys[:chunks]):
            return None  # another request is loading some of them: its device blocks can soon be shared
        return found

    def _touch(self, req_status: RequestOffloadState) -> None:
        """Mark the request's chunks as recently used, at most once per _TOUCH_SECONDS."""
        assert isinstance(req_status, RequestFields)
        if (now := self.manager.step_time) - req_status.touched_at >= _TOUCH_SECONDS:
            req_status.touched_at = now
            self._touch_chunks(req_status)

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM's contract; a load whose chunks are not all ready becomes an EarlyLoad instead of a job's spec."""
        if (prefix := self._req_status[request.request_id].prefix) is not None:
            prefix.matched = None
        written, self._current_batch_allocated_block_ids = self._current_batch_allocated_block_ids, set()
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._one_prefix:  # the blocks before those that it loads, or computes, are only read
            found = self._req_status[request.request_id].num_locally_computed_tokens // self._block_tokens
            own = blocks.blocks[self.config.kv_group_configs[0].group_idx][found:]
            written.update(map(_BLOCK_ID, own))
        else:
            written |= self._current_batch_allocated_block_ids
        self._current_batch_allocated_block_ids = written
        self._admitted(request.request_id, num_external_tokens)
        if not num_external_tokens:
            return
        job_id = next(reversed(self._current_batch_load_jobs))
        rows, device = self._load_of(job_id)
        if isinstance(rows, PendingRows):
            assert isinstance(device, GPULoadStoreSpec)
            del self._current_batch_load_jobs[job_id]
            self._jobs[job_id].keys = set()  # nothing is pinned for it yet
            context = self._req_status[request.request_id].req_context
            load = EarlyLoad(context, rows.keys, device.block_ids.tolist(), device.block_indices[0])
            self._early_loads.begin(job_id, load)

    def _admitted(self, request_id: str, loaded_tokens: int) -> None:
        for feature in self.features:
            feature.admitted(request_id, loaded_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._prefill_timer.begin_step(scheduler_output.total_num_scheduled_tokens, time.monotonic())
        self._loaded.difference_update(scheduler_output.num_scheduled_tokens)
        # Head-of-line blocking: vLLM stops at the first waiting request that finds no free blocks. When requests behind
        # it hold all blocks, loaded and ready to run, and nothing computes or copies, none of them would be scheduled.
        self._gridlock = bool(self._loaded and not scheduler_output.num_scheduled_tokens and not self._jobs)
        for feature in self.features:
            feature.end_step(scheduler_output)
        if self.late_stores is not None:
            self.late_stores.scheduled(scheduler_output, self.known_state, self._chunk_tokens)
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, OffloadingConnectorMetadata)
        if self.late_stores is not None:
            needed = next_step_blocks(scheduler_output, self.known_state, self._step_tokens, self._block_tokens)
            room = self.without_requests.room()
            for store in self.late_stores.due(self._generate_job_id, needed_blocks=needed, settling=room):
                device = GPULoadStoreSpec(store.blocks, [len(store.blocks)], [0])
                metadata.store_jobs[store.job_id] = self._store_job(store.context.req_id, device, store.rows)
        pieces = self._early_loads.due(self._jobs) if self._early_loads.loads else []
        idle = bool(self._jobs) and not scheduler_output.num_scheduled_tokens and not self._early_loads.loads
        return SpillwayConnectorMetadata.of(metadata, pieces, awaits_copies=idle) if pieces or idle else metadata

    @override
    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM's contract, except that only stores of blocks that this step writes to are flushed."""
        narrow = self._one_prefix and bool(self._block_id_to_pending_jobs)
        loaded = set(self._current_batch_allocated_block_ids) if narrow else set()
        super()._update_req_states(scheduler_output)
        if narrow:
            written = written_blocks(scheduler_output, self.config.kv_group_configs[0].group_idx, self._block_tokens)
            self._current_batch_allocated_block_ids = loaded | written
        if self.window_stores is not None:
            self.window_stores.leave_out(map(self.known_state, scheduler_output.num_scheduled_tokens), self.manager)
        if self._partial_chunks is not None:
            self._partial_chunks.leave_out(self.known_state, scheduler_output)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """vLLM's contract, but a failed store is not published, and a failed load's request never loads again."""
        self._prefill_timer.end_step(time.monotonic())
        meta, invalid = connector_output.kv_connector_worker_meta, connector_output.invalid_block_ids
        if meta is None and not invalid:
            return  # in most steps of decoding
        if invalid:
            suspect = holds_any(invalid)
            fail_stores(self, suspect)
            if self.late_stores is not None:
                self.late_stores.lose(invalid.union(blocks_of(filter(suspect, self._req_status.values()))))
        if isinstance(meta, SpillwayWorkerMetadata):
            if self.late_stores is not None:
                self.late_stores.ended(meta.completed_jobs, meta.failed_jobs)
            if meta.adapters:
                self.adapters.loaded_by_workers(meta.adapters)
                self.fail_stores_of_replaced_adapters()
            if self._reset_jobs:
                self._end_reset_jobs(meta.completed_jobs)
            self._failed_jobs |= meta.failed_jobs
            for job_id, count in meta.completed_jobs.items():
                status = self._jobs.get(job_id)
                if (
                    status is not None
                    and not status.is_store
                    and status.pending_count <= count
                    and not self._req_status[status.req_id].req.is_finished()
                ):
                    self._loaded.add(status.req_id)
                if job_id not in self._failed_jobs or (status is not None and status.pending_count > count):
                    continue
                self._failed_jobs.discard(job_id)
                if status is not None and status.is_store:
                    # vLLM completes every store as successful, so the manager is informed first.
                    self.manager.fail_store(status.keys)
                elif status is not None:  # else a reset has dropped it
                    state = self._req_status.get(status.req_id)
                    if state is not None and not state.req.is_finished():
                        self._recompute_only.add(status.req_id)
                        if (prefix := state.prefix) is not None:
                            prefix.matched = None
        if isinstance(meta, SpillwayWorkerMetadata) and meta.completed_jobs:
            with self.manager.primary_tier.together():
                super().update_connector_output(connector_output)
            for keys in self._early_loads.ended(meta.completed_jobs, self._jobs):
                if self._being_loaded:
                    self._being_loaded.difference_update(keys)
        else:
            super().update_connector_output(connector_output)

    @override
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._recompute_only.discard(request.request_id)
        self._loaded.discard(request.request_id)
        for feature in self.features:
            feature.ended(request.request_id)
        status = self._req_status.get(request.request_id)
        if self.late_stores is not None and status is not None:
            (state,) = status.group_states
            self.late_stores.ending(state.offload_keys, state.block_ids)
        if status is not None and hands_over(status.req_context):
            self.without_requests.settle(HAND_OVER_SECONDS)
        if self._early_loads.loads and status is not None:
            self._early_loads.abandon(status.transfer_jobs)
        if isinstance(status, RequestFields) and status.counted_keys is not None:
            self._uses.end(status, prompt_only=self.config.offload_prompt_only)
            self._follow_answers()
        return super().request_finished(request)

    def fail_stores_of_replaced_adapters(self) -> None:
        """Fail stores that may hold KV computed with other weights, because they were loaded under the id of a store's
        adapter."""
        fail_stores(self, has_replaced_adapter)

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        """vLLM's contract, but keys are cut to vLLM's block hashes, and what engines share is announced too."""
        size = self._hash_bytes
        for event in super().take_events():
            if isinstance(event, BlockStored | BlockRemoved):
                event.block_hashes = [one[:size] if isinstance(one, bytes) else one for one in event.block_hashes]
            if self.manager.primary_tier.news is None:
                yield event
        yield from shared_tier_events(self.manager.take_announcements(), self._hash_bytes)

    @override
    def shutdown(self) -> None:
        self.adapters.close()
        super().shutdown()
