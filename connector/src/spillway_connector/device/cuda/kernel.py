"""Launching the kernel of staged copies: it moves pieces inside device memory by a table of (source, target, bytes).

The kernel needs Triton, a dependency of vLLM on CUDA. It reads the table, 24 bytes a piece, in pinned host memory: an
upload would cost another copy and another wait.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from spillway_connector.device.cuda.bursts import WORD_BYTES
from spillway_connector.errors import DeviceCopyError

_PART_BYTES = 16_384  # of one program
_WARPS = 4


class SpanKernel(Protocol):
    """Enqueues one launch."""

    def launch(self, table_address: int, pieces: int, largest_bytes: int, stream: int) -> None:
        """table_address: the address of `pieces` rows of three int64: source, target, bytes. Raises DeviceCopyError."""


class TritonKernel:
    """The first launch compiles: make it before the first job."""

    def __init__(self, device: int) -> None:
        """Raises DeviceCopyError when Triton is missing."""
        try:
            self._torch: Any = importlib.import_module("torch")
            self._kernel: Any = importlib.import_module("spillway_connector.device.cuda.gather").move_spans
        except ImportError as error:
            raise DeviceCopyError(f"no gather kernel: {error}") from error
        self._device = device
        self._streams: dict[int, Any] = {}

    def launch(self, table_address: int, pieces: int, largest_bytes: int, stream: int) -> None:
        if stream not in self._streams:
            self._streams[stream] = self._torch.cuda.ExternalStream(stream, device=self._device)
        grid = (pieces, -(-largest_bytes // _PART_BYTES))
        try:
            with self._torch.cuda.stream(self._streams[stream]):
                self._kernel[grid](table_address, PART_WORDS=_PART_BYTES // WORD_BYTES, num_warps=_WARPS)
        except Exception as error:  # of compiler or launch, of any kind: another path can do the copy
            raise DeviceCopyError(f"the gather kernel was refused: {error!r}") from error
