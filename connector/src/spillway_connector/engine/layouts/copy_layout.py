"""Where each KV tensor's blocks lie on the device and in the rank's cell of a host row."""

from __future__ import annotations

import itertools

from vllm.v1.kv_offload.base import CanonicalKVCaches

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copies import CopyLayout, Segment
from spillway_connector.plan.geometry import ChunkGeometry


def copy_layout(kv_caches: CanonicalKVCaches, region: HostRegion, geometry: ChunkGeometry, rank: int) -> CopyLayout:
    """A cell holds the canonical tensors one after another, each as `blocks_per_chunk` whole pages, in the order in
    which vLLM registered them: the layout upstream's tiers use, so that files of both can be compared. Caches with
    places of their own (PlacedKVCaches) lie there.

    Raises ConfigError if they do not fit into the rank's cell.
    """
    if isinstance(kv_caches, PlacedKVCaches):
        starts = kv_caches.row_offsets
    else:
        starts = list(itertools.accumulate((cache.page_size_bytes for cache in kv_caches.tensors), initial=0))[:-1]
    cell = geometry.cell_of(rank)
    offsets = [cell + start * geometry.blocks_per_chunk for start in starts]
    end_of_cell = cell + geometry.rank_cell_bytes
    for offset, cache in zip(offsets, kv_caches.tensors, strict=True):
        end = offset + cache.page_size_bytes * geometry.blocks_per_chunk
        if end > end_of_cell:
            raise ConfigError(
                f"a KV tensor ends at byte {end} of a row, but the cell of rank {rank} at {end_of_cell}: vLLM counts "
                f"{geometry.rank_block_bytes} bytes a block, and registered more; turn offload off for this model"
            )
    groups = []
    for refs in kv_caches.group_data_refs:
        segments = []
        for ref in refs:
            cache = kv_caches.tensors[ref.tensor_idx]
            segments.append(
                Segment(
                    device_base=cache.tensor.data_ptr(),
                    device_stride_bytes=cache.tensor.stride(0) * cache.tensor.element_size(),
                    host_offset_bytes=offsets[ref.tensor_idx],
                    host_stride_bytes=cache.page_size_bytes,
                    copy_bytes=ref.page_size_bytes,
                )
            )
        groups.append(tuple(segments))
    return CopyLayout(tuple(groups), region.address, region.row_bytes, geometry.blocks_per_chunk)
