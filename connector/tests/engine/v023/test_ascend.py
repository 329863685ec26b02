"""Caches as vLLM-Ascend 0.23 allocates them, on the CPU: every byte of a block goes out and comes back."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.engine.v023.ascend import canonical_kv_caches, has_ascend_layout
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copies import plan_copies
from spillway_connector.plan.geometry import ChunkGeometry

ALIGNMENT = 2 << 20
BLOCKS, TOKENS = 6, 16  # that vLLM manages


def allocation(size_bytes: int) -> torch.Tensor:
    """A part's raw bytes: moved to a 2 MiB boundary of a longer storage."""
    raw = torch.randint(-128, 127, (size_bytes + ALIGNMENT,), dtype=torch.int8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size_bytes]


def part(blocks: int, *block_shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return allocation(blocks * int(np.prod(block_shape)) * dtype.itemsize).view(dtype).view(blocks, *block_shape)


@dataclass
class Case:
    caches: dict[str, object]
    config: KVCacheConfig
    content: dict[int, object]  # group -> function of a block id giving that block's tensors in that group


def attention(heads=2, size=8, dtype=torch.bfloat16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=dtype)


def config(groups, tensors, blocks=BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[KVCacheTensor(size=page * blocks, shared_by=list(layers)) for page, layers in tensors],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), spec) for layers, spec in groups],
    )


def blocks_of(*views: torch.Tensor, factor: int = 1):
    """Block b of every view, where `factor` of its entries make a block."""
    return lambda block: [view[block * factor : (block + 1) * factor] for view in views]


def split_kv() -> Case:
    spec = attention()
    caches = {f"l{n}": (part(BLOCKS, TOKENS, 2, 8), part(BLOCKS, TOKENS, 2, 8)) for n in range(3)}
    views = [view for pair in caches.values() for view in pair]
    return Case(
        caches,
        config([(caches, spec)], [(spec.page_size_bytes, [layer]) for layer in caches]),
        {0: blocks_of(*views)},
    )


def more_physical_blocks() -> Case:
    spec = attention()
    caches = {"l0": (part(BLOCKS + 3, TOKENS, 2, 8), part(BLOCKS + 3, TOKENS, 2, 8))}
    return Case(caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"])})


def finer_kernel_blocks() -> Case:
    """The kernel's blocks hold 4 tokens, and there are a few more of them than four for each managed block."""
    spec = attention()
    caches = {"l0": (part(BLOCKS * 4 + 5, 4, 2, 8), part(BLOCKS * 4 + 5, 4, 2, 8))}
    return Case(
        caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"], factor=4)}
    )


def heads_before_tokens() -> Case:
    spec = attention()
    stored = part(BLOCKS, 2, TOKENS, 8), part(BLOCKS, 2, TOKENS, 8)
    caches = {"l0": tuple(view.permute(0, 2, 1, 3) for view in stored)}
    return Case(caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"])})


def mla() -> Case:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64 + 16, dtype=torch.bfloat16)
    caches = {"l0": (part(BLOCKS, TOKENS, 1, 64), part(BLOCKS, TOKENS, 1, 16))}
    return Case(caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"])})


def token_major_mla() -> Case:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64 + 16, dtype=torch.bfloat16)
    caches = {"l0": (part(BLOCKS * TOKENS, 1, 64), part(BLOCKS * TOKENS, 1, 16))}
    return Case(
        caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"], factor=TOKENS)}
    )


def sparse_indexer() -> Case:
    """(nope, rope, indexer key in int8, its scale in float16): smaller than the page that the spec counts."""
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64 + 16 + 32, dtype=torch.bfloat16)
    caches = {
        "l0": (
            part(BLOCKS, TOKENS, 1, 64),
            part(BLOCKS, TOKENS, 1, 16),
            part(BLOCKS, TOKENS, 1, 32, dtype=torch.int8),
            part(BLOCKS, TOKENS, 1, 1, dtype=torch.float16),
        )
    }
    return Case(caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"])})


def quantised_to_half_the_bytes() -> Case:
    """The spec counts bf16, the cache holds int8: as many bytes as half as many kernel blocks would have."""
    spec = attention()
    caches = {"l0": tuple(part(BLOCKS, TOKENS, 2, 8, dtype=torch.int8) for _ in range(2))}
    return Case(caches, config([(caches, spec)], [(spec.page_size_bytes, ["l0"])]), {0: blocks_of(*caches["l0"])})


def two_groups_share_tensors() -> Case:
    """A sliding-window layer and a full-attention layer in the same memory, each with blocks of its own."""
    full = attention()
    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=TOKENS * 2
    )
    pair = part(BLOCKS, TOKENS, 2, 8), part(BLOCKS, TOKENS, 2, 8)
    caches = {"full": pair, "window": pair}
    return Case(
        caches,
        config([(["full"], full), (["window"], window)], [(full.page_size_bytes, ["full", "window"])]),
        {0: blocks_of(*pair), 1: blocks_of(*pair)},
    )


