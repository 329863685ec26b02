"""Rows of models whose KV groups share tensors unevenly (DeepSeek V4): each group fills a row from its start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.engine.v023.spec import group_block_bytes
from spillway_connector.plan.copies import plan_copies
from spillway_connector.plan.geometry import ChunkGeometry

BLOCKS, ROWS, GROUPS = 6, 4, 3
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


@st.composite
def packed_models(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """The page of each tensor, and for each group how many bytes of each page it uses; 0: it has no layer there."""
    pages = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    used = [[draw(st.integers(0, page)) for page in pages] for _ in range(GROUPS)]
    used[0][0] = pages[0]
    return pages, used


def config_of(pages: list[int], used: list[list[int]]) -> KVCacheConfig:
    layers = [
        [f"{group}.{tensor}" for tensor, size in enumerate(of_group) if size] for group, of_group in enumerate(used)
    ]
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_groups=[KVCacheGroupSpec(names, SPEC) for names in layers],
        kv_cache_tensors=[
            KVCacheTensor(page * BLOCKS, [f"{group}.{at}" for group in range(GROUPS) if used[group][at]])
            for at, page in enumerate(pages)
        ],
    )


def test_a_row_is_as_large_as_the_group_that_needs_most() -> None:
    assert group_block_bytes(config_of([10, 20, 40], [[10, 15, 0], [0, 20, 0], [8, 0, 0]])) == 30
    assert group_block_bytes(config_of([10, 20, 40], [[10, 20, 1], [0, 20, 0], [8, 0, 0]])) == 70


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(packed_models(), st.integers(1, 3), st.integers(1, 2), st.data())
def test_every_group_comes_back_whole(
    model: tuple[list[int], list[list[int]]], per_chunk: int, ranks: int, data: st.DataObject
) -> None:
    pages, used = model
    memory = [torch.randint(-128, 128, (BLOCKS, page), dtype=torch.int8) for page in pages]
    refs = [[CanonicalKVCacheRef(at, size) for at, size in enumerate(of_group) if size] for of_group in used]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in memory], refs)
    geometry = ChunkGeometry(group_block_bytes(config_of(pages, used)), per_chunk, ranks, page_bytes=64)
    rank = data.draw(st.integers(0, ranks - 1))
    rows = np.full(ROWS * geometry.row_bytes, 0x77, np.uint8)
    region: Any = SimpleNamespace(address=rows.ctypes.data, row_bytes=geometry.row_bytes)
    layout = copy_layout(caches, region, geometry, rank)
    group = data.draw(st.sampled_from([at for at in range(GROUPS) if refs[at]]))
    sources = data.draw(st.permutations(range(BLOCKS)))[:per_chunk]
    targets = data.draw(st.permutations(range(BLOCKS)))[:per_chunk]
    sizes = [per_chunk if at == group else 0 for at in range(GROUPS)]
    row = np.array([data.draw(st.integers(0, ROWS - 1))])
    before = [tensor.clone() for tensor in memory]

    copy_spans(Direction.STORE, plan_copies(layout, np.array(sources), sizes, [0] * GROUPS, row))
    start = int(row[0]) * geometry.row_bytes + geometry.cell_of(rank)
    outside = np.delete(rows, range(start, start + geometry.rank_cell_bytes))
    assert (outside == 0x77).all()
    for tensor in memory:
        tensor.zero_()
    copy_spans(Direction.LOAD, plan_copies(layout, np.array(targets), sizes, [0] * GROUPS, row))

    for at, (tensor, old) in enumerate(zip(memory, before, strict=True)):
        expected = torch.zeros_like(tensor)
        for source, target in zip(sources, targets, strict=True):
            expected[target, : used[group][at]] = old[source, : used[group][at]]
        assert torch.equal(tensor, expected)
