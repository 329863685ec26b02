"""Device and host memory on the emulator, and the NPU transport between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from acl_emulator.control import Emulator
from spillway_connector.device.copier import Direction
from spillway_connector.device.npu.acl import Acl
from spillway_connector.device.npu.acl_batch import choose_copy_path
from spillway_connector.device.npu.copier import NpuCopier
from spillway_connector.plan.copies import CopyPlan

PAGE = 4096


def paged(size_bytes: int) -> np.ndarray:
    """Zeroed bytes that begin on a page."""
    memory = np.zeros(size_bytes + PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + size_bytes]


class Rig:
    """`device` and `host` of equal size, and a compute stream that tests put kernels on."""

    def __init__(self, emulator: Emulator, size_bytes: int = 1 << 16, *, pinned: bool = True) -> None:
        self.emulator = emulator
        self.acl = Acl(str(emulator.path))
        self.acl.set_device(0)
        self.device, self.host = paged(size_bytes), paged(size_bytes)
        self.pinned = pinned
        emulator.make_device(self.device)
        if pinned:
            self.acl.host_register_pinned(self.host.ctypes.data, size_bytes)
        self.compute = emulator.create_stream()
        self.copiers: list[NpuCopier] = []

    def copier(self, direction: Direction, batch_memcpy: str = "auto", **options: object) -> NpuCopier:
        path = choose_copy_path(self.acl, batch_memcpy, 0)
        copier = NpuCopier(direction, self.acl, 0, path, lambda: self.compute, host_pinned=self.pinned, **options)
        self.copiers.append(copier)
        return copier

    def plan(self, spans: list[tuple[int, int, int]]) -> CopyPlan:
        """spans: (offset in device, offset in host, bytes)."""
        columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
        return CopyPlan(
            self.device.ctypes.data + columns[:, 0],
            self.host.ctypes.data + columns[:, 1],
            np.ascontiguousarray(columns[:, 2]),
        )

    def close(self) -> None:
        # The compute stream last: what a destroyed stream drops is an event that never comes, for which a copier waits
        # until its jobs' deadline.
        self.emulator.open_gates()
        for copier in self.copiers:
            copier.close()
        self.emulator.destroy_stream(self.compute)
        if self.pinned:
            self.acl.host_unregister(self.host.ctypes.data)
        self.emulator.forget_device(self.device)


@contextlib.contextmanager
def rig(emulator: Emulator, size_bytes: int = 1 << 16, *, pinned: bool = True) -> Iterator[Rig]:
    opened = Rig(emulator, size_bytes, pinned=pinned)
    try:
        yield opened
    finally:
        opened.close()
