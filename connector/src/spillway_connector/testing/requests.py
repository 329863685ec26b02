"""vLLM's own requests and blocks, for tests of what the scheduler half is asked about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request, RequestStatus


def request_of(
    request_id: str,
    block_hashes: Sequence[bytes],
    *,
    tokens: int,
    block_tokens: int,
    status: RequestStatus = RequestStatus.RUNNING,
    skips_reading: bool = False,
    **others: Any,
) -> Request:
    """Make a request whose prompt has so many tokens; its whole blocks, those of an answer too, have these hashes.
    others: arguments of vLLM's Request."""
    request = Request(
        request_id,
        [0] * tokens,
        SamplingParams(max_tokens=16, skip_reading_prefix_cache=skips_reading),
        others.pop("pooling_params", None),
        block_hasher=lambda made: [
            BlockHash(each) for each in block_hashes[len(made.block_hashes) : made.num_tokens // block_tokens]
        ],
        **others,
    )
    request.status = status
    return request


def new_request(request_id: str, *blocks: Sequence[int], computed: int = 0) -> NewRequestData:
    """Return a step's scheduler data of a request that runs for the first time, or again after a preemption.

    Args:
        request_id: The request's id.
        blocks: The device blocks of each KV group.
        computed: So many of its tokens were computed, or loaded, before.
    """
    return NewRequestData(request_id, [], [], None, None, tuple(list(group) for group in blocks), computed, None)


def allocated(*blocks: Sequence[int]) -> KVCacheBlocks:
    """Device blocks of each KV group, as vLLM hands them to the connector."""
    return KVCacheBlocks(tuple([KVCacheBlock(block) for block in group] for group in blocks))
