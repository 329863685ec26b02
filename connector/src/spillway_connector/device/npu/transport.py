"""Everything one worker opens to reach its NPU: the runtime, the pinned CPU tier and a copier for each direction."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from spillway_connector.device.copier import Direction
from spillway_connector.device.host_region import HostRegion
from spillway_connector.device.npu.acl import Acl
from spillway_connector.device.npu.acl_batch import choose_copy_path
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.device.npu.registrars import acl_registrar, torch_npu_registrar
from spillway_connector.device.pinned import CHUNK_BYTES, HostPin, pin_host_memory
from spillway_connector.device.stream_copier import CopyLimits


class NpuTransport:
    """The NPU transport of a worker, opened once; it closes itself when its last copier is closed."""

    def __init__(
        self,
        acl: Acl,
        region: HostRegion,
        device: int,
        compute_stream: Callable[[], int],
        batch_memcpy: str,
        *,
        limits: CopyLimits | None = None,
        pin_chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Raises ConfigError when batch_memcpy is `on` and cannot work, AclError when the device cannot be used."""
        self._acl = acl
        self._device = device
        self._compute_stream = compute_stream
        self._limits = limits
        self._open_copiers = 0
        acl.set_device(device)
        self.path = choose_copy_path(acl, batch_memcpy, device)
        registrars = [acl_registrar(acl)]
        hook = torch_npu_registrar()
        if hook is not None:
            registrars.append(hook)
        self.pin: HostPin = pin_host_memory(
            region.address, region.num_rows, region.row_bytes, registrars, pin_chunk_bytes
        )

    def copier(self, direction: Direction) -> NpuCopier:
        """Raises AclError."""
        copier = NpuCopier(
            direction,
            self._acl,
            self._device,
            self.path,
            self._compute_stream,
            host_pinned=self.pin.pinned,
            host_boundaries=self.pin.boundaries,
            limits=self._limits,
            on_close=self._copier_closed,
        )
        self._open_copiers += 1
        return copier

    def _copier_closed(self) -> None:
        self._open_copiers -= 1
        if self._open_copiers == 0:
            self.pin.release()


def torch_npu_device() -> tuple[int, Callable[[], int]]:
    """The device this process computes on, and how to ask for the stream it computes on now."""
    npu: Any = importlib.import_module("torch_npu").npu
    return int(npu.current_device()), lambda: int(npu.current_stream().npu_stream)
