"""vLLM's own tiering spec with a worker for the CPU platform, which vLLM's worker refuses; for tests alone.

Only `get_worker` differs: scheduler half, manager, tier factory and configuration are vLLM's. Copies are made at once,
on the thread that submits them, and as fast as those of Spillway's worker: benchmarks compare the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from spillway_connector.device.copier import Direction
from spillway_connector.device.cpu import copy_spans
from spillway_connector.plan.copies import Addresses, CopyPlan, join_plans


class CpuWorker(OffloadingWorker):
    """One KV group, one block a chunk, one layer a tensor."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, *, canonical: bool) -> None:
        (self._refs,) = caches.group_data_refs
        self._region = region
        self._canonical = canonical
        self._cells = []
        for cache, ref in zip(caches.tensors, self._refs, strict=True):
            blocks = cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            if canonical:
                view = region.create_next_canonical_view(ref.mapping.canonical_page_size_bytes)
            else:
                view = region.create_next_worker_view(cache.page_size_bytes)
            self._cells.append((blocks, view))
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_device=False)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_device=True)

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, *, to_device: bool) -> bool:
        blocks, chunks = device_spec.block_ids.astype(np.int64), host_spec.block_ids.astype(np.int64)
        plans = []
        for ref in self._refs:
            device, host = self._cells[ref.tensor_idx]
            mine = np.ones(len(chunks), bool)
            if self._canonical and not to_device:
                mine[:] = [ref.mapping.is_writer(chunk) for chunk in chunks.tolist()]
            on_device, on_host, sizes = self._spans(ref, device.shape[1])
            device_addresses = device.data_ptr() + blocks[mine, None] * device.stride(0) + on_device
            host_addresses = host.data_ptr() + chunks[mine, None] * host.stride(0) + on_host
            sizes = np.broadcast_to(sizes, device_addresses.shape)
            plans.append(CopyPlan(device_addresses.ravel(), host_addresses.ravel(), sizes.ravel()))
        plan = join_plans(plans)
        copy_spans(Direction.LOAD if to_device else Direction.STORE, plan)
        self._ended.append(TransferResult(job_id, success=True, transfer_size=plan.total_bytes, transfer_time=1e-6))
        return True

    def _spans(self, ref: Any, page_bytes: int) -> tuple[Addresses, Addresses, Addresses]:
        """Return the spans to copy between a device block and its place in a row: offsets on both sides, and sizes."""
        spans = [(0, 0, page_bytes)]
        if self._canonical:
            spans = [
                (
                    run.local_offset + at * run.local_stride,
                    run.canonical_offset + at * run.canonical_stride,
                    run.fragment_size,
                )
                for run in ref.mapping.runs
                for at in range(run.num_fragments)
            ]
        on_device, on_host, sizes = np.array(spans, np.int64).T
        return on_device, on_host, sizes

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once, as nothing is ever under way."""

    def shutdown(self) -> None:
        self._cells.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            self._worker = CpuWorker(kv_caches, region, canonical=self.config.canonical_layout)
        return self._worker
