"""Control of vLLM 0.23's scheduler: it bounds a step and takes a request out of the batch, for prompts that meet their
load."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from typing_extensions import override
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from spillway_connector.engine.features.meetings import SchedulerControl


class SchedulerControlV023(SchedulerControl):
    @contextmanager
    @override
    def bounded(self, scheduler: Scheduler, tokens: Mapping[str, int]) -> Iterator[None]:
        """Set the bound of all long prompts of the step, because vLLM 0.23 has none for a single prompt."""
        config = scheduler.scheduler_config
        before = config.long_prefill_token_threshold  # 0: none
        config.long_prefill_token_threshold = min(*tokens.values(), before or max(tokens.values()))
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    @override
    def has_room(self, scheduler: Scheduler) -> bool:
        free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free >= scheduler._inflight_prefill_reserved_blocks()

    @override
    def preempt(self, scheduler: Scheduler, request: Request) -> None:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # as in vLLM's own reset
