"""Taking a step back for the requests that computed with blocks whose load had failed.

vLLM 0.23 shortens such a request to the blocks before the first bad one. With asynchronous scheduling, steps that were
sent before the failure was known still report tokens for it, and vLLM keeps them; the bad blocks stay in the device's
prefix cache, where another request may find them before they are computed again. So here the request is preempted, as
vLLM itself does for a reset of running requests, and the prefix cache forgets its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.v023.failed_loads import Affected, handling_invalid_blocks


def step_retreat(original: Any) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks."""
    return handling_invalid_blocks(original, _step_retreat)


def _step_retreat(
    scheduler: Any, _: Iterable[Request], invalid_block_ids: set[int], evict_blocks: bool
) -> Affected | None:
    return take_step_back(scheduler, invalid_block_ids) if evict_blocks else None


def take_step_back(scheduler: Any, invalid_block_ids: set[int]) -> Affected:
    """(ids of the requests whose tokens of this step vLLM must not take, tokens they lose, blocks to evict: none).

    The whole prefix cache is dropped: a request that was aborted since may have left blocks that it computed with bad
    ones.
    """
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    affected = [
        request
        for request in scheduler.running
        if any(not invalid_block_ids.isdisjoint(group) for group in get_block_ids(request.request_id))
    ]
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    lost_tokens = 0
    now = time.monotonic()
    for request in reversed(affected):  # each is put before those that wait
        lost_tokens += request.num_computed_tokens
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now)
        _drop_tokens_under_way(request)
    for request in (*scheduler.waiting, *scheduler.skipped_waiting):
        # Preempted since: which blocks it computed with is no longer known.
        if request.status is RequestStatus.PREEMPTED and request.num_output_placeholders:
            _drop_tokens_under_way(request)
    if affected:
        scheduler.prev_step_scheduled_req_ids.clear()
    if isinstance(scheduler, AsyncScheduler):
        return set(), lost_tokens, set()
    return {request.request_id for request in affected}, lost_tokens, set()


def _drop_tokens_under_way(request: Request) -> None:
    """One for each step that was sent and will report a token, this one included: each is dropped as it comes."""
    request.async_tokens_to_discard += request.num_output_placeholders
    request.num_output_placeholders = 0
