"""Turns vLLM's transfer jobs into plans for a copier: one handler per direction."""

from __future__ import annotations

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult, TransferSpec

from spillway_connector.device.copier import Copier, Direction
from spillway_connector.plan.copies import CopyLayout, plan_copies

_TRANSFER_TYPE = {Direction.STORE: ("GPU", "CPU"), Direction.LOAD: ("CPU", "GPU")}  # vLLM's words for its metrics


class CopyHandler(OffloadingHandler):
    """vLLM's OffloadingHandler for one direction: plans jobs and reports results. Each rank's process, model thread."""

    def __init__(
        self, direction: Direction, layout: CopyLayout, copier: Copier, share: tuple[int, int] = (0, 1)
    ) -> None:
        """share: the part of each job that this rank copies (ChunkGeometry.store_share)."""
        self._direction = direction
        self._layout = layout
        self._copier = copier
        self._share = share

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
        self._copier.submit(job_id, plan.share(*self._share))
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
