"""Turns vLLM's transfer jobs into plans for a copier: one handler per direction."""

from __future__ import annotations

import itertools

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

from spillway_connector.device.copier import Copier, Direction
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.v023.ascend import AscendKVCaches
from spillway_connector.plan.copies import CopyLayout, Segment, plan_copies
from spillway_connector.plan.geometry import ChunkGeometry

_TRANSFER_TYPE = {Direction.STORE: ("GPU", "CPU"), Direction.LOAD: ("CPU", "GPU")}  # vLLM's words for its metrics


def copy_layout(kv_caches: CanonicalKVCaches, region: HostRegion, geometry: ChunkGeometry, rank: int) -> CopyLayout:
    """Where each KV tensor's blocks lie on the device and in the rank's cell of a host row.

    A cell holds the canonical tensors one after another, each as `blocks_per_chunk` whole pages, the order in which
    vLLM registered them: the layout upstream's tiers use, so that files of both can be compared. Tensors of Ascend
    layouts carry their offsets.
    """
    if isinstance(kv_caches, AscendKVCaches):
        starts = kv_caches.row_offsets
    else:
        starts = list(itertools.accumulate((cache.page_size_bytes for cache in kv_caches.tensors), initial=0))[:-1]
    cell = rank * geometry.rank_cell_bytes
    offsets = [cell + start * geometry.blocks_per_chunk for start in starts]
    end_of_cell = cell + geometry.rank_cell_bytes
    for offset, cache in zip(offsets, kv_caches.tensors, strict=True):
        end = offset + cache.page_size_bytes * geometry.blocks_per_chunk
        assert end <= end_of_cell, f"a KV tensor ends at byte {end} of a row, the rank's cell at {end_of_cell}"
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


class CopyHandler(OffloadingHandler):
    """vLLM's OffloadingHandler for one direction: plans jobs and reports results. Each rank's process, model thread."""

    def __init__(self, direction: Direction, layout: CopyLayout, copier: Copier) -> None:
        self._direction = direction
        self._layout = layout
        self._copier = copier

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Raises PlanError or DeviceCopyError; vLLM's worker turns either into a refused job."""
        device, host = spec if self._direction is Direction.STORE else spec[::-1]
        assert isinstance(device, GPULoadStoreSpec)
        assert isinstance(host, BlockIDsLoadStoreSpec)
        plan = plan_copies(
            self._layout,
            device.block_ids.astype(np.int64, copy=False),
            device.group_sizes,
            device.block_indices,
            host.block_ids.astype(np.int64, copy=False),
        )
        self._copier.submit(job_id, plan)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=result.job_id,
                success=result.error is None,
                transfer_size=result.size_bytes,
                transfer_time=result.seconds,
                transfer_type=_TRANSFER_TYPE[self._direction],
            )
            for result in self._copier.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        self._copier.close()
