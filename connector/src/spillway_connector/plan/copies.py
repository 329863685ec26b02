"""Turns block ids into copy descriptors: source, target and size of each piece, as few as the layouts allow.

Pure arithmetic on addresses; no tensor, device, clock or lock. The same plan serves both directions and every
transport: a store reads the device side and writes the host side, a load does the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spillway_connector.errors import PlanError

Addresses = npt.NDArray[np.int64]
_SHARE_ALIGNMENT_BYTES = 512  # no share begins within what a device moves at once


@dataclass(frozen=True, slots=True)
class Segment:
    """One KV tensor as one cache group sees it: where its block b lies on the device and in a host row."""

    device_base: int  # address of block 0
    device_stride_bytes: int  # from one block to the next; at least copy_bytes, more when pages are padded
    host_offset_bytes: int  # of the chunk's first block, from the start of the row
    host_stride_bytes: int  # between the blocks of one chunk inside the row
    copy_bytes: int  # what one block holds, without padding


@dataclass(frozen=True, slots=True)
class CopyLayout:
    """Everything about addresses that does not change from job to job."""

    groups: tuple[tuple[Segment, ...], ...]  # per KV cache group
    host_base: int  # address of row 0
    row_bytes: int
    blocks_per_chunk: int


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Pairs of equally long spans, shape (n,) int64 each; every destination byte appears at most once."""

    device_addresses: Addresses
    host_addresses: Addresses
    sizes_bytes: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.sizes_bytes.sum())

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def share(self, part: int, parts: int) -> CopyPlan:
        """Return the part of the copies that one of `parts` processes makes if all of them hold the same bytes: each
        byte is copied by exactly one process.

        The bytes are counted in the order of the plan, which follows blocks and layers and so is the same in every
        process. Addresses, and with them the spans, differ between processes.
        """
        if parts == 1:
            return self
        ends = np.cumsum(self.sizes_bytes)
        starts, total = ends - self.sizes_bytes, self.total_bytes
        first, behind = _place(total, part, parts), _place(total, part + 1, parts)
        inside = (ends > first) & (starts < behind) & (first < behind)
        cut = np.maximum(first - starts[inside], 0)
        sizes = np.minimum(ends[inside], behind) - starts[inside] - cut
        return CopyPlan(self.device_addresses[inside] + cut, self.host_addresses[inside] + cut, sizes)

    def batches(self, max_descriptors: int) -> Iterator[CopyPlan]:
        """The plan in calls of bounded length (drivers fail on unbounded ones: vllm#49276)."""
        for start in range(0, len(self), max_descriptors):
            part = slice(start, start + max_descriptors)
            yield CopyPlan(self.device_addresses[part], self.host_addresses[part], self.sizes_bytes[part])


def join_plans(plans: Sequence[CopyPlan]) -> CopyPlan:
    """Join plans that are not empty and whose spans do not overlap."""
    if len(plans) == 1:
        return plans[0]
    return CopyPlan(
        np.concatenate([plan.device_addresses for plan in plans]),
        np.concatenate([plan.host_addresses for plan in plans]),
        np.concatenate([plan.sizes_bytes for plan in plans]),
    )


def _place(total_bytes: int, part: int, parts: int) -> int:
    """First byte of a share."""
    if part == parts:
        return total_bytes
    return total_bytes * part // parts // _SHARE_ALIGNMENT_BYTES * _SHARE_ALIGNMENT_BYTES


def plan_copies(
    layout: CopyLayout,
    device_blocks: Addresses,
    group_sizes: Sequence[int],
    first_blocks: Sequence[int],
    rows: Addresses,
) -> CopyPlan:
    """Pair the blocks of a job with their places in host rows.

    device_blocks: shape (sum(group_sizes),), ids of all groups one after another, in logical order.
    first_blocks: per group, the logical index (in device blocks) of its first block; a group that starts inside a
        chunk enters the chunk's row at `first_block % blocks_per_chunk`.
    rows: the rows of all groups one after another, one per chunk touched.
    Raises PlanError when counts do not agree.
    """
    if len(group_sizes) != len(layout.groups) or len(first_blocks) != len(layout.groups):
        raise PlanError(f"{len(layout.groups)} cache groups, but {len(group_sizes)} sizes, {len(first_blocks)} starts")
    if sum(group_sizes) != len(device_blocks):
        raise PlanError(f"group sizes add up to {sum(group_sizes)}, but there are {len(device_blocks)} device blocks")

    per_chunk = layout.blocks_per_chunk
    device_parts: list[Addresses] = []
    host_parts: list[Addresses] = []
    size_parts: list[Addresses] = []
    block_start = row_start = 0
    for segments, size, first in zip(layout.groups, group_sizes, first_blocks, strict=True):
        if size == 0:
            continue
        entry = first % per_chunk
        chunks = -(-(size + entry) // per_chunk)
        group_blocks = device_blocks[block_start : block_start + size]
        group_rows = rows[row_start : row_start + chunks]
        if len(group_rows) != chunks:
            raise PlanError(f"{size} blocks from position {first} touch {chunks} chunks; {len(group_rows)} rows given")
        within = np.arange(entry, entry + size, dtype=np.int64)
        row_of_block = layout.host_base + group_rows[within // per_chunk] * layout.row_bytes
        place_in_chunk = within % per_chunk
        for segment in segments:
            device_parts.append(segment.device_base + group_blocks * segment.device_stride_bytes)
            host_parts.append(row_of_block + segment.host_offset_bytes + place_in_chunk * segment.host_stride_bytes)
            size_parts.append(np.full(size, segment.copy_bytes, dtype=np.int64))
        block_start += size
        row_start += chunks
    if row_start != len(rows):
        raise PlanError(f"the blocks touch {row_start} chunks, but {len(rows)} rows are given")
    if not size_parts:
        nothing = np.empty(0, dtype=np.int64)
        return CopyPlan(nothing, nothing, nothing)
    return _coalesce(np.concatenate(device_parts), np.concatenate(host_parts), np.concatenate(size_parts))


def _coalesce(device: Addresses, host: Addresses, sizes: Addresses) -> CopyPlan:
    """Merge neighbours in the list that run on at both ends."""
    runs_on = (device[1:] == device[:-1] + sizes[:-1]) & (host[1:] == host[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~runs_on)))
    return CopyPlan(device[starts], host[starts], np.add.reduceat(sizes, starts))
