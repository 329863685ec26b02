"""Recomputing a request whose load failed, if its KV is more than one list of blocks that attention reads whole.

vLLM 0.23 cuts such a request back to the blocks before the first bad one. With several KV groups (sliding windows or
Mamba states beside attention) it unpacks "exactly one" group, and the engine exits; with sliding windows alone it keeps
blocks that were never loaded, because they are outside the window. Here the request of such a model is recomputed
from its first token, as vLLM does in later versions: a window or a state amid a prompt cannot be computed on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.scheduler.invalid_blocks import (
    Affected,
    Own,
    handling_invalid_blocks,
    preempt_holders,
    taking_step_back,
)


def _drop_tokens_under_way(request: Request) -> None:
    """One for each step that was sent and will report a token, this one included: each is dropped as it comes."""
    request.async_tokens_to_discard += request.num_output_placeholders
    request.num_output_placeholders = 0


def full_recompute(original: Any) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks."""
    return handling_invalid_blocks(original, _full_recompute)


def _full_recompute(
    scheduler: Any, requests: Iterable[Request], invalid_block_ids: set[int], evict_blocks: bool, own: Own
) -> Affected:
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return own(requests)
    if evict_blocks:
        # vLLM asks so for running requests. Loads here are asynchronous: until one has ended, its blocks belong to one
        # request, and that request waits.
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
    return handling_invalid_blocks(original, taking_step_back(take_step_back))


def take_step_back(scheduler: Any, invalid_block_ids: set[int]) -> Affected:
    """(ids of the requests whose tokens of this step vLLM must not take, tokens they lose, blocks to evict: none)."""
    affected, lost_tokens = preempt_holders(scheduler, invalid_block_ids)
    for request in (*scheduler.waiting, *scheduler.skipped_waiting):
        # The requests just preempted, and those preempted since: the blocks that these computed with are not known now.
        if request.status is RequestStatus.PREEMPTED and request.num_output_placeholders:
            _drop_tokens_under_way(request)
    if isinstance(scheduler, AsyncScheduler):
        return set(), lost_tokens, set()
    return {request.request_id for request in affected}, lost_tokens, set()
