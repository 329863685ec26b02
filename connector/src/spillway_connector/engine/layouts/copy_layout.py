"""Places of each KV tensor's blocks on the device and in the rank's cell of a host row, and what a job copies."""

from __future__ import annotations

import itertools

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copies import CopyLayout, CopyPlan, Segment, plan_copies
from spillway_connector.plan.geometry import ChunkGeometry


def copy_layout(kv_caches: CanonicalKVCaches, region: HostRegion, geometry: ChunkGeometry, rank: int) -> CopyLayout:
    """A cell holds the canonical tensors one after another, each as `blocks_per_chunk` whole pages, in the order in
    which vLLM registered them: the layout vLLM's tiers use, so that files of both can be compared. Caches with
    places of their own (PlacedKVCaches) lie there. If a cell is smaller than that, which group_block_bytes() decides,
    each group fills it from its start.

    Raises ConfigError if they do not fit into the rank's cell.
    """
    starts = _starts(kv_caches)
    ends = (start + cache.page_size_bytes for start, cache in zip(starts, kv_caches.tensors, strict=True))
    each_by_itself = max(ends, default=0) > geometry.rank_block_bytes
    cell, per_chunk = geometry.cell_of(rank), geometry.blocks_per_chunk
    groups = []
    for refs in kv_caches.group_data_refs:
        segments = []
        behind = 0  # of the group's parts before this one
        for ref in refs:
            cache = kv_caches.tensors[ref.tensor_idx]
            page_bytes = ref.page_size_bytes if each_by_itself else cache.page_size_bytes
            start = behind if each_by_itself else starts[ref.tensor_idx]
            behind += page_bytes
            if start + page_bytes > geometry.rank_block_bytes:
                raise ConfigError(
                    f"a KV tensor ends at byte {cell + (start + page_bytes) * per_chunk} of a row, but the cell of "
                    f"rank {rank} at {cell + geometry.rank_cell_bytes}: vLLM counts {geometry.rank_block_bytes} bytes "
                    "a block, and registered more; turn offload off for this model"
                )
            segments.append(
                Segment(
                    device_base=cache.tensor.data_ptr(),
                    device_stride_bytes=cache.tensor.stride(0) * cache.tensor.element_size(),
                    host_offset_bytes=cell + start * per_chunk,
                    host_stride_bytes=page_bytes,
                    copy_bytes=ref.page_size_bytes,
                )
            )
        groups.append(tuple(segments))
    return CopyLayout(tuple(groups), region.address, region.row_bytes, per_chunk)


def plan_job(layout: CopyLayout, device: GPULoadStoreSpec, host: LoadStoreSpec) -> CopyPlan:
    """The spans that one of vLLM's jobs copies. Raises PlanError."""
    assert isinstance(host, BlockIDsLoadStoreSpec)
    return plan_copies(
        layout,
        device.block_ids.astype(np.int64, copy=False),
        device.group_sizes,
        device.block_indices,
        host.block_ids.astype(np.int64, copy=False),
    )


def _starts(kv_caches: CanonicalKVCaches) -> list[int]:
    """The offset of each tensor's bytes within one block of all tensors."""
    if isinstance(kv_caches, PlacedKVCaches):
        return kv_caches.row_offsets
    return list(itertools.accumulate((cache.page_size_bytes for cache in kv_caches.tensors), initial=0))[:-1]
