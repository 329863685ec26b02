"""vLLM's own allocator with two KV groups and just enough blocks: no block may serve two groups."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.vllm_parts import part_of

BLOCK = 16
COMMON = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def coordinator(num_blocks: int, window_blocks: int) -> KVCacheCoordinator:
    patch_vllm("group-hits")
    specs = [FullAttentionSpec(**COMMON), SlidingWindowSpec(**COMMON, sliding_window=window_blocks * BLOCK)]
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[KVCacheTensor(size=specs[0].page_size_bytes * num_blocks, shared_by=["full", "window"])],
        kv_cache_groups=[KVCacheGroupSpec(["full"], specs[0]), KVCacheGroupSpec(["window"], specs[1])],
    )
    return get_kv_cache_coordinator(config, 1024, 1024, False, True, False, 1, 1, BLOCK, BLOCK)


def blocks_that_leave_first(opened: KVCacheCoordinator, count: int) -> list[KVCacheBlock]:
    return opened.block_pool.free_block_queue.get_all_free_blocks()[:count]


@pytest.mark.parametrize("window_blocks", [2, 4])
def test_a_load_takes_no_block_that_another_group_has_on_the_device(window_blocks: int):
    opened = coordinator(num_blocks=32, window_blocks=window_blocks)
    full, window = blocks_that_leave_first(opened, 4)[:2], blocks_that_leave_first(opened, 4)[2:]
    free_before = opened.block_pool.get_num_free_blocks()
    # Two blocks on the device in each group, and two more that are loaded.
    opened.allocate_new_computed_blocks("r", (full, window), 2 * BLOCK, 2 * BLOCK)
    held = [block for blocks in opened.get_blocks("r") for block in blocks if not block.is_null]
    assert len({block.block_id for block in held}) == len(held)
    assert {block.ref_cnt for block in held} == {1}
    assert opened.block_pool.get_num_free_blocks() == free_before - len(held)
    if window_blocks == 4:
        assert opened.get_blocks("r")[1][:2] == window
    for manager in opened.single_type_managers:
        manager.free("r")
    assert opened.block_pool.get_num_free_blocks() == free_before


def test_exactly_as_many_blocks_as_the_sum_that_admitted_the_request():
    """A window that leaves its blocks on the device behind must not hold them while others are short."""
    opened = coordinator(num_blocks=1 + 6, window_blocks=1)
    full, window = blocks_that_leave_first(opened, 4)[:2], blocks_that_leave_first(opened, 4)[2:]
    opened.allocate_new_computed_blocks("r", (full, window), 2 * BLOCK, 2 * BLOCK)
    assert [len(blocks) for blocks in opened.get_blocks("r")] == [4, 4]


def test_other_allocations_are_vllm_s():
    opened = coordinator(num_blocks=8, window_blocks=2)
    opened.allocate_new_computed_blocks("r", ([], []), 0, 0)
    assert opened.get_blocks("r") == ([], [])
    attention = part_of(FullAttentionManager, allocate_new_computed_blocks=lambda *seen: None)
    single = part_of(UnitaryKVCacheCoordinator, single_type_managers=[attention])
    KVCacheCoordinator.allocate_new_computed_blocks(single, "r", ([],), 0, BLOCK)  # needs no pool


def test_twice_is_harmless():
    patch_vllm("group-hits")
    before = KVCacheCoordinator.allocate_new_computed_blocks
    patch_vllm("group-hits")
    assert KVCacheCoordinator.allocate_new_computed_blocks is before
