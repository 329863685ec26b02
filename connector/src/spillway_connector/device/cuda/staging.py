"""Double buffering on the device: small pieces cross the link in one buffer while the other is filled or drained.

    store   kernel stream   gather 0   gather 1   [wait] gather 0 ...
            copy stream                burst 0    burst 1    burst 0 ...
    load    copy stream     burst 0    burst 1    [wait] burst 0 ...
            kernel stream              scatter 0  scatter 1  scatter 0 ...

Bounded: two slots and one table of descriptors per direction, allocated once. A job whose descriptors do not fit is
copied on another path.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.bursts import WORD_BYTES, Burst, BurstPlan, DescriptorRing
from spillway_connector.device.cuda.driver import EVENT_NO_TIMING, CudaDriver, CudaError
from spillway_connector.device.cuda.kernel import SpanKernel
from spillway_connector.device.spans import Spans
from spillway_connector.plan.copies import Addresses, CopyPlan

SLOT_BYTES = 32 << 20
TABLE_ROWS = 262_144  # 6 MiB of pinned memory
_SLOTS = 2
_ROW_WORDS = 3


class CudaStaging:
    """The staging area of one direction, on the model thread."""

    def __init__(
        self,
        driver: CudaDriver,
        direction: Direction,
        kernel: SpanKernel,
        *,
        slot_bytes: int = SLOT_BYTES,
        table_rows: int = TABLE_ROWS,
    ) -> None:
        """Raises DeviceCopyError, with nothing left allocated."""
        self._driver = driver
        self._direction = direction
        self._kernel = kernel
        self._slot_bytes = slot_bytes
        self._ring = DescriptorRing(table_rows)
        with contextlib.ExitStack() as cleanup:
            self._slots = [self._take(cleanup, driver.free, driver.malloc(slot_bytes)) for _ in range(_SLOTS)]
            table_bytes = table_rows * _ROW_WORDS * 8
            self._table_address = self._take(cleanup, driver.free_host, driver.malloc_host(table_bytes))
            raw = (ctypes.c_int64 * (table_rows * _ROW_WORDS)).from_address(self._table_address)
            self._table = np.ctypeslib.as_array(raw).reshape(table_rows, _ROW_WORDS)
            self._stream = self._take(cleanup, driver.destroy_stream, driver.create_stream())
            self._entry = self._event(cleanup)
            self._filled = [self._event(cleanup) for _ in range(_SLOTS)]  # a slot's bytes are all there
            self._drained = [self._event(cleanup) for _ in range(_SLOTS)]  # and may be overwritten
            self._try_kernel()
            self._cleanup = cleanup.pop_all()

    @staticmethod
    def _take(cleanup: contextlib.ExitStack, give_back: Callable[[int], None], handle: int) -> int:
        cleanup.callback(give_back, handle)
        return handle

    def _event(self, cleanup: contextlib.ExitStack) -> int:
        return self._take(cleanup, self._driver.destroy_event, self._driver.create_event(EVENT_NO_TIMING))

    def _try_kernel(self) -> None:
        """Launch once inside the staging slots: the first launch compiles. Raises DeviceCopyError."""
        self._table[0] = self._slots[0], self._slots[1], WORD_BYTES
        self._kernel.launch(self._table_address, 1, WORD_BYTES, self._stream)
        self._driver.synchronize_stream(self._stream)

    def enqueue(self, plan: CopyPlan, stream: int, *, batch: bool) -> int | None:
        """Enqueue one job after the work on `stream`; later work on `stream` comes after the job.

        Returns the first table row, for `give_back` when the job has ended. None: no room, and nothing was enqueued.
        Raises DeviceCopyError; copies enqueued before it are ordered all the same.
        """
        bursts = BurstPlan(plan, self._slot_bytes)
        first = self._ring.take(len(bursts))
        if first is None:
            return None
        row = first
        try:
            self._driver.record_event(self._entry, stream)
            self._driver.stream_wait_event(self._stream, self._entry)
            for number, burst in enumerate(bursts):
                self._fill_table(burst, row, self._slots[number % _SLOTS])
                move = self._store if self._direction is Direction.STORE else self._load
                move(burst, row, number % _SLOTS, stream, batch)
                row += len(burst.piece_bytes)
        except Exception:
            self._ring.give_back(first)
            raise
        finally:
            self._driver.record_event(self._entry, self._stream)
            self._driver.stream_wait_event(stream, self._entry)
        return first

    def give_back(self, first: int) -> None:
        self._ring.give_back(first)

    def _fill_table(self, burst: Burst, row: int, slot: int) -> None:
        rows = self._table[row : row + len(burst.piece_bytes)]
        to_slot = self._direction is Direction.STORE
        rows[:, 1 if to_slot else 0] = slot + burst.piece_offsets
        rows[:, 0 if to_slot else 1] = burst.device_addresses
        rows[:, 2] = burst.piece_bytes

    def _store(self, burst: Burst, row: int, slot: int, stream: int, batch: bool) -> None:
        driver = self._driver
        driver.stream_wait_event(self._stream, self._drained[slot])
        self._launch(burst, row)
        driver.record_event(self._filled[slot], self._stream)
        driver.stream_wait_event(stream, self._filled[slot])
        self._cross(burst.host_addresses, self._slots[slot] + burst.run_offsets, burst.run_bytes, stream, batch)
        driver.record_event(self._drained[slot], stream)

    def _load(self, burst: Burst, row: int, slot: int, stream: int, batch: bool) -> None:
        driver = self._driver
        driver.stream_wait_event(stream, self._drained[slot])
        self._cross(self._slots[slot] + burst.run_offsets, burst.host_addresses, burst.run_bytes, stream, batch)
        driver.record_event(self._filled[slot], stream)
        driver.stream_wait_event(self._stream, self._filled[slot])
        self._launch(burst, row)
        driver.record_event(self._drained[slot], self._stream)

    def _launch(self, burst: Burst, row: int) -> None:
        table = self._table_address + row * _ROW_WORDS * 8
        self._kernel.launch(table, len(burst.piece_bytes), int(burst.piece_bytes.max()), self._stream)

    def _cross(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, batch: bool) -> None:
        spans = Spans(targets, sources, sizes)
        if batch and len(sizes) > 1:
            self._driver.copy_batch(self._direction, spans, stream)
        else:
            self._driver.copy_each(self._direction, spans, stream)

    def close(self) -> None:
        """Free what the direction holds; the caller makes sure that nothing of it runs any more."""
        try:
            self._cleanup.close()
        except CudaError:
            pass  # of a device that is gone; nothing is left to free
