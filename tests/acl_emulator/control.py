"""The emulator's control interface (src/control.h) for Python tests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GATES = 64  # MAX_GATES of src/stream.c


class _LiveCounts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("streams", "events", "host_registrations", "device_allocations", "unfinished_tasks")
    ]


@dataclass(frozen=True, slots=True)
class Live:
    """Counts of what has been created and not given back."""

    streams: int
    events: int
    host_registrations: int
    device_allocations: int
    unfinished_tasks: int


NOTHING_LIVE = Live(0, 0, 0, 0, 0)


class Emulator:
    """One loaded library; its state is the process's, so a test begins and ends with `reset`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        self._lib.emu_stream_gate.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._lib.emu_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._lib.emu_stream_fill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._lib.emu_stream_copy_out.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._lib.emu_device_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._lib.emu_forget_device_range.argtypes = [ctypes.c_void_p]
        self._lib.emu_wait_tasks.argtypes = [ctypes.c_int64, ctypes.c_int32]
        self._lib.emu_calls.restype = ctypes.c_int64
        self._lib.emu_log_size.restype = ctypes.c_int64
        self._lib.emu_log_line.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t]
        self._lib.aclrtCreateStream.argtypes = [ctypes.c_void_p]
        self._lib.aclrtDestroyStreamForce.argtypes = [ctypes.c_void_p]

    def reset(self) -> None:
        self._lib.emu_reset()

    def live(self) -> Live:
        counts = _LiveCounts()
        self._lib.emu_live(ctypes.byref(counts))
        return Live(*(getattr(counts, name) for name, _ in _LiveCounts._fields_))

    # -- memory

    def make_device(self, memory: np.ndarray) -> None:
        """Ordinary memory counts as device memory from here on."""
        self.make_device_range(memory.ctypes.data, memory.nbytes)

    def make_device_range(self, address: int, size_bytes: int) -> None:
        assert self._lib.emu_device_range(address, size_bytes), "overlaps another range"

    def forget_device(self, memory: np.ndarray) -> None:
        assert self._lib.emu_forget_device_range(memory.ctypes.data)

    # -- faults

    def fail(self, function: str, nth: int, code: int, times: int = 1) -> None:
        """The nth call from now (1: the next), and `times - 1` after it, return `code` and do nothing."""
        self._lib.emu_fail(function.encode(), nth, code, times)

    def fail_copy(self, nth: int, code: int) -> None:
        """The nth descriptor executed from now fails inside its stream."""
        self._lib.emu_fail_copy(nth, code)

    def clear_faults(self) -> None:
        self._lib.emu_clear_faults()

    def break_batch(self, after: int, code: int) -> None:
        """The next batch call leaves its first `after` descriptors in flight and returns `code`."""
        self._lib.emu_break_batch(after, code)

    def delay_copies(self, microseconds: int) -> None:
        self._lib.emu_delay_copies(microseconds)

    # -- a compute stream and its kernels

    def create_stream(self, device: int = 0) -> int:
        handle = ctypes.c_void_p()
        assert self._lib.aclrtSetDevice(device) == 0
        assert self._lib.aclrtCreateStream(ctypes.byref(handle)) == 0
        assert handle.value is not None
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        assert self._lib.aclrtDestroyStreamForce(stream) == 0

    def capture(self, stream: int, captured: bool) -> None:
        """Whether what is recorded on the stream from here on becomes part of a graph."""
        assert self._lib.emu_capture(stream, int(captured)) == 0

    def gate(self, stream: int, gate: int) -> None:
        """Hold what is queued on the stream from here on until `open_gate`."""
        assert self._lib.emu_stream_gate(stream, gate) == 0

    def open_gate(self, gate: int) -> None:
        self._lib.emu_open_gate(gate)

    def open_gates(self) -> None:
        """All of them, whether anything waits there or not."""
        for gate in range(GATES):
            self.open_gate(gate)

    def fill(self, stream: int, memory: np.ndarray, value: int) -> None:
        assert self._lib.emu_stream_fill(stream, memory.ctypes.data, value, memory.nbytes) == 0

    def copy_out(self, stream: int, target: np.ndarray, source: np.ndarray) -> None:
        """A kernel that reads `source`."""
        assert self._lib.emu_stream_copy_out(stream, target.ctypes.data, source.ctypes.data, source.nbytes) == 0

    def wait_tasks(self, at_most: int, timeout_ms: int) -> bool:
        """Whether the unfinished tasks of all streams fell to `at_most` in time."""
        return bool(self._lib.emu_wait_tasks(at_most, timeout_ms))

    # -- the log

    def calls(self, function: str) -> int:
        return int(self._lib.emu_calls(function.encode()))

    def log(self) -> list[str]:
        """`code function arguments`, oldest first."""
        line = ctypes.create_string_buffer(160)
        lines = []
        for index in range(self._lib.emu_log_size()):
            self._lib.emu_log_line(index, line, len(line))
            lines.append(line.value.decode())
        return lines
