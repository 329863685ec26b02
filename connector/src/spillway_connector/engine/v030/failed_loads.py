"""Taking a step back for the requests that computed with blocks whose load had failed (layerwise_loads: on).

vLLM shortens such a request to the blocks before the first bad one, and leaves out its token of this step. With
asynchronous scheduling, steps that were sent before the failure was known still report tokens for it, and vLLM keeps
them; the bad blocks stay in the device's prefix cache. So here the request is preempted as vLLM preempts for a reset of
running requests, which drops every token under way, and the prefix cache forgets its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from spillway_connector.engine.scheduler.invalid_blocks import (
    Affected,
    handling_invalid_blocks,
    preempt_holders,
    taking_step_back,
)


def step_retreat(original: Any) -> Callable[..., Affected]:
    """Wrap Scheduler._update_requests_with_invalid_blocks."""
    return handling_invalid_blocks(original, taking_step_back(take_step_back))


def take_step_back(scheduler: Any, invalid_block_ids: set[int]) -> Affected:
    """Return (ids of requests whose token of this step vLLM must not take: none, as it drops them all; tokens that
    requests lose; blocks to evict: none)."""
    _, lost_tokens = preempt_holders(scheduler, invalid_block_ids)
    for request in scheduler.requests.values():
        # The requests just preempted, and those preempted since: the blocks that these computed with are not known now.
        if request.status is RequestStatus.PREEMPTED and request.num_stale_output_tokens:
            request.drop_stale_output = True
    return set(), lost_tokens, set()
