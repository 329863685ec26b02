"""Everything one worker opens to reach its GPU: the driver, the pinned CPU tier and a copier for each direction."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.copier import CudaCopier
from spillway_connector.device.cuda.driver import CudaDriver
from spillway_connector.device.cuda.kernel import SpanKernel, TritonKernel
from spillway_connector.device.cuda.paths import choose_cuda_paths
from spillway_connector.device.cuda.staging import SLOT_BYTES, CudaStaging
from spillway_connector.device.host_region import HostRegion
from spillway_connector.device.pinned import CHUNK_BYTES, HostPin, PinMethod, Registrar, pin_host_memory
from spillway_connector.device.stream_copier import CopyLimits
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copy_table import CopyTable

logger = logging.getLogger(__name__)


class CudaTransport:
    """The CUDA transport of a worker, opened once; it closes itself when its last copier is closed."""

    def __init__(
        self,
        driver: CudaDriver,
        region: HostRegion,
        device: int,
        compute_stream: Callable[[], int],
        batch_memcpy: str,
        *,
        table: CopyTable,
        kernel: Callable[[int], SpanKernel] = TritonKernel,
        limits: CopyLimits | None = None,
        pin_chunk_bytes: int = CHUNK_BYTES,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Raises ConfigError when batch_memcpy is `on` and cannot work, CudaError when the device cannot be used."""
        self._driver = driver
        self._device = device
        self._compute_stream = compute_stream
        self._kernel = kernel
        self._limits = limits
        self._slot_bytes = slot_bytes
        self._open_copiers = 0
        self.path = choose_cuda_paths(table, batch_memcpy, driver.batch_version)
        driver.set_device(device)
        registrar = Registrar(PinMethod.CUDA, driver.host_register_pinned, driver.host_unregister)
        self.pin: HostPin = pin_host_memory(
            region.address, region.num_rows, region.row_bytes, [registrar], pin_chunk_bytes
        )

    def copier(self, direction: Direction) -> CudaCopier:
        """Raises CudaError."""
        copier = CudaCopier(
            direction,
            self._driver,
            self._device,
            self.path,
            self._compute_stream,
            staging=self._open_staging(direction),
            host_boundaries=self.pin.boundaries,
            limits=self._limits,
            on_close=self._copier_closed,
        )
        self._open_copiers += 1
        return copier

    def _open_staging(self, direction: Direction) -> CudaStaging | None:
        if not (self.path.staged and self.path.table.uses_staging):
            return None
        if not self.pin.pinned:
            self.path.drop_staged("the CPU tier is not pinned")
            return None
        try:
            return CudaStaging(self._driver, direction, self._kernel(self._device), slot_bytes=self._slot_bytes)
        except DeviceCopyError as error:
            self.path.drop_staged(str(error))
            return None

    def _copier_closed(self) -> None:
        self._open_copiers -= 1
        if self._open_copiers:
            return
        self.pin.release()
        try:
            self._driver.close_device(self._device)
        except DeviceCopyError as error:
            logger.warning("Spillway: giving back device %d: %s", self._device, error)


def torch_cuda_device() -> tuple[int, Callable[[], int]]:
    """The device this process computes on, and how to ask for the stream it computes on now."""
    cuda: Any = importlib.import_module("torch").cuda
    return int(cuda.current_device()), lambda: int(cuda.current_stream().cuda_stream)
