"""Stores of chunks of several blocks: each stored block lies in its place, and none that a load reads is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from spillway_connector.engine.scheduler.partial_chunks import PartialChunks, load_unit_tokens, whole_chunks
from spillway_connector.plan.copies import CopyLayout, Segment, plan_copies

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
STATES = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
PAGE = 1 << 12


def window(tokens: int, block_tokens: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_tokens, sliding_window=tokens, **HEADS)


def left(spec: KVCacheSpec, blocks: list[int], per_chunk: int, *, first: int = 0, wholes: int = 1) -> list[int]:
    """The blocks of this group that are left of those of a request. wholes: chunks in one of full attention."""
    tokens = [spec.block_size * per_chunk * wholes, spec.block_size * per_chunk]
    chunks = PartialChunks.of([FULL, spec], tokens, per_chunk)
    assert chunks is not None
    states = [SimpleNamespace(block_ids=[]), SimpleNamespace(block_ids=list(blocks))]
    request: Any = SimpleNamespace(group_states=states, next_stored_chunk=lambda state: first)
    step: Any = SimpleNamespace(num_scheduled_tokens={"runs": 1}, finished_req_ids=["ended"])
    chunks.leave_out({"runs": request}.get, step)
    return states[1].block_ids


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_groups_that_lose_no_blocks_are_left_alone(per_chunk: int) -> None:
    assert PartialChunks.of([FULL, FULL], [32, 32], 2) is None
    assert (PartialChunks.of([FULL, STATES], [16 * per_chunk] * 2, per_chunk) is None) == (per_chunk == 1)


def test_blocks_in_front_of_one_that_is_missing_are_left_out() -> None:
    assert left(window(2), [9, 0, 7], 3) == [0, 0, 7]
    assert left(window(2), [0, 8, 7], 3) == [0, 8, 7]


def test_a_chunk_that_lacks_what_a_load_reads_is_left_out() -> None:
    assert left(window(17), [9, 0, 7], 3) == [0, 0, 0]  # a load of its end reads two blocks
    assert left(window(33), [0, 8, 7], 3) == [0, 0, 0]
    assert left(window(1000), [9, 8, 7, 6, 5, 4], 3) == [9, 8, 7, 6, 5, 4]


def test_chunked_local_attention_loses_blocks_too() -> None:
    local = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=32, **HEADS)
    assert left(local, [0, 8, 7, 6, 5, 4], 3) == [0, 0, 0, 6, 5, 4]
    assert left(local, [9, 0, 7, 6, 5, 4], 3) == [0, 0, 0, 6, 5, 4]


def test_only_the_first_chunk_of_a_store_may_lack_blocks() -> None:
    assert left(STATES, [0, 0, 9, 0, 0, 8], 3) == [0, 0, 0, 0, 0, 8]
    assert left(window(16), [0, 0, 9, 6, 7, 8], 3) == [0, 0, 9, 6, 7, 8]
    assert left(window(16), [5, 6, 9, 0, 7, 8], 3) == [0, 0, 0, 0, 7, 8]


def test_of_states_each_chunk_has_the_last_one() -> None:
    assert left(STATES, [5, 0, 9], 3) == [0, 0, 9]
    assert left(STATES, [5, 6, 0], 3) == [5, 6, 0]  # vLLM does not store it


def test_chunks_that_were_stored_before_are_looked_at_as_far_as_vllm_does() -> None:
    blocks = [9, 0, 7, 6, 0, 4, 3, 2, 1]
    assert left(window(1), blocks, 3, first=2) == [9, 0, 7, 0, 0, 4, 3, 2, 1]
    assert left(window(1), blocks, 3, first=2, wholes=2)[:3] == [0, 0, 0]


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(
    st.integers(2, 4),
    st.one_of(st.none(), st.integers(1, 90)),
    st.lists(st.integers(0, 3).map(bool), min_size=2, max_size=20),
    st.sets(st.integers(0, 9)),
)
def test_every_block_of_a_store_lies_in_its_place_and_none_that_a_load_reads_is_missing(
    per_chunk: int, window_tokens: int | None, there: list[bool], resident: set[int]
) -> None:
    """A store as vLLM builds it, and as the worker plans it. Chunks that the tier has already are not stored."""
    spec = STATES if window_tokens is None else window(window_tokens)
    blocks = left(spec, [number + 1 if is_there else 0 for number, is_there in enumerate(there)], per_chunk)
    taken, first, rows = [], None, []
    for chunk in range(len(blocks) // per_chunk):
        of_chunk = blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
        if not of_chunk[-1] or chunk in resident:
            continue
        rows.append(chunk)
        taken += [block for block in of_chunk if block]
        if first is None:
            first = chunk * per_chunk + next(place for place, block in enumerate(of_chunk) if block)
    segment = Segment(0, PAGE, 0, PAGE, PAGE)
    layout = CopyLayout(((segment,),), 0, per_chunk * PAGE, per_chunk)
    plan = plan_copies(layout, np.array(taken, np.int64), [len(taken)], [first or 0], np.array(rows, dtype=np.int64))
    held: set[int] = set()
    for device, host, size in zip(plan.device_addresses, plan.host_addresses, plan.sizes_bytes, strict=True):
        for part in range(int(size) // PAGE):
            place = int(host) // PAGE + part
            assert int(device) // PAGE + part == place + 1, "a block lies in another one's place"
            held.add(place)
    read = 1 if window_tokens is None else min(per_chunk, -(-window_tokens // 16))
    for chunk in rows:
        end = (chunk + 1) * per_chunk
        assert held.issuperset(range(end - read, end)), "a load would read what was never written"


def asked(
    found: dict[int | None, int], computed: int, total: int, **fields: Any
) -> tuple[int | None, list[int | None]]:
    """The number of tokens that is found in the end, and the bounds of the searches. found: tokens by bound."""
    bounds: list[int | None] = []
    request: Any = SimpleNamespace(
        num_locally_computed_tokens=computed, req=SimpleNamespace(num_tokens=total), **fields
    )

    def look_up(_: Any, bound: int | None) -> int | None:
        bounds.append(bound)
        return found[bound]

    return whole_chunks(look_up, request, None, 48), bounds


def test_loads_end_with_a_chunk_of_every_group_if_one_can_lack_blocks() -> None:
    assert load_unit_tokens([FULL, window(5), STATES], [48, 32, 16]) == 96
    assert load_unit_tokens([FULL], [32]) == load_unit_tokens([FULL, FULL], [32, 16]) == 1
    # Without windows and states, vLLM's search counts the last token that it may find.
    request: Any = SimpleNamespace(num_locally_computed_tokens=0, req=SimpleNamespace(num_tokens=50))
    assert whole_chunks(lambda _, bound: bound, request, 41, 1) == 41


def test_a_search_that_ends_within_a_larger_chunk_is_repeated_up_to_that_chunk() -> None:
    assert asked({None: 96}, 0, 200) == (96, [None])
    assert asked({None: 104, 97: 96}, 0, 200) == (96, [None, 97])
    assert asked({None: 104, 97: 64, 49: 48}, 0, 200) == (48, [None, 97, 49])
    assert asked({None: 24}, 0, 200) == (0, [None])
    assert asked({None: 40, 33: 32}, 16, 200) == (32, [None, 33])
    assert asked({None: 40, 33: None}, 16, 200) == (None, [None, 33])
    assert asked({None: 0}, 16, 200) == (0, [None])


def test_a_whole_prompt_is_found_but_for_its_last_token() -> None:
    assert asked({None: 95}, 0, 96) == (95, [None])
    assert asked({None: 95, 49: 48}, 0, 97) == (48, [None, 49])


def test_a_prompts_end_that_vllm_stores_by_itself_is_found() -> None:
    assert asked({None: 56}, 0, 96, partial_tail_boundary=56) == (56, [None])
    assert asked({None: 56, 49: 48}, 0, 96, partial_tail_boundary=None) == (48, [None, 49])