def mamba_beside_attention() -> Case:
    """One raw tensor: K slice then V slice for the attention layer, page by page (padded) states for the Mamba one."""
    spec = attention()
    page = spec.page_size_bytes  # 1024
    state = MambaSpec(
        block_size=TOKENS, shapes=((4, 8), (30, 4)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=page
    )
    raw = allocation(BLOCKS * page)
    half = BLOCKS * page // 2
    keys, values = (raw[at : at + half].view(torch.bfloat16).view(BLOCKS, TOKENS, 2, 8) for at in (0, half))
    convolution = torch.as_strided(
        raw.view(torch.bfloat16), (BLOCKS, 4, 8), (page // 2, 8, 1), raw.storage_offset() // 2
    )
    recurrence = torch.as_strided(
        raw.view(torch.float32), (BLOCKS, 30, 4), (page // 4, 4, 1), (raw.storage_offset() + 64) // 4
    )
    return Case(
        {"attn": (keys, values), "mamba": [convolution, recurrence]},
        config([(["attn"], spec), (["mamba"], state)], [(page, ["attn", "mamba"])]),
        {0: blocks_of(keys, values), 1: blocks_of(convolution, recurrence)},
    )


def layers_of_unlike_sizes() -> Case:
    """A uniform group whose layers differ, as with speculative decoding."""
    small, large = attention(), attention(heads=4)
    caches = {
        "small": (part(BLOCKS, TOKENS, 2, 8), part(BLOCKS, TOKENS, 2, 8)),
        "large": (part(BLOCKS, TOKENS, 4, 8), part(BLOCKS, TOKENS, 4, 8)),
    }
    uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"small": small, "large": large})
    return Case(
        caches,
        config(
            [(["small", "large"], uniform)],
            [(small.page_size_bytes, ["small"]), (large.page_size_bytes, ["large"])],
        ),
        {0: blocks_of(*caches["small"], *caches["large"])},
    )


CASES = [
    split_kv,
    more_physical_blocks,
    finer_kernel_blocks,
    heads_before_tokens,
    mla,
    token_major_mla,
    sparse_indexer,
    quantised_to_half_the_bytes,
    two_groups_share_tensors,
    mamba_beside_attention,
    layers_of_unlike_sizes,
]


@pytest.fixture
def open_region():
    opened = []

    def open_region(geometry: ChunkGeometry) -> HostRegion:
        region = HostRegion(region_path(f"test-ascend-{os.getpid()}"), 8, geometry.row_bytes)
        opened.append(region)
        return region

    yield open_region
    for region in opened:
        region.cleanup()


def bytes_of(case: Case, group: int, block: int) -> list[bytes]:
    return [view.contiguous().view(torch.int8).numpy().tobytes() for view in case.content[group](block)]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("make", CASES)
def test_blocks_go_out_and_come_back(make, rank, blocks_per_chunk, open_region):
    case = make()
    assert has_ascend_layout(case.caches)
    caches = canonical_kv_caches(case.caches, case.config)
    block_bytes = sum(tensor.size for tensor in case.config.kv_cache_tensors) // BLOCKS
    geometry = ChunkGeometry(block_bytes, blocks_per_chunk, num_ranks=2)
    region = open_region(geometry)
    layout = copy_layout(caches, region, geometry, rank)
    rows = np.frombuffer(region.create_kv_memoryview().cast("B"), dtype=np.uint8).reshape(8, -1)
    for group in case.content:
        sizes = [0] * len(case.content)
        sizes[group] = 2
        row_ids = np.array([5, 2][: 2 // blocks_per_chunk], dtype=np.int64)
        before = [bytes_of(case, group, block) for block in (4, 1)]
        rows[:] = 0x77
        copy_spans(Direction.STORE, plan_copies(layout, np.array([4, 1]), sizes, [0] * len(sizes), row_ids))
        cell = geometry.rank_cell_bytes
        outside = np.delete(rows, row_ids, axis=0), rows[:, : rank * cell], rows[:, (rank + 1) * cell :]
        assert all((part == 0x77).all() for part in outside)  # another row, another rank's cell, padding
        assert (rows[row_ids, rank * cell : (rank + 1) * cell] != 0x77).any()
        for view in case.content[group](0) + case.content[group](3):
            view.view(torch.int8).zero_() if view.is_contiguous() else view.zero_()
        kept = [bytes_of(case, group, block) for block in (2, 5)]
        copy_spans(Direction.LOAD, plan_copies(layout, np.array([0, 3]), sizes, [0] * len(sizes), row_ids))
        assert [bytes_of(case, group, block) for block in (0, 3)] == before
        assert [bytes_of(case, group, block) for block in (2, 5)] == kept
    del rows


def test_parts_in_one_storage_are_distinguished():
    """V would be taken for K if only storage were compared (both are slices of one raw tensor)."""
    case = mamba_beside_attention()
    caches = canonical_kv_caches(case.caches, case.config)
    attn, mamba = caches.group_data_refs
    assert len(attn) == 2
    assert len({caches.tensors[ref.tensor_idx].tensor.data_ptr() for ref in attn}) == 2
    # The two states lie side by side in each page: one copy a block.
    assert [ref.page_size_bytes for ref in mamba] == [64 + 480]


def test_shared_memory_is_named_once():
    case = two_groups_share_tensors()
    caches = canonical_kv_caches(case.caches, case.config)
    assert len(caches.tensors) == 2
    assert caches.group_data_refs[0] == caches.group_data_refs[1]


def test_other_platforms_layouts_are_left_to_vllm():
    assert not has_ascend_layout({"attn": torch.zeros(2, 4), "mamba": [torch.zeros(2, 4)]})


def wrong(views, spec=None, page=None, shared_by=("l0",)):
    spec = spec or attention()
    return {"l0": views}, config([(["l0"], spec)], [(page or spec.page_size_bytes, shared_by)])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda: wrong((part(BLOCKS - 1, TOKENS, 2, 8),) * 2), r"that is not 6 blocks of 16 tokens"),
        (
            lambda: wrong((part(BLOCKS, TOKENS, 2, 8), part(2 * BLOCKS, TOKENS, 2, 8))),
            r"do not have equally many blocks",
        ),
        (lambda: wrong((part(BLOCKS + 1, TOKENS, 2, 8, dtype=torch.int8),) * 2), r"that is not 6 blocks"),
        (lambda: wrong((part(BLOCKS, TOKENS, 2, 16)[..., :8],) * 2), r"the bytes of a block are not one run"),
        (lambda: wrong((part(BLOCKS * 4, 5, 2, 8)[:, :4],) * 2), r"the 4 kernel blocks of a block do not touch"),
        (lambda: wrong((part(BLOCKS, TOKENS, 2, 8),) * 2, page=256), r"its parts take 1024 bytes a block, not 256"),
        (lambda: wrong((part(BLOCKS, TOKENS, 2, 8),) * 2, shared_by=()), r"no KV cache tensor holds the layers"),
    ],
)
def test_what_cannot_be_copied_by_blocks_is_refused_with_its_shapes(case, message):
    caches, given = case()
    with pytest.raises(ConfigError, match=message):
        canonical_kv_caches(caches, given)
