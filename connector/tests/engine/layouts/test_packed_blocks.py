"""Rows of DeepSeek V4, whose layers vLLM packs into blocks: as large as the largest group, without the pages' padding.

vLLM's own functions make groups, placements and views; the bytes go through a row and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms.interface import Platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.layouts import packed_blocks
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.engine.layouts.packed_blocks import (
    NOT_KNOWN_HERE,
    is_packed,
    layer_specs,
    plain_page_bytes,
    row_block_bytes,
)
from spillway_connector.plan.copies import plan_copies
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.kv_caches import (
    BLOCKS_OUTERMOST,
    counted_block_bytes,
    deepseek_v4,
    kv_cache_config,
    of_scheduler,
)
from spillway_connector.testing.vllm_parts import part_of

ROW_BLOCK_BYTES = 985_664  # of the 62 pages of full attention: 21 of 37,376 and of 8,448 bytes, and 20 of 1,168
BLOCKS, ROWS = 3, 2
V023 = generation() is Generation.V023


@pytest.fixture(scope="module")
def worker_config() -> KVCacheConfig:
    return kv_cache_config(deepseek_v4(), BLOCKS * 1_050_000)


def test_a_row_has_no_room_for_the_padding_of_pages(worker_config: KVCacheConfig) -> None:
    counted = counted_block_bytes(worker_config)
    assert counted >= 1_002_240
    assert row_block_bytes(worker_config, counted) == ROW_BLOCK_BYTES


def test_the_schedulers_process_asks_the_workers(worker_config: KVCacheConfig) -> None:
    scheduler_config = of_scheduler(worker_config)
    assert is_packed(scheduler_config) and is_packed(worker_config)
    assert row_block_bytes(scheduler_config, counted_block_bytes(scheduler_config)) == NOT_KNOWN_HERE


def test_a_saving_that_is_not_worth_a_copy_for_each_layer_is_left(worker_config: KVCacheConfig) -> None:
    assert row_block_bytes(worker_config, ROW_BLOCK_BYTES + 5000) == ROW_BLOCK_BYTES + 5000


def test_the_parts_of_an_npu_are_counted_as_vllm_counts_them(
    worker_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_blocks, "current_platform", part_of(Platform, device_type="npu"))
    for config in (worker_config, of_scheduler(worker_config)):
        assert row_block_bytes(config, 1_002_240) == 1_002_240


def test_pages_of_one_size_are_counted_as_vllm_counts_them() -> None:
    heads: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    specs: dict[str, KVCacheSpec] = {f"full.{n}": FullAttentionSpec(**heads) for n in range(4)}
    specs |= {f"window.{n}": SlidingWindowSpec(**heads, sliding_window=64) for n in range(8)}
    config = kv_cache_config(specs, 1 << 24)
    assert len(config.kv_cache_groups) > 1
    assert row_block_bytes(config, 12_345) == row_block_bytes(of_scheduler(config), 12_345) == 12_345


@dataclass
class Device:
    """A worker's caches: canonical ones, and a layer's plain page in a block."""

    memory: list[torch.Tensor]
    caches: CanonicalKVCaches
    page: Callable[[str, int], torch.Tensor]


def device_of(config: KVCacheConfig) -> Device:
    return _device_v023(config) if V023 else _device_v030(config)


def _device_v023(config: KVCacheConfig) -> Device:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    memory = [torch.randint(-128, 128, (tensor.size,), dtype=torch.int8) for tensor in config.kv_cache_tensors]
    of_layer = {
        layer: raw for tensor, raw in zip(config.kv_cache_tensors, memory, strict=True) for layer in tensor.shared_by
    }
    found: list[CanonicalKVCaches] = []
    spec = part_of(CPUOffloadingSpec, kv_cache_config=config)
    worker = part_of(OffloadingConnectorWorker, spec=spec, _register_handlers=found.append)
    worker.register_kv_caches(of_layer)
    plain = {layer: plain_page_bytes(spec) for group in config.kv_cache_groups for layer, spec in layer_specs(group)}

    def page(layer: str, block: int) -> torch.Tensor:
        return of_layer[layer].view(config.num_blocks, -1)[block, : plain[layer]]

    return Device(memory, found[0], page)


def _device_v030(config: KVCacheConfig) -> Device:
    from vllm.v1.kv_cache_interface import create_kv_cache_views

    from spillway_connector.engine.v030.kv_blocks import place_kv_caches

    raw = torch.randint(-128, 128, (config.kv_cache_tensors[0].size,), dtype=torch.int8)
    specs = {layer: spec for group in config.kv_cache_groups for layer, spec in layer_specs(group)}
    views: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        of_tensor = create_kv_cache_views(raw, specs[tensor.layers[0]], config.num_blocks, BLOCKS_OUTERMOST, tensor)
        views |= dict(zip(tensor.layers, of_tensor, strict=True))
    groups = range(len(config.kv_cache_groups))
    placed = place_kv_caches(views, config, groups, ROW_BLOCK_BYTES)

    def page(layer: str, block: int) -> torch.Tensor:
        flat = views[layer][block].contiguous().view(-1).view(torch.int8)
        assert flat.numel() == plain_page_bytes(specs[layer])
        return flat

    return Device([raw], placed, page)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_group_comes_back_whole(worker_config: KVCacheConfig, ranks: int) -> None:
    device = device_of(worker_config)
    geometry = ChunkGeometry(ROW_BLOCK_BYTES, blocks_per_chunk=1, num_ranks=ranks)
    for number, group in enumerate(worker_config.kv_cache_groups):
        for memory in device.memory:
            memory.random_(-128, 128)
        rows = np.full(ROWS * geometry.row_bytes, 0x77, np.uint8)
        region: Any = SimpleNamespace(address=rows.ctypes.data, row_bytes=geometry.row_bytes)
        layout = copy_layout(device.caches, region, geometry, ranks - 1)
        sizes = [int(at == number) for at in range(len(worker_config.kv_cache_groups))]
        firsts = [0] * len(sizes)
        before = {layer: device.page(layer, 2).clone() for layer in group.layer_names}

        copy_spans(Direction.STORE, plan_copies(layout, np.array([2]), sizes, firsts, np.array([1])))
        cell = geometry.row_bytes + geometry.cell_of(ranks - 1)
        outside = np.delete(rows, range(cell, cell + geometry.rank_cell_bytes))
        assert (outside == 0x77).all()
        for memory in device.memory:
            memory.zero_()
        load = plan_copies(layout, np.array([1]), sizes, firsts, np.array([1]))
        copy_spans(Direction.LOAD, load)

        assert all(torch.equal(device.page(layer, 1), page) for layer, page in before.items())
        assert not any(device.page(layer, block).any() for layer in group.layer_names for block in (0, 2))
        held = sum(plain_page_bytes(spec) for _, spec in layer_specs(group))
        assert held <= load.total_bytes <= ROW_BLOCK_BYTES


@pytest.mark.skipif(V023, reason="its layers are allocations of their own")
def test_a_group_that_fits_with_its_padding_moves_as_one_piece(worker_config: KVCacheConfig) -> None:
    pieces = [len(refs) for refs in device_of(worker_config).caches.group_data_refs]
    assert sorted(pieces) == [1, 1, 1, 1, 62]
