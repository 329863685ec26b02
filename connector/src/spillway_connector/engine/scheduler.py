"""The scheduler half: upstream's, with failures carried through and no request left waiting or asserted on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.worker.worker import TransferSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.adapters import AdapterInstance, AdapterRegistry, adapter_of
from spillway_connector.engine.early_loads import ComingRows, EarlyLoad, LoadPiece, SpillwayConnectorMetadata
from spillway_connector.engine.tenancy import TenantContext, tenant_of
from spillway_connector.engine.tiering import Prefix, SpillwayTieringManager
from spillway_connector.engine.worker import SpillwayWorkerMetadata

logger = logging.getLogger(__name__)

_STEPS_MAX = 64  # vLLM keeps at most a handful of steps in flight
_PREFILL_TOKENS_MIN = 128  # a step below this mostly decodes and says little about prefill


_TOUCH_SECONDS = 1.0  # between two renewals of a request's chunks in the CPU tier


class _RequestState(RequestOffloadState):
    """Upstream's state of a request, whose keys are appended without a loop over those it has."""

    touched_at = float("-inf")  # time.monotonic seconds
    counted = False  # its chunks, for what a full tier admits
    asked_computed = asked_total = -1  # tokens, when `prefix` was looked up
    prefix: Prefix | None = None
    # What followed from `prefix` alone; None again as soon as the request has device blocks.
    matched: tuple[int | None, bool] | None = None
    has_adapter = False  # LoRA
    adapter: AdapterInstance | None = None
    identified = True  # its keys can be said, and have been as far as its tokens go
    _offload_tokens_max: int | None = None

    @property
    def max_offload_tokens(self) -> int | None:
        """None: no cap. Nothing is stored for a request whose adapter is not known."""
        return self._offload_tokens_max if self.identified else 0

    @max_offload_tokens.setter
    def max_offload_tokens(self, tokens: int | None) -> None:
        self._offload_tokens_max = tokens

    def update_offload_keys(self) -> None:
        adapter_key = b""
        if self.has_adapter:
            key = None if self.adapter is None else self.adapter.key
            self.identified = key is not None
            if key is None:
                return
            adapter_key = key
        hashes = self.req.block_hashes
        for config, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            factor = config.hash_block_size_factor
            begin = factor * len(state.offload_keys) + factor - 1
            if begin < len(hashes):
                group = make_offload_key(adapter_key, config.group_idx)
                wanted = hashes[begin::factor] if begin or factor > 1 else hashes
                state.offload_keys += cast(list[OffloadKey], [block_hash + group for block_hash in wanted])


class _Shorter(NamedTuple):
    """As much of a request as upstream's search over the groups reads."""

    request_id: str
    num_tokens: int


@dataclass(slots=True)
class _ForgottenJob:
    """Of a reset, until every rank has reported it."""

    ranks_pending: int
    rows: list[int]  # of the CPU tier, which it may still read or write


class _Step(NamedTuple):
    begun_at: float  # time.monotonic seconds
    tokens: int


