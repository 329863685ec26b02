"""Which way a job's bytes cross the link on CUDA: a table by direction and size of piece, measured, not a rule.

    loop    one call a piece
    batch   one call for thousands of pieces (cuMemcpyBatchAsync, from CUDA 12.8)
    staged  a kernel gathers the pieces into a buffer on the device, which crosses in long bursts; loads the reverse

`make bench-copy` measures all three for every size and prints the table that fits the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spillway_connector.device.copier import Direction
from spillway_connector.errors import ConfigError

logger = logging.getLogger(__name__)

LOOP, BATCH, STAGED = "loop", "batch", "staged"
PATHS = (LOOP, BATCH, STAGED)


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Per direction: (pieces up to this many bytes, path), ascending; beyond the last row, batch."""

    store: tuple[tuple[int, str], ...]
    load: tuple[tuple[int, str], ...]

    def path(self, direction: Direction, piece_bytes: float) -> str:
        rows = self.store if direction is Direction.STORE else self.load
        return next((path for limit, path in rows if piece_bytes <= limit), BATCH)

    @property
    def uses_staging(self) -> bool:
        return any(path == STAGED for _, path in self.store + self.load)

    @classmethod
    def parse(cls, given: Mapping[str, Sequence[Sequence[object]]]) -> CopyTable:
        """{"store": [[65536, "staged"]], "load": []}, as bench-copy writes it. Raises ConfigError."""
        unknown = set(given) - {"store", "load"}
        if unknown:
            raise ConfigError(f"copy_table: unknown key {sorted(unknown)[0]!r}; known keys: store, load")
        sides: dict[str, tuple[tuple[int, str], ...]] = {}
        for side in ("store", "load"):
            rows: list[tuple[int, str]] = []
            for row in given.get(side, ()):
                limit, path = row if len(row) == 2 else (None, None)
                if not isinstance(limit, int) or path not in PATHS or (rows and limit <= rows[-1][0]):
                    raise ConfigError(
                        f"copy_table: {side}: {row!r} is not [bytes, {' | '.join(PATHS)}] with bytes in ascending order"
                    )
                rows.append((limit, str(path)))
            sides[side] = tuple(rows)
        return cls(**sides)


# One H200 (PCIe 5), medians of bench-copy; docs/cuda.md has the figures.
H200_TABLE = CopyTable(store=((524_288, STAGED),), load=((524_288, STAGED),))


class CudaPaths:
    """What this driver and these settings allow, shared by both directions of a worker; it can only shrink."""

    def __init__(self, table: CopyTable, *, batch: bool, staged: bool, reason: str) -> None:
        self.table = table
        self.batch = batch
        self.staged = staged
        self.reason = reason
        logger.info("Spillway: device copies by %s (%s)", self.name, reason)

    @property
    def name(self) -> str:
        """For logs and metrics: the way large pieces go."""
        return BATCH if self.batch else LOOP

    def choose(self, direction: Direction, pieces: int, total_bytes: int) -> str:
        path = self.table.path(direction, total_bytes / pieces)
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
    """mode: batch_memcpy's auto, on or off. Raises ConfigError for `on` where the driver has no batched copy."""
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
