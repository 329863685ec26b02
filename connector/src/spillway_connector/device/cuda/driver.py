"""The CUDA driver by its C interface: what the CUDA transport calls, looked up at run time, no build step.

Symbols are looked up in the driver (cuGetProcAddress) with the CUDA version of the signature in use, so that one build
serves every driver since 12.0. A call that fails raises CudaError with the driver's name for the code.
Source: the CUDA driver API reference, 12.8 and 13.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spillway_connector.device.copier import Direction
from spillway_connector.device.spans import Spans
from spillway_connector.errors import ConfigError, DeviceCopyError

DEFAULT_LIBRARY = "libcuda.so.1"
NOT_READY = 600  # cuEventQuery: not yet
NOT_SUPPORTED = 801
NOT_FOUND = 500
EVENT_TIMING = 0x0
EVENT_NO_TIMING = 0x2
_STREAM_NON_BLOCKING = 0x1  # no implicit wait for the legacy default stream
_HOST_REGISTER_PORTABLE = 0x1  # pinned for every context of the process
_LOOKUP_DEFAULT = 0
_SOURCE_ANY_ORDER = 0x3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY
_SOURCE_STREAM_ORDER = 0x1
_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class _MemLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # 0, 0: no hint


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes"""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location_hint", _MemLocation),
        ("dst_location_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class _Function:
    arguments: tuple[Any, ...]
    # Calls that only enqueue or ask keep the GIL: giving it up costs a switch to a busy thread each time, and they
    # return in microseconds.
    holds_gil: bool = True


_VERSION = 12000  # whose signatures these are, as the driver counts: 12.0
_FUNCTIONS = {
    "cuInit": _Function((_uint,), holds_gil=False),
    "cuDriverGetVersion": _Function((_pointer,)),
    "cuGetErrorName": _Function((_int, _pointer)),
    "cuDeviceGet": _Function((_pointer, _int)),
    "cuDevicePrimaryCtxRetain": _Function((_pointer, _int), holds_gil=False),
    "cuDevicePrimaryCtxRelease": _Function((_int,), holds_gil=False),
    "cuCtxSetCurrent": _Function((_pointer,)),
    "cuMemAlloc": _Function((_pointer, _size), holds_gil=False),
    "cuMemFree": _Function((_pointer,), holds_gil=False),
    "cuMemHostAlloc": _Function((_pointer, _size, _uint), holds_gil=False),
    "cuMemFreeHost": _Function((_pointer,), holds_gil=False),
    "cuMemHostRegister": _Function((_pointer, _size, _uint), holds_gil=False),
    "cuMemHostUnregister": _Function((_pointer,), holds_gil=False),
    "cuStreamCreate": _Function((_pointer, _uint)),
    "cuStreamDestroy": _Function((_pointer,), holds_gil=False),
    "cuStreamSynchronize": _Function((_pointer,), holds_gil=False),
    "cuStreamWaitEvent": _Function((_pointer, _pointer, _uint)),
    "cuEventCreate": _Function((_pointer, _uint)),
    "cuEventDestroy": _Function((_pointer,)),
    "cuEventRecord": _Function((_pointer, _pointer)),
    "cuEventQuery": _Function((_pointer,)),
    "cuEventElapsedTime": _Function((_pointer, _pointer, _pointer)),
    "cuMemcpyHtoDAsync": _Function((_pointer, _pointer, _size, _pointer)),
    "cuMemcpyDtoHAsync": _Function((_pointer, _pointer, _size, _pointer)),
}
_BATCH = "cuMemcpyBatchAsync"
# Newest first: 13.0 dropped the index of the failing copy.
_BATCH_SIGNATURES = (
    (13000, (_pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer)),
    (12080, (_pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer)),
)
_PROC_ADDRESS = ctypes.CFUNCTYPE(_int, ctypes.c_char_p, _pointer, _int, ctypes.c_uint64, _pointer)


class CudaError(DeviceCopyError):
    """A function of the CUDA driver answered with an error code."""

    def __init__(self, function: str, code: int, name: str, details: str = "") -> None:
        self.function = function
        self.code = code
        super().__init__(f"{function} failed with {code} ({name})" + (f"; {details}" if details else ""))


class CudaDriver:
    """One process's driver, on the primary context of one device. Handles are integers; stream 0 is the default one."""

    def __init__(self, proc_address: Callable[..., int], batch_versions: tuple[int, ...] = (13000, 12080)) -> None:
        """proc_address: cuGetProcAddress with its 12.0 signature. Raises ConfigError when a function is missing."""
        self._proc_address = proc_address
        self._calls: dict[str, Callable[..., int]] = {}
        for name, function in _FUNCTIONS.items():
            call = self._look_up(name, _VERSION, function.arguments, holds_gil=function.holds_gil)
            if call is None:
                raise ConfigError(f"cuda: the driver has no {name}; install a driver of CUDA 12.0 or newer")
            self._calls[name] = call
        self.batch_version: int | None = None  # whose signature the batched copy has; None: the driver has none
        for version, arguments in _BATCH_SIGNATURES:
            call = self._look_up(_BATCH, version, arguments, holds_gil=False) if version in batch_versions else None
            if call is not None:
                self._calls[_BATCH], self.batch_version = call, version
                break
        self._context = 0
        self._call("cuInit", 0)

    @classmethod
    def load(cls, library_path: str | None = None) -> CudaDriver:
        """Raises ConfigError when the driver is not there or older than CUDA 12.0."""
        path = library_path or DEFAULT_LIBRARY
        try:
            proc_address = getattr(ctypes.CDLL(path), "cuGetProcAddress_v2", None)
        except OSError as error:
            raise ConfigError(f"cuda: {path!r} cannot be loaded ({error}); install the NVIDIA driver") from error
        if proc_address is None:
            raise ConfigError(f"cuda: {path!r} is older than CUDA 12.0; install a newer NVIDIA driver")
        proc_address.restype, proc_address.argtypes = _int, _PROC_ADDRESS._argtypes_
        return cls(proc_address)

    def _look_up(
        self, name: str, version: int, arguments: tuple[Any, ...], *, holds_gil: bool
    ) -> Callable[..., int] | None:
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._proc_address(
            name.encode(), ctypes.addressof(found), version, _LOOKUP_DEFAULT, ctypes.addressof(status)
        )
        if code != 0 or not found.value:
            return None
        prototype = ctypes.PYFUNCTYPE if holds_gil else ctypes.CFUNCTYPE
        return prototype(_int, *arguments)(found.value)

    def _call(self, name: str, *arguments: Any, details: str = "") -> None:
        code = self._calls[name](*arguments)
        if code != 0:
            raise self._error(name, code, details)

    def _error(self, name: str, code: int, details: str = "") -> CudaError:
        text = ctypes.c_char_p()
        known = self._calls["cuGetErrorName"](code, ctypes.byref(text)) == 0 and text.value
        return CudaError(name, code, known.decode() if known else "unknown", details)

    def version(self) -> int:
        """The CUDA version the driver serves: 13000 is 13.0."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value

    # -- device and memory

    def open_device(self, device: int) -> None:
        """Take the primary context of a device, the one torch computes in."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), device, details=f"device {device}")
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle.value, details=f"device {device}")
        self._context = context.value or 0

    def close_device(self, device: int) -> None:
        if self._context:
            self._context = 0
            self._call("cuDevicePrimaryCtxRelease", device)

    def set_device(self, device: int) -> None:
        """Set the device for the calling thread: streams, events and memory belong to the device's context."""
        if not self._context:
            self.open_device(device)
        self._call("cuCtxSetCurrent", self._context, details=f"device {device}")

    def _create(self, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments, details=f"arguments {arguments}")
        return handle.value or 0

    def malloc(self, size_bytes: int) -> int:
        return self._create("cuMemAlloc", size_bytes)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def malloc_host(self, size_bytes: int) -> int:
        """Pinned, and readable by kernels at the same address."""
        return self._create("cuMemHostAlloc", size_bytes, _HOST_REGISTER_PORTABLE)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def host_register_pinned(self, address: int, size_bytes: int) -> None:
        details = f"address 0x{address:x}, {size_bytes} bytes"
        self._call("cuMemHostRegister", address, size_bytes, _HOST_REGISTER_PORTABLE, details=details)

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address, details=f"address 0x{address:x}")

    # -- streams and events

    def create_stream(self) -> int:
        return self._create("cuStreamCreate", _STREAM_NON_BLOCKING)

    def synchronize_stream(self, stream: int) -> None:
        """Blocks: for opening and closing only."""
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        """Wait for queued work, and destroy the stream."""
        try:
            self.synchronize_stream(stream)
        finally:
            self._call("cuStreamDestroy", stream)

    def discard_stream(self, stream: int) -> None:
        """Destroy the stream of a context with an error, in which nothing runs any more: no call stops a copy."""
        self._call("cuStreamDestroy", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    events_are_reusable = True

    def create_event(self, flag: int) -> int:
        return self._create("cuEventCreate", flag)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_complete(self, event: int) -> bool:
        """Raises CudaError when the device is in error: then the context, which the engine shares, is unusable."""
        code = self._calls["cuEventQuery"](event)
        if code not in (0, NOT_READY):
            raise self._error("cuEventQuery", code)
        return code == 0

    def elapsed_seconds(self, start: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # -- copies

    def copy_each(self, direction: Direction, spans: Spans, stream: int) -> None:
        """One call a span. Raises CudaError at the first that is refused; those before it are in flight."""
        name = "cuMemcpyDtoHAsync" if direction is Direction.STORE else "cuMemcpyHtoDAsync"
        call = self._calls[name]
        each = zip(spans.targets.tolist(), spans.sources.tolist(), spans.sizes_bytes.tolist(), strict=True)
        for index, (target, source, size) in enumerate(each):
            code = call(target, source, size, stream)
            if code != 0:
                raise self._error(name, code, spans.describe(index))

    def copy_batch(self, direction: Direction, spans: Spans, stream: int) -> None:
        """All spans in one call. The driver reads the arrays during the call only.

        Raises CudaError; spans before the failing one may be in flight then.
        """
        # The rows that a load reads are not written before it has ended, so the driver may read them early. A store
        # reads blocks that kernels wrote: only behind the barrier, in stream order.
        order = _SOURCE_STREAM_ORDER if direction is Direction.STORE else _SOURCE_ANY_ORDER
        attributes = MemcpyAttributes(src_access_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(-1)
        count = len(spans.sizes_bytes)
        arguments: list[Any] = [
            spans.targets.ctypes.data,
            spans.sources.ctypes.data,
            spans.sizes_bytes.ctypes.data,
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
        ]
        if self.batch_version == 12080:
            arguments.append(ctypes.byref(failed))
        code = self._calls[_BATCH](*arguments, stream)
        if code != 0:
            details = f"{count} copies of {int(spans.sizes_bytes.sum())} bytes"
            if failed.value < count:
                details = spans.describe(failed.value)
            raise self._error(_BATCH, code, f"{details}, {direction.value}")
