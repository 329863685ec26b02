"""vLLM's OffloadingWorker over Spillway's copiers: plans each job, and reports how it ended."""

from __future__ import annotations

import logging

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from spillway_connector.device.copier import Copier, CopyResult
from spillway_connector.plan.copies import CopyLayout, plan_copies

logger = logging.getLogger(__name__)


class CopyWorker(OffloadingWorker):
    """One batched copy a job. Each rank's process, model-runner thread.

    A job that a copier refuses is answered with False, never with an exception: stock callers assert on it, and
    engine/v030/worker.py has its request recompute.
    """

    def __init__(self, layout: CopyLayout, store: Copier, load: Copier, share: tuple[int, int] = (0, 1)) -> None:
        """share: the part of each store that this rank copies (ChunkGeometry.store_share)."""
        self._layout = layout
        self._share = share
        self._store, self._load = store, load

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(self._store, job_id, src_spec, dst_spec, self._share)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(self._load, job_id, dst_spec, src_spec, (0, 1))

    def _submit(
        self, copier: Copier, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, share: tuple[int, int]
    ) -> bool:
        try:
            assert isinstance(host, BlockIDsLoadStoreSpec)
            plan = plan_copies(
                self._layout,
                device.block_ids.astype(np.int64, copy=False),
                device.group_sizes,
                device.block_indices,
                host.block_ids.astype(np.int64, copy=False),
            )
            copier.submit(job_id, plan.share(*share))
        except Exception:  # of any kind: the engine goes on without this copy
            logger.exception("KV job %d cannot be copied", job_id)
            return False
        return True

    def get_finished(self) -> list[TransferResult]:
        return [_result(one) for copier in (self._store, self._load) for one in copier.finished()]

    def wait(self, job_ids: set[int]) -> None:
        self._store.wait(job_ids)
        self._load.wait(job_ids)

    def shutdown(self) -> None:
        self._store.close()
        self._load.close()


def _result(result: CopyResult) -> TransferResult:
    if result.error is not None:
        logger.warning("KV job %d: %s", result.job_id, result.error)
    return TransferResult(
        job_id=result.job_id,
        success=result.error is None,
        transfer_size=result.size_bytes,
        transfer_time=result.seconds,
    )
