"""Recomputing a request whose load failed, if its KV is more than one list of blocks that attention reads whole.

vLLM 0.23 cuts such a request back to the blocks before the first bad one. With several KV groups (sliding windows or
Mamba states beside attention) it unpacks "exactly one" group, and the engine exits; with sliding windows alone it keeps
blocks that were never loaded, because they are outside the window. Here the request of such a model is recomputed
from its first token, as vLLM does in later versions: a window or a state amid a prompt cannot be computed on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

# (ids of the affected requests, tokens they lose, blocks to evict)
Affected = tuple[set[str], int, set[int]]
Handle = Callable[[Any, Iterable[Request], set[int], bool], Affected | None]


def _drop_tokens_under_way(request: Request) -> None:
    """One for each step that was sent and will report a token, this one included: each is dropped as it comes."""
    request.async_tokens_to_discard += request.num_output_placeholders
    request.num_output_placeholders = 0


def handling_invalid_blocks(original: Any, handle: Handle) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks so that it asks `handle` first.

    Args:
        original: vLLM's method.
        handle: (scheduler, requests, invalid block ids, evict_blocks) -> None if vLLM's own way is right. evict_blocks
            is False for requests that wait for an asynchronous load, True for running ones.
    """

    def update_requests(
        self: Any,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Affected:
        handled = handle(self, requests, invalid_block_ids, evict_blocks)
        if handled is not None:
            return handled
        own: Affected = original(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)
        return own

    return update_requests


def full_recompute(original: Any) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks."""
    return handling_invalid_blocks(original, _full_recompute)


def _full_recompute(
    scheduler: Any, requests: Iterable[Request], invalid_block_ids: set[int], evict_blocks: bool
) -> Affected | None:
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return None
    if evict_blocks:
        # For running requests. Loads here are asynchronous: until one has ended, its blocks belong to one request, and
        # that request waits.
        return set(), 0, set()
    return recompute_from_start(scheduler.kv_cache_manager, requests, invalid_block_ids)


def recompute_from_start(
    kv_cache_manager: Any, requests: Iterable[Request], invalid_block_ids: set[int]
) -> tuple[set[str], int, set[int]]:
    """(ids of the requests that hold such a block, tokens they lose, blocks to evict: none).

    With no token computed, vLLM frees the blocks of the request before it is scheduled again.
    """
    affected: set[str] = set()
    lost_tokens = 0
    for request in requests:
        groups = kv_cache_manager.get_block_ids(request.request_id)
        if all(invalid_block_ids.isdisjoint(blocks) for blocks in groups):
            continue
        affected.add(request.request_id)
        lost_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0
    return affected, lost_tokens, set()


# Taking a step back for the requests that computed with blocks whose load had failed.
#
# vLLM 0.23 shortens such a request to the blocks before the first bad one. With asynchronous scheduling, steps that
# were sent before the failure was known still report tokens for it, and vLLM keeps them; the bad blocks stay in the
# device's prefix cache, where another request may find them before they are computed again. So here the request is
# preempted, as vLLM itself does for a reset of running requests, and the prefix cache forgets its blocks.


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
