"""Two ranks that hold the same KV, one row of host memory: each stores its share, and loads all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import HostCopier
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.plan.copies import CopyLayout
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.memory import unnamed_region

RANKS, LAYERS, BLOCKS, PAGE_BYTES = 2, 3, 6, 2048
GEOMETRY = ChunkGeometry(LAYERS * PAGE_BYTES, blocks_per_chunk=2, num_ranks=RANKS, one_cell=True)
CHUNK = CPULoadStoreSpec([1])  # row 1


@pytest.fixture
def region() -> Iterator[HostRegion]:
    opened = unnamed_region(3, GEOMETRY.row_bytes)
    yield opened
    opened.cleanup()


class Rank:
    """One rank's KV caches and its part of this generation's worker half."""

    def __init__(self, rank: int, region: HostRegion, kv: torch.Tensor) -> None:
        self.kv = kv.clone()
        tensors = [CanonicalKVCacheTensor(layer, PAGE_BYTES) for layer in self.kv]
        refs: Any = [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]]
        layout = copy_layout(CanonicalKVCaches(tensors, refs), region, GEOMETRY, rank)
        self._copiers = {direction: HostCopier(direction) for direction in Direction}
        self._submit = _submitter(layout, self._copiers, GEOMETRY.store_share(rank))

    def copy(self, direction: Direction, blocks: list[int]) -> int:
        """Bytes moved."""
        device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        self._submit(direction, device)
        copier = self._copiers[direction]
        copier.wait({1})
        [result] = copier.finished()
        assert result.error is None
        return result.size_bytes

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.close()


def _submitter(layout: CopyLayout, copiers: dict[Direction, HostCopier], share: tuple[int, int]) -> Any:
    store, load = copiers[Direction.STORE], copiers[Direction.LOAD]
    if generation() is Generation.V023:
        from spillway_connector.engine.v023.handlers import CopyHandler

        handlers = {
            Direction.STORE: CopyHandler(Direction.STORE, layout, store, share),
            Direction.LOAD: CopyHandler(Direction.LOAD, layout, load),
        }
        return lambda direction, device: handlers[direction].transfer_async(
            1, (device, CHUNK) if direction is Direction.STORE else (CHUNK, device)
        )
    from spillway_connector.engine.v030.offload_worker import CopyWorker

    worker = CopyWorker(layout, store, load, share)
    return lambda direction, device: (
        worker.submit_store(1, device, CHUNK) if direction is Direction.STORE else worker.submit_load(1, CHUNK, device)
    )


@pytest.fixture
def ranks(region: HostRegion) -> Iterator[list[Rank]]:
    kv = torch.from_numpy(np.random.default_rng(0).integers(-128, 127, (LAYERS, BLOCKS, PAGE_BYTES), np.int8))
    opened = [Rank(rank, region, kv) for rank in range(RANKS)]
    yield opened
    for rank in opened:
        rank.close()


def test_each_rank_stores_its_share_and_loads_all(ranks):
    moved = [rank.copy(Direction.STORE, [4, 2]) for rank in ranks]
    assert moved == [GEOMETRY.payload_bytes // RANKS] * RANKS

    for rank in ranks:
        stored = rank.kv[:, [4, 2]].clone()
        rank.kv[:, [0, 5]] = 0
        assert rank.copy(Direction.LOAD, [0, 5]) == GEOMETRY.payload_bytes
        assert torch.equal(rank.kv[:, [0, 5]], stored)


def test_without_one_rank_s_share_a_chunk_is_not_whole(ranks):
    """A store counts only when all ranks have ended it well, because of this."""
    ranks[0].copy(Direction.STORE, [4, 2])
    stored = ranks[1].kv[:, [4, 2]].clone()
    ranks[1].copy(Direction.LOAD, [0, 5])

    assert not torch.equal(ranks[1].kv[:, [0, 5]], stored)
