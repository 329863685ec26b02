"""Wraps vLLM's handling of device blocks whose load failed: each generation's room says what comes before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from typing import Any, Protocol, runtime_checkable

from vllm.v1.request import Request

from spillway_connector.engine.patches.own_connector import is_among_others, own_connector

# (ids of the affected requests, tokens they lose, blocks to evict)
Affected = tuple[set[str], int, set[int]]
Own = Callable[[Iterable[Request]], Affected]  # vLLM's way for these requests
Handle = Callable[[Any, Iterable[Request], set[int], bool, Own], Affected]


def handling_invalid_blocks(original: Any, handle: Handle) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks so that `handle` decides.

    Args:
        original: vLLM's method.
        handle: (scheduler, requests, invalid block ids, evict_blocks, vLLM's way) -> what the method returns.
            evict_blocks is False for requests that wait for an asynchronous load, True for running ones.
    """

    def update_requests(
        self: Any,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Affected:
        def own(some: Iterable[Request]) -> Affected:
            affected: Affected = original(self, some, invalid_block_ids, num_scheduled_tokens, evict_blocks)
            return affected

        return handle(self, requests, invalid_block_ids, evict_blocks, own)

    return update_requests


@runtime_checkable
class StepLoads(Protocol):
    """A connector that knows which loads are within a step."""

    def loads_within_steps(self, block_ids: Set[int]) -> bool: ...


def taking_step_back(take_step_back: Callable[[Any, set[int]], Affected]) -> Handle:
    """Handle requests that ran in the step of their load by `take_step_back`: (scheduler, invalid block ids)."""

    def handle(
        scheduler: Any, requests: Iterable[Request], invalid_block_ids: set[int], evict_blocks: bool, own: Own
    ) -> Affected:
        if evict_blocks:
            connector = own_connector(scheduler, StepLoads)  # type: ignore[type-abstract]
            if (
                connector is not None
                and not is_among_others(scheduler)
                and not connector.loads_within_steps(invalid_block_ids)
            ):
                return set(), 0, set()  # of asynchronous loads: no request has computed with these blocks
            return take_step_back(scheduler, invalid_block_ids)
        # Requests that wait for loads of their own may have hit the same bad block. vLLM has the first of them alone
        # compute it, and the others may run before that.
        affected, lost_tokens = set[str](), 0
        for request in requests:
            of_one = own([request])
            affected |= of_one[0]
            lost_tokens += of_one[1]
        return affected, lost_tokens, set()

    return handle


def preempt_holders(scheduler: Any, block_ids: set[int]) -> tuple[list[Request], int]:
    """Preempt the running requests that hold one of these blocks, and drop the device's prefix cache.

    Returns:
        The requests, in the order of the queue, and the tokens that they lose.
    """
    get_block_ids = scheduler.kv_cache_manager.get_block_ids
    held = [
        request
        for request in scheduler.running
        if any(not block_ids.isdisjoint(group) for group in get_block_ids(request.request_id))
    ]
    forget_prefixes(scheduler)
    lost_tokens = sum(request.num_computed_tokens for request in held)
    now = time.monotonic()
    for request in reversed(held):  # each is put before those that wait
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now)
    if held:
        scheduler.prev_step_scheduled_req_ids.clear()
    return held, lost_tokens


def forget_prefixes(scheduler: Any) -> None:
    """Drop the device's whole prefix cache: a request that was aborted since may have left blocks that it computed with
    bad ones."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
