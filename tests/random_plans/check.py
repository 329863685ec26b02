"""One random job, stored and loaded again, by the product and by a model that moves one byte at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from random_plans.layouts import Caches, random_caches
from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.device.stream_copier import split_at
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.plan.geometry import ChunkGeometry

NUM_BLOCKS = 24
NUM_ROWS = 16


class _Now:
    """A copier that copies at once, in calls of bounded length and never across a boundary, like a device's."""

    def __init__(self, direction: Direction, boundaries: tuple[int, ...], max_descriptors: int) -> None:
        self._direction, self._boundaries, self._max = direction, boundaries, max_descriptors
        self.calls: list[int] = []

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        plan = split_at(plan, self._boundaries)
        for boundary in self._boundaries:
            assert not ((plan.host_addresses < boundary) & (plan.host_addresses + plan.sizes_bytes > boundary)).any()
        for batch in plan.batches(self._max):
            assert 0 < len(batch) <= self._max
            copy_spans(self._direction, batch)

    def finished(self) -> list[CopyResult]:
        return []

    def wait(self, job_ids: set[int]) -> None: ...

    def close(self) -> None: ...


def check(seed: int) -> str:
    """The kind of layout. Raises AssertionError if product and model differ in a byte."""
    rng = random.Random(seed)
    caches = random_caches(rng, NUM_BLOCKS)
    per_chunk, ranks = rng.randint(1, 4), rng.choice([1, 1, 2, 4])
    rank = rng.randrange(ranks)
    geometry = ChunkGeometry(caches.block_bytes, per_chunk, ranks)
    rows = np.frombuffer(bytearray(rng.randbytes(NUM_ROWS * geometry.row_bytes)), np.uint8)
    region = SimpleNamespace(address=rows.ctypes.data, row_bytes=geometry.row_bytes)
    layout = copy_layout(caches.canonical, region, geometry, rank)
    boundaries = tuple(
        rows.ctypes.data + at for at in sorted(rng.sample(range(1, rows.nbytes), rng.choice([0, 0, 1, 3])))
    )
    job = _Job(rng, caches, per_chunk)
    device = caches.memory.numpy().view(np.uint8)

    expected = rows.copy()
    for device_byte, row_byte in job.moves(caches, geometry, rank):
        expected[row_byte] = device[device_byte]
    before = device.copy()
    _transfer(Direction.STORE, layout, job, job.blocks, boundaries, rng)
    assert (rows == expected).all(), f"seed {seed}, {caches.kind}: a store went wrong"
    assert (device == before).all(), f"seed {seed}, {caches.kind}: a store wrote to the device"

    job.move_elsewhere(rng)
    expected = device.copy()
    for device_byte, row_byte in job.moves(caches, geometry, rank):
        expected[device_byte] = rows[row_byte]
    _transfer(Direction.LOAD, layout, job, job.blocks, boundaries, rng)
    assert (device == expected).all(), f"seed {seed}, {caches.kind}: a load went wrong"
    return caches.kind


class _Job:
    """Blocks of every group, distinct over all of them, and the rows they go to."""

    def __init__(self, rng: random.Random, caches: Caches, per_chunk: int) -> None:
        groups = len(caches.groups)
        room_blocks, room_rows = NUM_BLOCKS // groups, NUM_ROWS // groups
        self.per_chunk = per_chunk
        self.sizes, self.firsts, self.chunks = [], [], []
        for _ in range(groups):
            first = rng.randint(0, 9)
            size = rng.randint(0, min(room_blocks, (room_rows - 1) * per_chunk))
            self.sizes.append(size)
            self.firsts.append(first)
            self.chunks.append(-(-(size + first % per_chunk) // per_chunk) if size else 0)
        self.rows = _some(rng, NUM_ROWS, sum(self.chunks))
        self.blocks: list[int] = []
        self.move_elsewhere(rng)

    def move_elsewhere(self, rng: random.Random) -> None:
        self.blocks = _some(rng, NUM_BLOCKS, sum(self.sizes))

    def moves(self, caches: Caches, geometry: ChunkGeometry, rank: int) -> list[tuple[int, int]]:
        """(byte of the device's memory, byte of the rows): the format of a row, as docs/formats.md has it."""
        found = []
        block_at = row_at = 0
        for parts, size, first, chunks in zip(caches.groups, self.sizes, self.firsts, self.chunks, strict=True):
            for number in range(size):
                chunk, place = divmod(first % self.per_chunk + number, self.per_chunk)
                block, row = self.blocks[block_at + number], self.rows[row_at + chunk]
                for start, stride, size_bytes, in_block, share in parts:
                    for byte in range(size_bytes):
                        cell = row * geometry.row_bytes + rank * geometry.rank_cell_bytes
                        row_byte = cell + in_block * self.per_chunk + place * share + byte
                        found.append((start + block * stride + byte, row_byte))
            block_at += size
            row_at += chunks
        return found


def _transfer(
    direction: Direction, layout: object, job: _Job, blocks: list[int], boundaries: tuple[int, ...], rng: random.Random
) -> None:
    copier = _Now(direction, boundaries, rng.choice([1, 2, 7, 4096]))
    device = GPULoadStoreSpec(blocks, group_sizes=job.sizes, block_indices=job.firsts)
    host = CPULoadStoreSpec(job.rows)
    is_store = direction is Direction.STORE
    match generation():
        case Generation.V023:
            from spillway_connector.engine.v023.handlers import CopyHandler

            handler = CopyHandler(direction, layout, copier)
            assert handler.transfer_async(1, (device, host) if is_store else (host, device))
        case Generation.V030:
            from spillway_connector.engine.v030.offload_worker import CopyWorker

            worker = CopyWorker(layout, copier, copier)
            assert worker.submit_store(1, device, host) if is_store else worker.submit_load(1, host, device)


def _some(rng: random.Random, of: int, count: int) -> list[int]:
    """Distinct numbers, often in runs, so that there is something to coalesce."""
    if rng.random() < 0.5:
        return rng.sample(range(of), count)
    start = rng.randint(0, of - count)
    return list(range(start, start + count))
