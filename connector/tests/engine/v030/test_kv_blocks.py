"""A block that is copied into a row and from there to another block brings all of its layers, and touches no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.engine.v030.kv_blocks import block_bytes, place_kv_caches
from spillway_connector.errors import ConfigError

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


@dataclass
class Engine:
    """KV caches as vLLM registers them; views are bytes: (kernel blocks, bytes of one)."""

    memory: torch.Tensor
    caches: dict[str, torch.Tensor]
    config: KVCacheConfig

    def place(self) -> PlacedKVCaches:
        return place_kv_caches(self.caches, self.config, range(len(self.config.kv_cache_groups)))

    def block(self, layer: str, block: int) -> bytes:
        per_block = self.caches[layer].shape[0] // self.config.num_blocks
        return self.caches[layer][block * per_block : (block + 1) * per_block].contiguous().numpy().tobytes()


def engine(num_blocks: int, size: int, tensors: list[KVCacheTensor], groups: Sequence[Sequence[str]]) -> Engine:
    config = KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec([*layers], SPEC) for layers in groups])
    return Engine(torch.randint(-128, 128, (size,), dtype=torch.int8), {}, config)


@st.composite
def layers_outermost(draw: st.DrawFn) -> Engine:
    """Groups overlay each other; pages have padding behind them, or are several kernel blocks without."""
    num_blocks = draw(st.integers(2, 5))
    names, tensors, groups, placed = iter(range(100)), [], [], []
    for _ in range(draw(st.integers(1, 3))):
        start, groups_layers = 0, []
        for _ in range(draw(st.integers(1, 3))):
            kernel_blocks = draw(st.integers(1, 3))
            page = kernel_blocks * draw(st.integers(1, 6))
            stride = page + (draw(st.integers(0, 4)) if kernel_blocks == 1 else 0)
            name = f"layer{next(names)}"
            placed.append((name, start, page, stride, kernel_blocks))
            groups_layers.append(name)
            tensors.append(KVCacheTensor(0, [name], stride * num_blocks, stride, start))
            start += stride * num_blocks
        groups.append((groups_layers, start))
    # One layer that fills the allocation by itself would be a block of all layers, too.
    size = max(end for _, end in groups) + 1
    for tensor in tensors:
        tensor.size = size
    made = engine(num_blocks, size, tensors, [layers for layers, _ in groups])
    for name, start, page, stride, kernel_blocks in placed:
        shape = num_blocks * kernel_blocks, page // kernel_blocks
        made.caches[name] = made.memory.as_strided(shape, (stride // kernel_blocks, 1), start)
    return made


@st.composite
def blocks_outermost(draw: st.DrawFn) -> Engine:
    """A block is the pages of all layers side by side; groups of fewer layers use its beginning."""
    num_blocks, page = draw(st.integers(2, 5)), draw(st.integers(1, 8))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride = page * max(counts) + draw(st.integers(0, 5))
    groups = [[f"layer{group}.{number}" for number in range(count)] for group, count in enumerate(counts)]
    tensors = [KVCacheTensor(stride * num_blocks, layers, page, stride) for layers in groups]
    made = engine(num_blocks, stride * num_blocks, tensors, groups)
    for layers in groups:
        for number, name in enumerate(layers):
            made.caches[name] = made.memory.as_strided((num_blocks, page), (stride, 1), number * page)
    return made


@given(made=st.one_of(layers_outermost(), blocks_outermost()), data=st.data())
def test_a_block_arrives_whole_and_alone(made: Engine, data: st.DataObject) -> None:
    placed = made.place()
    group = data.draw(st.integers(0, len(made.config.kv_cache_groups) - 1))
    source, target = data.draw(st.permutations(range(made.config.num_blocks)))[:2]
    layers = made.config.kv_cache_groups[group].layer_names
    expected = [made.block(layer, source) for layer in layers]
    others = {(layer, block) for layer in layers for block in range(made.config.num_blocks) if block != target}
    before = {place: made.block(*place) for place in others}

    segments = placed.segments_of(layers)
    assert sum(segments) == len(placed.group_data_refs[group]) or not any(
        segments
    )  # a block of all layers has no parts

    row = torch.zeros(block_bytes(placed), dtype=torch.int8)
    used: list[tuple[int, int]] = []
    for ref in placed.group_data_refs[group]:
        start = placed.row_offsets[ref.tensor_idx]
        used.append((start, start + ref.page_size_bytes))
        row[start : start + ref.page_size_bytes] = placed.tensors[ref.tensor_idx].tensor[source]
    for ref, (start, end) in zip(placed.group_data_refs[group], used, strict=True):
        placed.tensors[ref.tensor_idx].tensor[target] = row[start:end]

    assert [made.block(layer, target) for layer in layers] == expected
    assert {place: made.block(*place) for place in others} == before
    ordered = sorted(used)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    allocated_bytes = made.config.kv_cache_tensors[0].size // made.config.num_blocks
    assert block_bytes(placed) <= allocated_bytes  # what vLLM counts, and the row holds


@given(made=blocks_outermost())
def test_a_block_of_all_layers_moves_as_one_piece(made: Engine) -> None:
    assert len(made.place().tensors) == 1


def test_a_padded_page_leaves_its_padding_alone() -> None:
    tensor = KVCacheTensor(31, ["layer"], 30, 10)
    made = engine(3, 31, [tensor], [["layer"]])
    made.caches["layer"] = made.memory.as_strided((3, 7), (10, 1))
    (placed,) = made.place().tensors
    assert (placed.page_size_bytes, placed.tensor.stride(0)) == (7, 10)


def test_groups_in_allocations_of_their_own_are_copied_layer_by_layer() -> None:
    tensors = [KVCacheTensor(12, [name], 12, 4) for name in ("a", "b")]
    made = engine(3, 0, tensors, [["a"], ["b"]])
    made.caches = {name: torch.randint(-128, 128, (3, 4), dtype=torch.int8) for name in ("a", "b")}
    placed = made.place()
    assert [tensor.tensor.data_ptr() for tensor in placed.tensors] == [one.data_ptr() for one in made.caches.values()]
    assert placed.row_offsets == [0, 0]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (torch.zeros(40, dtype=torch.int8).as_strided((5, 8), (8, 1)), "no multiple of 3 blocks"),
        (torch.zeros(90, dtype=torch.int8).as_strided((3, 2, 4), (30, 8, 1)), "not one run"),
        (torch.zeros(90, dtype=torch.int8).as_strided((6, 8), (15, 1)), "the 2 kernel blocks of a block do not touch"),
    ],
)
def test_what_cannot_be_copied_block_by_block_is_refused_with_its_layer(view: torch.Tensor, why: str) -> None:
    made = engine(3, 1, [], [["model.layers.0"]])
    made.caches = {"model.layers.0": view}
    with pytest.raises(ConfigError, match=rf"layer model\.layers\.0 .* {why}"):
        made.place()
