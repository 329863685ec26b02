"""Chunks of windows that are left out, beside every prefix that a later prompt may have in common."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from spillway_connector.engine.features.window_stores import WindowStores
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.plan.holds import RetentionHint
from spillway_connector.plan.kv_groups import KvGroup, stored_chunks
from spillway_connector.testing.generation import RequestState
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
STATES = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")

HIT_CHUNKS = "num_hit_blocks" if generation() is Generation.V023 else "num_hit_chunks"


def full(block_tokens: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_tokens, **HEADS)


def window(tokens: int, block_tokens: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_tokens, sliding_window=tokens, **HEADS)


def kept(
    specs: list[KVCacheSpec],
    prompt_tokens: int,
    *,
    parts_at: int = 0,
    found_tokens: int = 0,
    blocks_per_chunk: int = 1,
    more_tokens: int = 0,
    mark: int | None = None,
    bound: int | None = None,
    junction: int = 0,
    step_tokens: int = 80,
    drafts: bool = False,
) -> list[list[int]]:
    """The chunks of each group that a request with an answer of `more_tokens` stores in one step."""
    chunk_tokens = [spec.block_size * blocks_per_chunk for spec in specs]
    stores = WindowStores.of(specs, chunk_tokens, blocks_per_chunk, step_tokens, drafts=drafts)
    assert stores is not None
    states = [
        RequestGroupState(
            [(group, chunk) for chunk in range((prompt_tokens + more_tokens) // tokens)],
            [1] * ((prompt_tokens + more_tokens) // tokens * blocks_per_chunk),
            **{HIT_CHUNKS: found_tokens // tokens},
        )
        for group, tokens in enumerate(chunk_tokens)
    ]
    request: Any = part_of(
        RequestState,
        req=request_of("request", [], tokens=prompt_tokens, block_tokens=16),
        group_states=states,
        window_ends=None,
        max_offload_tokens=bound,
        req_context=TenantContext("request", retention=None if mark is None else RetentionHint(((mark, 60.0),), 0.5)),
    )
    request.req.shared_prefix_boundary = junction
    whole = next(group for group, spec in enumerate(specs) if type(spec) is FullAttentionSpec)
    resident = {(whole, chunk) for chunk in range(parts_at // chunk_tokens[whole])}
    manager: Any = SimpleNamespace(primary_tier=SimpleNamespace(resident=resident))
    stores.leave_out([request, None], manager)
    return [
        [chunk for chunk, ids in enumerate(zip(*[iter(state.block_ids)] * blocks_per_chunk, strict=True)) if all(ids)]
        for state in states
    ]


def test_of_a_window_the_end_of_the_prompt_and_the_answer_are_stored() -> None:
    whole, of_window = kept([full(), window(32)], 20 * 16, more_tokens=4 * 16)
    assert whole == list(range(24))
    # A window of 2, and one more. If the prompt comes again, vLLM loads all of it and computes its last token.
    assert of_window == list(range(17, 24))


def test_where_the_last_token_alone_cannot_be_computed_a_prompt_that_ends_with_a_chunk_leaves_two_windows() -> None:
    assert kept([full(), window(32)], 20 * 16, drafts=True)[1] == [16, 17, 18, 19]
    assert kept([full(), window(32), STATES], 20 * 16)[1] == [16, 17, 18, 19]
    short = [full(64), window(16)]
    assert kept(short, 4 * 64)[1] == [14, 15]
    assert kept(short, 4 * 64 + 1)[1] == [14, 15]
    assert kept(short, 4 * 64, drafts=True)[1] == [10, 11, 12, 13, 14, 15]


def test_a_prompt_that_parts_from_another_one_leaves_a_window_there() -> None:
    assert kept([full(), window(32)], 20 * 16, parts_at=10 * 16)[1] == [7, 8, 9, 17, 18, 19]


def test_a_prompt_that_a_client_retains_in_part_leaves_a_window_at_the_mark() -> None:
    assert kept([full(), window(32)], 20 * 16, mark=10 * 16 + 5)[1] == [7, 8, 9, 17, 18, 19]


def test_a_prompt_of_which_a_client_lets_a_part_be_stored_leaves_a_window_at_that_bound() -> None:
    assert kept([full(), window(32)], 20 * 16, bound=10 * 16 + 5)[1] == [7, 8, 9, 17, 18, 19]


def test_what_the_request_found_is_not_touched() -> None:
    assert kept([full(), window(32)], 20 * 16, found_tokens=5 * 16)[1] == [*range(5), 17, 18, 19]


@pytest.mark.parametrize("specs", [[full()], [window(32)], [window(32), window(64)], [STATES], [window(32), STATES]])
def test_models_in_which_every_chunk_is_stored(specs: list[KVCacheSpec]) -> None:
    assert WindowStores.of(specs, [16] * len(specs), 1, 80, drafts=False) is None


def test_of_states_the_end_of_the_prompt_and_the_answer_are_stored() -> None:
    states, of_window, whole = kept([STATES, window(32), full()], 20 * 16 + 3, more_tokens=4 * 16)
    assert whole == list(range(24))
    assert states == list(range(18, 24))  # one more for a drafter, without whose last block a prompt is found again
    assert of_window == list(range(17, 24))


@pytest.mark.parametrize(
    "given", [{"parts_at": 160}, {"mark": 165}, {"bound": 165}, {"junction": 160}, {"parts_at": 160, "junction": 160}]
)
def test_of_states_one_that_a_step_may_end_with_is_stored_before_an_end_amid_a_prompt(given: dict[str, int]) -> None:
    """A step has at most five chunks, so one of the five before the tenth ends with a step."""
    assert kept([full(), STATES], 20 * 16 + 3, **given)[1] == [5, 6, 7, 8, 9, 18, 19]
    assert kept([full(), STATES], 20 * 16 + 3, **given, step_tokens=16)[1] == [8, 9, 18, 19]
    every = dataclasses.replace(STATES, mamba_cache_mode="all")
    assert kept([full(), every], 20 * 16 + 3, **given)[1] == [8, 9, 18, 19]


def test_a_prompt_that_ends_with_a_chunk_is_found_again_by_the_step_before() -> None:
    """The last step of the prompt ends behind the longest prefix that is loaded when the prompt comes again."""
    assert kept([full(), STATES], 20 * 16)[1] == [14, 15, 16, 17, 18, 19]


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(st.integers(1, 400), st.integers(1, 100), st.integers(1, 3), st.booleans())
def test_a_prompt_stores_as_many_chunks_as_are_planned(
    prompt_tokens: int, window_tokens: int, blocks_per_chunk: int, drafts: bool
) -> None:
    chunk_tokens = 16 * blocks_per_chunk
    stored = kept([full(), window(window_tokens)], prompt_tokens, blocks_per_chunk=blocks_per_chunk, drafts=drafts)
    groups = [KvGroup(chunk_tokens), KvGroup(chunk_tokens, window_tokens)]
    assert [len(chunks) for chunks in stored] == stored_chunks(groups, prompt_tokens, every_window=False, drafts=drafts)


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(1, 100), st.sampled_from((4, 8, 16))), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 400),
    st.integers(0, 60),
    st.booleans(),
)
def test_every_prefix_that_is_expected_is_found_whole(
    prompt_tokens: int,
    windows: list[tuple[int, int]],
    blocks_per_chunk: int,
    parts_at: int,
    more_tokens: int,
    drafts: bool,
) -> None:
    specs: list[KVCacheSpec] = [full(), *(window(tokens, block_tokens) for tokens, block_tokens in windows)]
    whole_tokens = 16 * blocks_per_chunk
    parts_at = min(parts_at, prompt_tokens) // whole_tokens * whole_tokens
    stored = kept(
        specs,
        prompt_tokens,
        parts_at=parts_at,
        blocks_per_chunk=blocks_per_chunk,
        more_tokens=more_tokens,
        drafts=drafts,
    )
    last_end = (prompt_tokens - drafts) // whole_tokens * whole_tokens
    ends = {parts_at, *range(last_end, prompt_tokens + more_tokens, 16)}
    for end_tokens in {end // whole_tokens * whole_tokens for end in ends}:
        for chunks, (tokens, block_tokens) in zip(stored[1:], windows, strict=True):
            chunk_tokens = block_tokens * blocks_per_chunk
            first = max(0, (end_tokens - tokens) // chunk_tokens - 1)  # a draft's layers read one more
            assert set(range(first, end_tokens // chunk_tokens)) <= set(chunks), end_tokens