class SpillwayConnectorScheduler(OffloadingConnectorScheduler):
    """Runs in the EngineCore process on the scheduler thread; nothing here may block."""

    manager: SpillwayTieringManager

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self._has_states = any(
            isinstance(group.kv_cache_spec, MambaSpec) for group in spec.kv_cache_config.kv_cache_groups
        )
        self._largest_chunk_tokens = max(group.offloaded_block_size for group in self.config.kv_group_configs)
        self._forgotten_jobs: dict[int, _ForgottenJob] = {}
        self._failed_jobs: set[int] = set()  # some rank failed, others still to answer
        self._recompute_only: set[str] = set()  # requests whose load failed once: never offered a load again
        self.device_blocks: BlockPool | None = None  # vLLM's; bound before the first request
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)  # begun, not yet reported by the workers
        self._last_step_ended_at = 0.0
        self._weights_changed = False
        self._early_loads: dict[int, EarlyLoad] = {}
        self._loaded: set[str] = set()  # requests that hold what was loaded for them, and do not run yet
        self._gridlock = False
        self.adapters = AdapterRegistry()
        self._hash_bytes = 0  # of vLLM's block hashes, once there is one
        full_attention_only = len(self._lookup_groups) == 1 and not self._sliding_window_groups
        self.manager.loads_begin_early = full_attention_only and self.config.block_size_factor == 1

    def on_new_request(self, request: Request) -> None:
        context = TenantContext(
            req_id=request.request_id,
            kv_transfer_params=request.kv_transfer_params,
            tenant=tenant_of(getattr(request, "cache_salt", None)),
        )
        status = _RequestState(
            config=self.config,
            req=request,
            req_context=context,
            offloading_context=self.manager.on_new_request(context),
        )
        if getattr(request, "lora_request", None) is not None:
            status.has_adapter, status.identified, status.adapter = True, False, adapter_of(request)
        self._req_status[request.request_id] = status
        if not self._hash_bytes and request.block_hashes:
            self._hash_bytes = len(request.block_hashes[0])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            # It needs what a forward pass over the whole prompt returns (`prompt_logprobs`, pooling over all tokens).
            # vLLM 0.23 honours that for the device's cache, but asks the connector all the same; 0.32 does not.
            return 0, False
        if self._gridlock:
            # vLLM asks about requests without computed tokens: the load of this one failed as a whole, if it had one.
            self._loaded.discard(request.request_id)
            return None, False  # let those pass who have their blocks already
        status = cast(_RequestState, self._req_status[request.request_id])
        if status.has_adapter and (status.adapter is None or status.adapter.key is None):
            return 0, False  # nobody can say whose KV it would be
        matched = status.matched
        if matched is not None:
            manager, prefix = self.manager, status.prefix
            assert prefix is not None
            view = manager.view if manager.looked else manager.look_around()
            if (
                # Most of the time, in one comparison; last_answer says the same.
                (
                    (prefix.stamp == view.stamp and view.now < prefix.good_until)
                    or manager.last_answer(prefix, status.req_context)
                )
                and status.asked_computed == num_computed_tokens
                and status.asked_total == request.num_tokens
                and (not self._blocks_being_loaded or matched[0] is None)
            ):
                # It waits, and nothing has come or gone that its answer rests on.
                if prefix.answer and view.now - status.touched_at >= _TOUCH_SECONDS:
                    self._touch(status)
                return matched
        if request.request_id in self._recompute_only:
            return 0, False
        if status.transfer_jobs:
            # A preempted request comes back while its stores still read its old blocks; upstream asserts that a
            # load never meets a store of the same request. The flush that preemption ordered ends them this step.
            return None, False
        status.matched = None
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not status.counted:
            status.counted = True
            for state in status.group_states:
                self.manager.count_request(state.offload_keys)
        return answer

    def _lookup(self, req_status: RequestOffloadState) -> int | None:
        """Tokens that can be loaded behind those computed; None: ask again. Models with one KV group take the short
        way; with several, upstream's search over the groups decides and asks `_maximal_prefix_lookup` for each."""
        if self._only_last_chunk_missing(req_status):
            return 0
        if len(self._lookup_groups) != 1 or self._sliding_window_groups:
            return self._look_up_groups(req_status)
        assert isinstance(req_status, _RequestState)
        computed, total = req_status.num_locally_computed_tokens, req_status.req.num_tokens
        chunk_tokens = self.config.kv_group_configs[0].offloaded_block_size
        all_keys = req_status.group_states[0].offload_keys
        limit = min(total, len(all_keys) * chunk_tokens)
        if limit - computed < chunk_tokens:
            return 0
        first = computed // chunk_tokens
        prefix = req_status.prefix
        known = req_status.asked_computed == computed and req_status.asked_total == total
        if prefix is None or not known or not self.manager.last_answer(prefix, req_status.req_context):
            prefix = self.manager.look_up(all_keys[first : -(-limit // chunk_tokens)], req_status.req_context)
            req_status.prefix, req_status.asked_computed, req_status.asked_total = prefix, computed, total
        chunks = prefix.answer
        if chunks is None and self.manager.loads_begin_early and self.manager.comes_soon(prefix):
            chunks = prefix.coming
        if not chunks:
            req_status.matched = chunks, False
            return chunks
        found = min(limit, (first + chunks) * chunk_tokens) - computed
        if found < chunk_tokens:
            req_status.matched = prefix.answer and 0, False
            return prefix.answer and 0
        req_status.matched = found, True  # while none of it is being loaded
        if self._blocks_being_loaded and not self._blocks_being_loaded.isdisjoint(prefix.keys[:chunks]):
            return None  # another request loads some of them right now: its device blocks can soon be shared
        return found

    def _look_up_groups(self, req_status: RequestOffloadState) -> int | None:
        """vLLM computes at least the last token. Attention can do that behind a whole block; a state cannot go back
        one token, so where there are states a load ends on a block's end before it."""
        if not self._has_states:
            tokens: int | None = super()._lookup(req_status)
            return tokens
        request = req_status.req
        whole = (request.num_tokens - 1) // self._largest_chunk_tokens * self._largest_chunk_tokens
        req_status.req = cast(Request, _Shorter(request.request_id, whole + 1))
        try:
            tokens = super()._lookup(req_status)
        finally:
            req_status.req = request
        return tokens

    def _only_last_chunk_missing(self, req_status: RequestOffloadState) -> bool:
        """A device hit: vLLM computes at least the last token, so of a prompt that ends on a block the device offers
        all blocks but one. To load that one costs an engine step, and often a wait for its own store.
        """
        computed = req_status.num_locally_computed_tokens
        return computed > 0 and req_status.req.num_tokens - computed <= self._largest_chunk_tokens

    def _maximal_prefix_lookup(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> int | None:
        return self.manager.lookup_prefix(list(keys), req_context)

    def _touch(self, req_status: RequestOffloadState) -> None:
        """Renew the request's chunks, not at every step: a CPU tier whose rows live no longer than that is no use."""
        if isinstance(req_status, _RequestState):
            now = self.manager.step_time
            if now - req_status.touched_at < _TOUCH_SECONDS:
                return
            req_status.touched_at = now
        super()._touch(req_status)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        cast(_RequestState, self._req_status[request.request_id]).matched = None
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens:
            return
        job_id, job = next(reversed(self._current_batch_load_jobs.items()))
        rows, device = job.transfer_spec
        if isinstance(rows, ComingRows):
            assert isinstance(device, GPULoadStoreSpec)
            del self._current_batch_load_jobs[job_id]
            self._jobs[job_id].keys = set()  # what has been pinned for it
            self._early_loads[job_id] = EarlyLoad(
                self._req_status[request.request_id].req_context,
                rows.keys,
                device.block_ids.tolist(),
                device.block_indices[0],
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._steps.append(_Step(time.monotonic(), scheduler_output.total_num_scheduled_tokens))
        self._flush_stores_of_preempted(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        self._loaded.difference_update(scheduler_output.num_scheduled_tokens)
        # vLLM stops at the first request that finds no room. When those behind it hold all blocks, loaded and ready to
        # run, and nobody else computes or copies, none of them would ever move.
        self._gridlock = bool(self._loaded and not scheduler_output.num_scheduled_tokens and not self._jobs)
        metadata = super().build_connector_meta(scheduler_output)
        pieces = self._due_pieces() if self._early_loads else []
        if not pieces:
            return metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        return SpillwayConnectorMetadata(metadata.load_jobs, metadata.store_jobs, metadata.jobs_to_flush, pieces)

    def _flush_stores_of_preempted(self, resumed: AbstractSet[str]) -> None:
        """A reset of the prefix cache preempts requests and tells no connector (vLLM 0.23 names only those preempted
        by `schedule`): their blocks may have new owners in this very step, so their stores must have ended first.

        resumed: the requests that this step has taken up again; they have new blocks already.
        """
        for job_id, job in self._jobs.items():
            if job.is_store and (
                job.req_id in resumed or self._req_status[job.req_id].req.status is RequestStatus.PREEMPTED
            ):
                self._current_batch_jobs_to_flush.add(job_id)

    def _due_pieces(self) -> list[LoadPiece]:
        cpu_tier = self.manager.primary_tier
        pieces: list[LoadPiece] = []
        for job_id, load in list(self._early_loads.items()):
            due = load.due(cpu_tier.ready, cpu_tier.resident)
            if due is None:
                continue
            job = self._jobs.get(job_id)  # None: a reset has forgotten it, the workers have not
            transfer_spec: TransferSpec | None = None
            if due.ready and job is not None:
                keys = [load.keys[position] for position in due.ready]
                rows = cpu_tier.prepare_load(keys, load.context)
                job.keys.update(keys)
                blocks = [load.blocks[position] for position in due.ready]
                transfer_spec = rows, GPULoadStoreSpec(blocks, [len(blocks)], [load.first_block + due.ready[0]])
            lost_blocks = [load.blocks[position] for position in due.lost]
            piece_id = self._generate_job_id()
            pieces.append(LoadPiece(job_id, piece_id, load.context.req_id, transfer_spec, due.last, lost_blocks))
            if job is None and due.last:
                del self._early_loads[job_id]
        return pieces

    def _measure_prefill(self) -> None:
        """Time the step that just ended. Steps overlap under async scheduling: one begins when both have."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), time.monotonic()
        if step.tokens >= _PREFILL_TOKENS_MIN:
            self.manager.prefill_rate.add(step.tokens, now - max(step.begun_at, self._last_step_ended_at), now)
        self._last_step_ended_at = now

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._measure_prefill()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SpillwayWorkerMetadata):
            if meta.adapters:
                self.adapters.loaded_by_workers(meta.adapters)
                self.distrust_replaced_adapters()
            if self._forgotten_jobs:
                self._end_forgotten(meta.completed_jobs)
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
                if status is None:
                    continue  # a reset has forgotten it
                if status.is_store:
                    # Upstream reports every store as successful; the manager must know before it hears that.
                    self.manager.distrust_store(status.keys)
                else:
                    request_state = self._req_status.get(status.req_id)
                    if request_state is not None and not request_state.req.is_finished():
                        self._recompute_only.add(status.req_id)
                        cast(_RequestState, request_state).matched = None
        super().update_connector_output(connector_output)
        if self._early_loads and isinstance(meta, SpillwayWorkerMetadata):
            for job_id in meta.completed_jobs:
                if job_id in self._early_loads and job_id not in self._jobs:
                    load = self._early_loads.pop(job_id)
                    if self._blocks_being_loaded:
                        self._blocks_being_loaded.difference_update(load.keys)

    def _end_forgotten(self, completed_jobs: dict[int, int]) -> None:
        """completed_jobs: by how many ranks each was reported since the last call."""
        for job_id in completed_jobs.keys() & self._forgotten_jobs.keys():
            job = self._forgotten_jobs[job_id]
            job.ranks_pending -= completed_jobs[job_id]
            if not job.ranks_pending:
                del self._forgotten_jobs[job_id]
                self.manager.primary_tier.release(job.rows)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._recompute_only.discard(request.request_id)
        self._loaded.discard(request.request_id)
        if self._early_loads and (status := self._req_status.get(request.request_id)) is not None:
            for job_id in status.transfer_jobs & self._early_loads.keys():
                self._early_loads[job_id].abandon(needed=False)
        return super().request_finished(request)

    def distrust_replaced_adapters(self) -> None:
        """Other weights have been loaded under an adapter's id: stores under way may hold KV computed with these."""
        for job in self._jobs.values():
            adapter = cast(_RequestState, self._req_status[job.req_id]).adapter if job.is_store else None
            if adapter is not None and not adapter.current:
                self.manager.distrust_store(job.keys)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """With vLLM's own block hashes, which is what the device's events have."""
        for event in super().take_events():
            if isinstance(event, BlockStored | BlockRemoved):
                event.block_hashes = [
                    one[: self._hash_bytes] if isinstance(one, bytes) else one for one in event.block_hashes
                ]
            yield event

    def shutdown(self) -> None:
        self.adapters.close()
        super().shutdown()

    def weights_changing(self, cause: str) -> None:
        """The model's weights are about to change: what has been offloaded is of no more use, here or elsewhere.

        Requests that run now hold KV of the old weights, so nothing more of theirs is offloaded.
        """
        if not self._weights_changed:
            logger.warning(
                "%s may change the model's weights: the shared tiers are left alone from now on, because what they "
                "hold was computed with the weights this engine was started with; restart the engine to share again",
                cause,
            )
        self._weights_changed = True
        self.manager.weights_changed()
        self.reset_cache()
        for status in self._req_status.values():
            status.max_offload_tokens = 0

    def reset_with_device(self) -> bool:
        """Forget the CPU tier; False, and nothing has changed, while requests hold blocks of the device.

        vLLM resets the device's prefix cache first and refuses while a block is in use, but asks the connector all the
        same. Those blocks stay cached there, and a load that is under way would add to them: a CPU tier that is empty
        beside them is no reset. So both forget, or neither does.
        """
        if self.device_blocks is not None and (in_use := _blocks_in_use(self.device_blocks)):
            logger.warning(
                "The CPU tier was not reset, like the device's prefix cache: %d blocks are in use; reset again when no "
                "request runs, or with reset_running_requests",
                in_use,
            )
            self.manager.count_refused_reset()
            return False
        self.reset_cache()
        return True

    def reset_cache(self) -> None:
        """Drop every chunk and job. What the workers still copy, they end in their next step; the rows come back as
        each job is reported by all of them."""
        for job_id, job in self._jobs.items():
            rows = self.manager.primary_tier.rows_of(job.keys)
            self._forgotten_jobs[job_id] = _ForgottenJob(job.pending_count, rows)
        # Upstream's asserts that there are none, but those of a reset wait here for the next step.
        jobs_to_flush, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= jobs_to_flush
        self._failed_jobs.clear()
        for load in self._early_loads.values():
            load.abandon(needed=True)
        # Upstream drops its jobs but lets requests wait for them: a finished one would stay for ever, a preempted one
        # would never be scheduled again.
        for request_id, status in list(self._req_status.items()):
            status.transfer_jobs.clear()
            if status.req.is_finished():
                del self._req_status[request_id]


def _blocks_in_use(device_blocks: BlockPool) -> int:
    """What vLLM's own reset counts; the null block is always taken."""
    return device_blocks.num_gpu_blocks - device_blocks.get_num_free_blocks() - 1
