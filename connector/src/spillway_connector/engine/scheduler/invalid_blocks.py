"""What rooms put before vLLM's handling of device blocks whose load failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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


def taking_step_back(original: Any, take_step_back: Callable[[Any, set[int]], Affected]) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks, for requests that ran in the step of their load.

    Args:
        original: vLLM's method.
        take_step_back: (scheduler, invalid block ids) -> what that method returns.
    """

    def update_requests(
        self: Any,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Affected:
        if evict_blocks:
            return take_step_back(self, invalid_block_ids)
        # Requests that wait for loads of their own may have hit the same bad block. vLLM has the first of them alone
        # compute it, and the others may run before that.
        affected, lost_tokens = set[str](), 0
        for request in requests:
            of_one: Affected = original(self, [request], invalid_block_ids, num_scheduled_tokens, evict_blocks)
            affected |= of_one[0]
            lost_tokens += of_one[1]
        return affected, lost_tokens, set()

    return update_requests


def holders(scheduler: Any, block_ids: set[int]) -> list[Request]:
    """The running requests that hold one of these blocks, in the order of the queue."""
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    return [
        request
        for request in scheduler.running
        if any(not block_ids.isdisjoint(group) for group in get_block_ids(request.request_id))
    ]


def forget_prefixes(scheduler: Any) -> None:
    """Drop the device's whole prefix cache: a request that was aborted since may have left blocks that it computed with
    bad ones."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
