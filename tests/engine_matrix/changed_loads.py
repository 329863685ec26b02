"""Copiers whose loads are wrong on purpose, on any device."""

from __future__ import annotations

import numpy as np
import torch

from spillway_connector.device.copier import Copier, CopyResult
from spillway_connector.plan.copies import CopyPlan


class ChangedLoads:
    """A Copier around another that takes the bytes of its jobs from a buffer of one value, not from the host rows."""

    def __init__(self, inner: Copier, value: int) -> None:
        self._inner = inner
        self._value = value
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        self._inner.submit(job_id, self.changed(plan), awaited=awaited)

    def changed(self, plan: CopyPlan) -> CopyPlan:
        """The plan with the same targets and another source."""
        size_bytes = int(plan.sizes_bytes.max(initial=0))
        if self._buffer.numel() < size_bytes:
            self.wait_for_all()
            # Pinned where there is a GPU: its kernels read host memory in place.
            self._buffer = torch.full(
                (size_bytes,), self._value, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        host = np.full(len(plan), self._buffer.data_ptr(), np.int64)
        return CopyPlan(plan.device_addresses, host, plan.sizes_bytes)

    def wait_for_all(self) -> None:
        """The old buffer may still be read, which torch's allocator does not track."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def finished(self) -> list[CopyResult]:
        return self._inner.finished()

    def wait(self, job_ids: set[int]) -> None:
        self._inner.wait(job_ids)

    def hold_computation(self, job_id: int) -> Exception | None:
        return self._inner.hold_computation(job_id)

    def close(self) -> None:
        self._inner.close()
