"""The ACL runtime of CANN by its documented C interface: no build step, so it runs in the stock vllm-ascend image.

Only what the NPU transport calls is bound. Source: CANN's API documentation of 8.5 to 9.1, function by function.
A call that fails raises AclError with the runtime's message; nothing here retries.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spillway_connector.device.spans import Spans
from spillway_connector.errors import ConfigError, DeviceCopyError

DEFAULT_LIBRARY = "libascendcl.so"
FEATURE_NOT_SUPPORTED = 207000
STREAM_SYNC_TIMEOUT = 507046
EVENT_SYNC_TIMEOUT = 507047
_CODES = {
    100000: "invalid parameter",
    107000: "parameter invalid",
    107002: "no context: the device was not set on this thread",
    107003: "stream of another context",
    107008: "address not aligned",
    207000: "feature not supported",
    207001: "memory allocation failed",
    207012: "over limit",
    207018: "device out of memory",
    507046: "stream synchronisation timed out",
    507047: "event synchronisation timed out",
    507054: "HBM multi-bit ECC error",
    507899: "driver internal error",
    507910: "host memory already registered",
    507911: "host memory not registered",
}

EVENT_SYNC = 0x1
EVENT_TIME_LINE = 0x8
HOST_REGISTER_PINNED = 0x10000000
_VERSION_SIZE = 128
_VERSION_PART_SIZE = 64
# aclsysGetVersionStr takes a directory name of the installation's share/info; which exist differs by release.
VERSION_PACKAGES = ("runtime", "toolkit", "cann")


class CopyKind(enum.IntEnum):
    """aclrtMemcpyKind"""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2


class _MemLocation(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]  # host 0, device 1


class _MemcpyBatchAttr(ctypes.Structure):
    _fields_ = [("dst", _MemLocation), ("src", _MemLocation), ("rsv", ctypes.c_uint8 * 16)]  # rsv must be zero


class _PackageVersion(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_char * _VERSION_SIZE),
        ("major", ctypes.c_char * _VERSION_PART_SIZE),
        ("minor", ctypes.c_char * _VERSION_PART_SIZE),
        ("release", ctypes.c_char * _VERSION_PART_SIZE),
        ("patch", ctypes.c_char * _VERSION_PART_SIZE),
        ("reserved", ctypes.c_char * _VERSION_SIZE),
    ]


_pointer, _size, _i32, _u32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32


@dataclass(frozen=True, slots=True)
class _Function:
    arguments: tuple[Any, ...]
    required: bool = True
    # Calls that only enqueue or ask keep the GIL: giving it up costs a switch to a busy scheduler thread each time
    # (2.5 s for 960 copies, measured with the CPU transport), and they return in microseconds.
    holds_gil: bool = False


_FUNCTIONS = {
    "aclrtSetDevice": _Function((_i32,)),
    "aclrtGetDevice": _Function((_pointer,), required=False),
    "aclrtGetVersion": _Function((_pointer, _pointer, _pointer), required=False),
    "aclsysGetVersionStr": _Function((ctypes.c_char_p, ctypes.c_char_p), required=False),
    "aclsysGetCANNVersion": _Function((ctypes.c_int, _pointer), required=False),
    "aclrtMalloc": _Function((_pointer, _size, ctypes.c_int), required=False),
    "aclrtFree": _Function((_pointer,), required=False),
    "aclrtMallocHost": _Function((_pointer, _size), required=False),
    "aclrtFreeHost": _Function((_pointer,), required=False),
    "aclrtHostRegisterV2": _Function((_pointer, ctypes.c_uint64, _u32), required=False),
    "aclrtHostUnregister": _Function((_pointer,), required=False),
    "aclrtCreateStream": _Function((_pointer,)),
    "aclrtDestroyStream": _Function((_pointer,)),
    "aclrtDestroyStreamForce": _Function((_pointer,), required=False),
    "aclrtStreamAbort": _Function((_pointer,), required=False),
    "aclrtSynchronizeStreamWithTimeout": _Function((_pointer, _i32)),
    "aclrtStreamWaitEvent": _Function((_pointer, _pointer), holds_gil=True),
    "aclrtCreateEventWithFlag": _Function((_pointer, _u32)),
    "aclrtCreateEventExWithFlag": _Function((_pointer, _u32), required=False),
    "aclrtDestroyEvent": _Function((_pointer,)),
    "aclrtRecordEvent": _Function((_pointer, _pointer), holds_gil=True),
    "aclrtQueryEventStatus": _Function((_pointer, _pointer), holds_gil=True),
    "aclrtSynchronizeEventWithTimeout": _Function((_pointer, _i32), required=False),
    "aclrtEventElapsedTime": _Function((_pointer, _pointer, _pointer), holds_gil=True),
    "aclmdlRICaptureGetInfo": _Function((_pointer, _pointer, _pointer), required=False, holds_gil=True),
    "aclrtMemcpyAsync": _Function((_pointer, _size, _pointer, _size, ctypes.c_int, _pointer)),
    "aclrtMemcpyBatchAsync": _Function(
        (_pointer, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer), required=False
    ),
    "aclrtMemcpyBatchAsyncV2": _Function((), required=False),  # its presence tells 9.1 from 9.0; never called
}


class AclError(DeviceCopyError):
    """A function of the ACL runtime answered with an error code."""

    def __init__(self, function: str, code: int, details: str = "", runtime_message: str = "") -> None:
        self.function = function
        self.code = code
        parts = [f"{function} failed with {code} ({_CODES.get(code, 'see the CANN error code list')})"]
        parts += [details] if details else []
        parts += [f"runtime: {runtime_message}"] if runtime_message else []
        super().__init__("; ".join(parts))


class Acl:
    """One loaded runtime. Handles (streams, events) are integers; 0 is the default stream."""

    def __init__(self, library_path: str | None = None) -> None:
        """Raises ConfigError when the library is not there or lacks a function that every CANN since 8.0 has."""
        path = library_path or DEFAULT_LIBRARY
        try:
            self._library = ctypes.CDLL(path)
            holding_gil = ctypes.PyDLL(path)
        except OSError as error:
            raise ConfigError(
                f"acl_library_path: {path!r} cannot be loaded ({error}); source CANN's set_env.sh, or name the file"
            ) from error
        self._calls: dict[str, Callable[..., int]] = {}
        for name, function in _FUNCTIONS.items():
            found = getattr(holding_gil if function.holds_gil else self._library, name, None)
            if found is None:
                if function.required:
                    raise ConfigError(f"acl_library_path: {path!r} has no {name}; CANN 8.0 or newer is needed")
                continue
            found.restype, found.argtypes = ctypes.c_int, function.arguments
            self._calls[name] = found
        self._memcpy_holding_gil = holding_gil.aclrtMemcpyAsync
        self._memcpy_holding_gil.restype = ctypes.c_int
        self._memcpy_holding_gil.argtypes = _FUNCTIONS["aclrtMemcpyAsync"].arguments
        self._recent_message = getattr(self._library, "aclGetRecentErrMsg", None)
        if self._recent_message is not None:
            self._recent_message.restype, self._recent_message.argtypes = ctypes.c_char_p, ()
        # Both sorts of event can be recorded; only the first can be recorded again without a reset.
        self.events_are_reusable = self.has("aclrtCreateEventExWithFlag")

    def has(self, name: str) -> bool:
        """Whether this runtime exports a function that older or newer ones lack."""
        return name in self._calls

    @property
    def is_emulator(self) -> bool:
        """Whether this is the test library, whose timings mean nothing."""
        return hasattr(self._library, "emu_live")

    def _call(self, name: str, *arguments: Any, details: str = "") -> None:
        call = self._calls.get(name)
        if call is None:
            raise AclError(name, FEATURE_NOT_SUPPORTED, "this runtime does not export it")
        code = call(*arguments)
        if code != 0:
            raise AclError(name, code, details, self.take_recent_message())

    def take_recent_message(self) -> str:
        """The runtime's message for this thread's last failure; reading clears it."""
        message = self._recent_message() if self._recent_message is not None else None
        return message.decode(errors="replace").strip() if message else ""

    # -- versions

    def cann_version(self) -> str | None:
        """The version as the installation writes it ("9.1.0", "8.5.0.alpha001"); None when no query answers.

        aclrtGetVersion does not help: it is the version of the interface, 1.17 in both 9.0 and 9.1.
        """
        return next(iter(self.package_versions().values()), None)

    def package_versions(self) -> dict[str, str]:
        """Every package name that answers, with its version; the best one first."""
        versions = {}
        for package in VERSION_PACKAGES:
            text = ctypes.create_string_buffer(_VERSION_SIZE)
            call = self._calls.get("aclsysGetVersionStr")
            if call is not None and call(package.encode(), text) == 0 and text.value:
                versions[package] = text.value.decode(errors="replace")
        call = self._calls.get("aclsysGetCANNVersion")
        answer = _PackageVersion()
        if call is not None and call(0, ctypes.byref(answer)) == 0 and answer.version:
            versions["aclsysGetCANNVersion"] = answer.version.decode(errors="replace")
        self.take_recent_message()  # of the names that did not answer
        return versions

    def interface_version(self) -> str | None:
        """The version of the ACL interface; for reports only."""
        numbers = [ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()]
        call = self._calls.get("aclrtGetVersion")
        if call is None or call(*map(ctypes.byref, numbers)) != 0:
            return None
        return ".".join(str(number.value) for number in numbers)

    # -- device and memory

    def set_device(self, device: int) -> None:
        """Set the device of the calling thread, to which the streams and events that it makes belong."""
        self._call("aclrtSetDevice", device, details=f"device {device}")

    def host_register_pinned(self, address: int, size_bytes: int) -> None:
        self._call(
            "aclrtHostRegisterV2",
            address,
            size_bytes,
            HOST_REGISTER_PINNED,
            details=f"address 0x{address:x}, {size_bytes} bytes",
        )

    def host_unregister(self, address: int) -> None:
        self._call("aclrtHostUnregister", address, details=f"address 0x{address:x}")

    def malloc(self, size_bytes: int) -> int:
        return self._create("aclrtMalloc", size_bytes, 0)  # 0: huge pages first

    def free(self, address: int) -> None:
        self._call("aclrtFree", address)

    def malloc_host(self, size_bytes: int) -> int:
        return self._create("aclrtMallocHost", size_bytes)

    def free_host(self, address: int) -> None:
        self._call("aclrtFreeHost", address)

    def _create(self, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments, details=f"arguments {arguments}" if arguments else "")
        if handle.value is None:
            raise AclError(name, 0, "it answered without a handle")
        return handle.value

    # -- streams and events

    def create_stream(self) -> int:
        return self._create("aclrtCreateStream")

    def destroy_stream(self, stream: int) -> None:
        """Wait for queued work, and destroy the stream."""
        self._call("aclrtDestroyStream", stream)

    def discard_stream(self, stream: int) -> None:
        """Abort queued work if the runtime can, else wait for it, and destroy the stream."""
        if self.has("aclrtStreamAbort"):
            try:
                self._call("aclrtStreamAbort", stream)
            except AclError:
                self.take_recent_message()  # the destruction below reports an unusable device again
        name = "aclrtDestroyStreamForce" if self.has("aclrtDestroyStreamForce") else "aclrtDestroyStream"
        self._call(name, stream)

    def synchronize_stream(self, stream: int, timeout_ms: int) -> None:
        """timeout_ms: 0 only polls. AclError with STREAM_SYNC_TIMEOUT: not done yet; any other code: a task failed."""
        self._call("aclrtSynchronizeStreamWithTimeout", stream, timeout_ms)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._call("aclrtStreamWaitEvent", stream, event)

    def is_captured(self, stream: int) -> bool:
        """Whether the stream's work is being recorded into a graph. False if the runtime cannot tell."""
        if not self.has("aclmdlRICaptureGetInfo"):
            return False
        status, graph = ctypes.c_int(0), ctypes.c_void_p()
        try:
            self._call("aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(graph))
        except AclError:
            return False
        return status.value != 0  # active, or invalidated by a call that may not be captured

    def create_event(self, flag: int) -> int:
        name = "aclrtCreateEventExWithFlag" if self.events_are_reusable else "aclrtCreateEventWithFlag"
        return self._create(name, flag)

    def destroy_event(self, event: int) -> None:
        self._call("aclrtDestroyEvent", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("aclrtRecordEvent", event, stream)

    def event_complete(self, event: int) -> bool:
        """Whether an event is complete; False also if a task before it failed, which only synchronising the stream
        reports."""
        status = ctypes.c_int()
        self._call("aclrtQueryEventStatus", event, ctypes.byref(status))
        return status.value == 1

    def synchronize_event(self, event: int, timeout_ms: int) -> None:
        """AclError with EVENT_SYNC_TIMEOUT when it takes longer."""
        self._call("aclrtSynchronizeEventWithTimeout", event, timeout_ms)

    def elapsed_seconds(self, start: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self._call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1e3

    # -- copies

    def memcpy_each(self, spans: Spans, kind: CopyKind, stream: int, *, hold_gil: bool) -> None:
        """One call a span. `hold_gil` is for pinned host memory only: with pageable memory each call blocks.

        Raises AclError at the first span that is refused; those before it are in flight.
        """
        call = self._memcpy_holding_gil if hold_gil else self._calls["aclrtMemcpyAsync"]
        each = zip(spans.targets.tolist(), spans.sources.tolist(), spans.sizes_bytes.tolist(), strict=True)
        for index, (target, source, size) in enumerate(each):
            code = call(target, size, source, size, int(kind), stream)
            if code != 0:
                raise AclError("aclrtMemcpyAsync", code, spans.describe(index), self.take_recent_message())

    def batch_call(self, spans: Spans, kind: CopyKind, device: int) -> BatchCall:
        return BatchCall(self, spans, kind, device)


class BatchCall:
    """The arguments of one aclrtMemcpyBatchAsync. Keep it until the copy's end event: the runtime reads the arrays."""

    def __init__(self, acl: Acl, spans: Spans, kind: CopyKind, device: int) -> None:
        for column in (spans.targets, spans.sources, spans.sizes_bytes):
            assert column.flags.c_contiguous and len(column) == len(spans.sizes_bytes)
        self._acl, self._spans, self._kind = acl, spans, kind
        host, npu = _MemLocation(0, 0), _MemLocation(device, 1)
        to_device = kind is CopyKind.HOST_TO_DEVICE
        self._attribute = _MemcpyBatchAttr(npu if to_device else host, host if to_device else npu)
        self._first_index = ctypes.c_size_t(0)
        self._fail_index = ctypes.c_size_t(0)

    def submit(self, stream: int) -> None:
        """Raises AclError; spans before the failing one may be in flight then."""
        spans = self._spans
        count = len(spans.sizes_bytes)
        code = self._acl._calls["aclrtMemcpyBatchAsync"](
            spans.targets.ctypes.data,
            spans.sizes_bytes.ctypes.data,  # room at each target: what is written there
            spans.sources.ctypes.data,
            spans.sizes_bytes.ctypes.data,
            count,
            ctypes.byref(self._attribute),
            ctypes.byref(self._first_index),
            1,
            ctypes.byref(self._fail_index),
            stream,
        )
        if code == 0:
            return
        index = self._fail_index.value
        if index < count:
            details = spans.describe(index)
        else:  # SIZE_MAX: the failure is not one descriptor's
            details = f"{count} descriptors of {int(spans.sizes_bytes.sum())} bytes"
        details = f"{details}, {self._kind.name.lower()}"
        raise AclError("aclrtMemcpyBatchAsync", code, details, self._acl.take_recent_message())


def version_at_least(version: str, major: int, minor: int) -> bool | None:
    """Whether a CANN version such as "8.3.RC1" is new enough; None if it does not begin with two numbers."""
    numbers = re.match(r"\D{0,2}(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2])) >= (major, minor)
