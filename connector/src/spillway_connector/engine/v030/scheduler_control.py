"""Control of the scheduler of vLLM 0.30 and later: it bounds a step and takes a request out of the batch, for prompts
that meet their load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from spillway_connector.engine.features.meetings import SchedulerControl
from spillway_connector.engine.patches.patching import replaced_on


class SchedulerControlV030(SchedulerControl):
    @contextmanager
    @override
    def bounded(self, scheduler: Scheduler, tokens: Mapping[str, int]) -> Iterator[None]:
        """Bounds a step by the method with which vLLM decides last how much of each prompt a step computes. The bound
        for long prompts does not hold for a request that is alone there, and may be raised to a fair share of the
        step."""
        inner: Any = scheduler._reserve_prefill_lookahead

        def reserve(request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
            most = tokens.get(request.request_id)
            tokens_now: int = inner(request, num_computed_tokens, min(num_new_tokens, most or num_new_tokens))
            # None: too short a part for vLLM, which would not schedule the request at all.
            return tokens_now or int(inner(request, num_computed_tokens, num_new_tokens))

        with replaced_on(scheduler, "_reserve_prefill_lookahead", reserve):
            yield

    @override
    def has_room(self, scheduler: Scheduler) -> bool:
        manager = scheduler.kv_cache_manager
        free: int = manager.block_pool.get_num_free_blocks()
        # For a preempted request vLLM keeps more blocks free than for a running one: for drafts and as headroom. Its
        # last, partly filled block may be handed back only when the step under way has ended.
        more: int = manager.watermark_blocks + getattr(scheduler, "_spec_decode_step_blocks", 0) + 1  # 0.32 alone
        return free >= scheduler._inflight_prefill_reserved_blocks() + more

    @override
    def preempt(self, scheduler: Scheduler, request: Request) -> None:
        scheduler.running.remove(request)
        # A prefill has no output on its way to the client. vLLM would let the request wait for it, or count it twice.
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # as in vLLM's own reset
