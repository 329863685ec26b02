"""Recomputing a request whose load failed, if its KV is more than one list of blocks that attention reads whole.

vLLM 0.23 cuts such a request back to the blocks before the first bad one. With several KV groups (sliding windows or
Mamba states beside attention) it unpacks "exactly one" group, and the engine exits; with sliding windows alone it keeps
blocks that were never loaded, because they are outside the window. Here the request of such a model is recomputed
from its first token, as vLLM does in later versions: a window or a state amid a prompt cannot be computed on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

# (ids of the affected requests, tokens they lose, blocks to evict)
Affected = tuple[set[str], int, set[int]]


Handle = Callable[[Any, Iterable[Request], set[int], bool], Affected | None]


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
