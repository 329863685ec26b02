"""The keys of a request, against upstream's state of the same request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.request import Request

from spillway_connector.engine.v023.scheduler import RequestState
from spillway_connector.testing.requests import request_of


def states_of(factors: list[int], limit: int | None = None) -> tuple[Request, RequestState, RequestOffloadState]:
    groups = [GroupOffloadConfig(at, 16, 16 * factor, factor, None) for at, factor in enumerate(factors)]
    request = request_of("r", [], tokens=1, block_tokens=16)
    request.kv_transfer_params = None if limit is None else {"max_offload_tokens": limit}
    config = SchedulerOffloadConfig(tuple(groups), 1, 1, offload_prompt_only=True)
    made = [
        kind(config, request, ReqContext(req_id="r"), RequestOffloadingContext())
        for kind in (RequestState, RequestOffloadState)
    ]
    return request, cast(RequestState, made[0]), made[1]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(0, 9), max_size=6))
def test_keys_grow_as_upstream_s_do(factors: list[int], new_hashes: list[int]):
    request, state, upstream = states_of(factors)
    for count in new_hashes:
        at = len(request.block_hashes)
        request.block_hashes += [number.to_bytes(32, "big") for number in range(at, at + count)]
        state.update_offload_keys()
        upstream.update_offload_keys()
        for ours, theirs in zip(state.group_states, upstream.group_states, strict=True):
            assert ours.offload_keys == theirs.offload_keys


def test_a_request_whose_adapter_is_not_identified_has_no_keys_and_stores_nothing():
    request, state, _ = states_of([1], limit=48)
    assert state.max_offload_tokens == 48
    request.block_hashes = [b"h" * 32]
    state.has_adapter, state.adapter = True, cast(Any, SimpleNamespace(key=None, number=0))
    state.update_offload_keys()
    assert state.max_offload_tokens == 0
    assert state.group_states[0].offload_keys == []
    state.adapter = cast(Any, SimpleNamespace(key=b"k" * 16, number=0))
    state.update_offload_keys()
    assert state.max_offload_tokens == 48
    assert [key[: 32 + 16] for key in state.group_states[0].offload_keys] == [b"h" * 32 + b"k" * 16]
