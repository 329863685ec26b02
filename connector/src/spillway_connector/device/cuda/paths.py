"""Choice of the copy table's paths that this driver and these settings allow."""

from __future__ import annotations

import logging

from spillway_connector.device.copier import Direction
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copy_table import BATCH, LOOP, STAGED, CopyTable

logger = logging.getLogger(__name__)


class CudaPaths:
    """The paths that this driver and these settings allow, shared by both directions of a worker. None is added."""

    def __init__(self, table: CopyTable, *, batch: bool, staged: bool, reason: str) -> None:
        self.table = table
        self.batch = batch
        self.staged = staged
        self.reason = reason
        logger.info("Spillway: device copies by %s (%s)", self.name, reason)

    @property
    def name(self) -> str:
        """The path of large pieces, for logs and metrics."""
        return BATCH if self.batch else LOOP

    def choose(self, direction: Direction, pieces: int, total_bytes: int) -> str:
        path_of = self.table.store_path if direction is Direction.STORE else self.table.load_path
        path = path_of(total_bytes / pieces)
        if path == STAGED and not self.staged:
            path = BATCH
        return LOOP if path == BATCH and not self.batch else path

    def drop_batch(self, reason: str) -> None:
        """The driver refused a batch as unsupported."""
        if self.batch:
            self.batch, self.reason = False, reason
            logger.warning("Spillway: device copies by loop from now on: %s", reason)

    def drop_staged(self, reason: str) -> None:
        """The kernel or its buffers cannot be had."""
        if self.staged:
            self.staged = False
            logger.warning("Spillway: no staged copies from now on: %s", reason)


def choose_cuda_paths(table: CopyTable, mode: str, batch_version: int | None) -> CudaPaths:
    """mode: batch_memcpy's auto, on or off. Raises ConfigError for `on` if the driver has no batched copy."""
    if mode == "off":
        return CudaPaths(table, batch=False, staged=False, reason="batch_memcpy: off")
    if batch_version is None:
        if mode == "on":
            raise ConfigError(
                "batch_memcpy: 'on' cannot work here: the driver has no cuMemcpyBatchAsync; install a driver of "
                "CUDA 12.8 or newer, or set batch_memcpy to 'auto' or 'off'"
            )
        return CudaPaths(table, batch=False, staged=True, reason="batch_memcpy: auto, no cuMemcpyBatchAsync")
    return CudaPaths(table, batch=True, staged=True, reason=f"batch_memcpy: {mode}, as of CUDA {batch_version}")
