"""The scheduler half: upstream's, with failures carried through and no request left waiting or asserted on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

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
    asked: tuple[int, int] | None = None  # the tokens computed and in total, when `prefix` was looked up
    prefix: Prefix | None = None
    matched: tuple[int | None, bool] | None = None  # what followed from `prefix` alone

    def update_offload_keys(self) -> None:
        hashes = self.req.block_hashes
        for config, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
            factor = config.hash_block_size_factor
            begin = factor * len(state.offload_keys) + factor - 1
            if begin < len(hashes):
                group = make_offload_key(b"", config.group_idx)
                wanted = hashes[begin::factor] if begin or factor > 1 else hashes
                state.offload_keys += cast(list[OffloadKey], [block_hash + group for block_hash in wanted])


class _Step(NamedTuple):
    begun_at: float  # time.monotonic seconds
    tokens: int


class SpillwayConnectorScheduler(OffloadingConnectorScheduler):
    """Runs in the EngineCore process on the scheduler thread; nothing here may block."""

    manager: SpillwayTieringManager

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self._largest_chunk_tokens = max(group.offloaded_block_size for group in self.config.kv_group_configs)
        self._failed_jobs: set[int] = set()  # some rank failed, others still to answer
        self._recompute_only: set[str] = set()  # requests whose load failed once: never offered a load again
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)  # begun, not yet reported by the workers
        self._last_step_ended_at = 0.0
        self._weights_changed = False

    def on_new_request(self, request: Request) -> None:
        context = TenantContext(
            req_id=request.request_id,
            kv_transfer_params=request.kv_transfer_params,
            tenant=tenant_of(getattr(request, "cache_salt", None)),
        )
        self._req_status[request.request_id] = _RequestState(
            config=self.config,
            req=request,
            req_context=context,
            offloading_context=self.manager.on_new_request(context),
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        status = self._req_status[request.request_id]
        assert isinstance(status, _RequestState)
        prefix = status.prefix
        if (
            prefix is not None
            and status.matched is not None
            and status.asked == (num_computed_tokens, request.num_tokens)
            and (prefix.answer is None or not self._blocks_being_loaded)
            and not status.transfer_jobs
            and not status.group_states[0].block_ids
            and self.manager.last_answer(prefix, status.req_context)
        ):
            # It waits, and nothing has come or gone that its answer rests on.
            if prefix.answer and self.manager.step_time - status.touched_at >= _TOUCH_SECONDS:
                self._touch(status)
            return status.matched
        if request.request_id in self._recompute_only:
            return 0, False
        if status.transfer_jobs:
            # A preempted request comes back while its stores still read its old blocks; upstream asserts that a
            # load never meets a store of the same request. The flush that preemption ordered ends them this step.
            return None, False
        status.matched = None
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not status.counted:
            status.counted = True
            for state in status.group_states:
                self.manager.count_request(state.offload_keys)
        return matched

    def _lookup(self, req_status: RequestOffloadState) -> int | None:
        """Tokens that can be loaded behind those computed; None: ask again. Models with one KV group take the short
        way; with several, upstream's search over the groups decides and asks `_maximal_prefix_lookup` for each."""
        if self._only_last_chunk_missing(req_status):
            return 0
        if len(self._lookup_groups) != 1 or self._sliding_window_groups:
            tokens: int | None = super()._lookup(req_status)
            return tokens
        assert isinstance(req_status, _RequestState)
        computed, total = req_status.num_locally_computed_tokens, req_status.req.num_tokens
        chunk_tokens = self.config.kv_group_configs[0].offloaded_block_size
        all_keys = req_status.group_states[0].offload_keys
        limit = min(total, len(all_keys) * chunk_tokens)
        if limit - computed < chunk_tokens:
            return 0
        first = computed // chunk_tokens
        prefix = req_status.prefix
        known = prefix is not None and req_status.asked == (computed, total)
        if prefix is None or not known or not self.manager.last_answer(prefix, req_status.req_context):
            prefix = self.manager.look_up(all_keys[first : -(-limit // chunk_tokens)], req_status.req_context)
            req_status.prefix, req_status.asked = prefix, (computed, total)
        if not prefix.answer:
            req_status.matched = prefix.answer, False
            return prefix.answer
        found = min(limit, (first + prefix.answer) * chunk_tokens) - computed
        if found < chunk_tokens:
            req_status.matched = 0, False
            return 0
        req_status.matched = found, True  # while none of it is being loaded
        if self._blocks_being_loaded and not self._blocks_being_loaded.isdisjoint(prefix.keys[: prefix.answer]):
            return None  # another request loads some of them right now: its device blocks can soon be shared
        return found

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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._steps.append(_Step(time.monotonic(), scheduler_output.total_num_scheduled_tokens))
        return super().build_connector_meta(scheduler_output)

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
            self._failed_jobs |= meta.failed_jobs
            for job_id, count in meta.completed_jobs.items():
                status = self._jobs.get(job_id)
                if job_id not in self._failed_jobs or status is None or status.pending_count > count:
                    continue
                self._failed_jobs.discard(job_id)
                if status.is_store:
                    # Upstream reports every store as successful; the manager must know before it hears that.
                    self.manager.distrust_store(status.keys)
                else:
                    self._recompute_only.add(status.req_id)
                    request_state = self._req_status.get(status.req_id)
                    if isinstance(request_state, _RequestState):
                        request_state.matched = None
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._recompute_only.discard(request.request_id)
        return super().request_finished(request)

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

    def reset_cache(self) -> None:
        super().reset_cache()
        self._failed_jobs.clear()
        # Upstream drops its jobs but lets requests wait for them: a finished one would stay for ever, a preempted one
        # would never be scheduled again.
        for request_id, status in list(self._req_status.items()):
            status.transfer_jobs.clear()
            if status.req.is_finished():
                del self._req_status[request_id]
