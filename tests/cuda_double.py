"""A CUDA driver for tests: the functions the transport calls, as C callbacks over host memory.

Streams are queues and run when somebody asks: a step of a random stream at a time, so that an order which the events
do not enforce is sooner or later not kept. Arguments arrive as the driver would see them, by the C ABI. It checks what
is asked of the driver against the documentation; it measures nothing.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spillway_connector.device.cuda.driver import MemcpyAttributes
from spillway_connector.errors import DeviceCopyError

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_READY, NOT_SUPPORTED = 1, 2, 700, 600, 801
_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}
_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


@dataclass
class _Event:
    timed: bool
    recorded: int = 0  # how often recorded
    reached: int = 0  # the newest record that ran


@dataclass
class _Stream:
    work: deque[Callable[[], bool]] = field(default_factory=deque)  # False: cannot run yet


class CudaDouble:
    """`proc_address` is what CudaDriver is built from."""

    def __init__(self, seed: int = 0, *, without: tuple[str, ...] = (), batch_versions: tuple[int, ...] = (13000,)):
        self.random = random.Random(seed)
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[object, ...]] = []
        self.failures: dict[str, deque[int]] = defaultdict(deque)  # codes to answer with, 0 passes
        self.dead = 0  # code of an error that stays, as of a faulting kernel
        self.streams: dict[int, _Stream] = {0: _Stream()}
        self.events: dict[int, _Event] = {}
        self.allocations: dict[int, object] = {}
        self.registered: dict[int, int] = {}
        self.contexts = 0
        self._next = 0x1000
        self._keep: list[object] = []
        self._functions: dict[tuple[str, int], object] = {}
        self._without = without
        self._batch_versions = batch_versions
        for name, types in _TYPES.items():
            self._publish(name, 12000, types, getattr(self, f"_{name}"))
        batch = _TYPES_BATCH
        for version in batch_versions:
            types = batch if version == 13000 else (*batch[:-1], _pointer, batch[-1])
            self._publish("cuMemcpyBatchAsync", version, types, getattr(self, f"_batch_{version}"))
        prototype = ctypes.CFUNCTYPE(_int, ctypes.c_char_p, _pointer, _int, ctypes.c_uint64, _pointer)
        self.proc_address = prototype(self._proc_address)

    def _publish(self, name: str, version: int, types: tuple[object, ...], body: Callable[..., int]) -> None:
        def guarded(*arguments: object) -> int:
            self.calls[name] += 1
            planned = self.failures[name]
            code = planned.popleft() if planned else 0
            if code:
                return code
            if self.dead and name not in ("cuGetErrorName", "cuCtxSetCurrent"):
                if "Destroy" in name or "Free" in name:
                    body(*arguments)  # its memory is gone with the context, and the error is still reported
                return self.dead
            return body(*arguments)

        self._functions[name, version] = ctypes.CFUNCTYPE(_int, *types)(guarded)

    def _proc_address(self, name: bytes, found: int, version: int, flags: int, status: int) -> int:
        function = self._functions.get((name.decode(), version))
        if function is None or name.decode() in self._without:
            return 500
        ctypes.c_uint64.from_address(found).value = ctypes.cast(function, _pointer).value or 0
        return 0

    def live(self) -> tuple[int, int, int, int]:
        """(streams, events, allocations, registrations) that were not given back"""
        return len(self.streams) - 1, len(self.events), len(self.allocations), len(self.registered)

    # -- running

    def step(self) -> bool:
        """One piece of work of a random stream; False when none can run."""
        order = list(self.streams.values())
        self.random.shuffle(order)
        for stream in order:
            if stream.work and stream.work[0]():
                stream.work.popleft()
                return True
        return False

    def drain(self) -> None:
        while self.step():
            pass

    def some_steps(self) -> None:
        for _ in range(self.random.randrange(4)):
            self.step()

    def enqueue(self, stream: int, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self.streams[stream].work.append(run)

    # -- the functions, in the order of the header

    def _cuInit(self, flags: int) -> int:
        return 0

    def _cuDriverGetVersion(self, out: int) -> int:
        ctypes.c_int.from_address(out).value = 13000
        return 0

    def _cuGetErrorName(self, code: int, out: int) -> int:
        name = ctypes.create_string_buffer(_NAMES.get(code, b"CUDA_ERROR_SOMETHING"))
        self._keep.append(name)
        ctypes.c_uint64.from_address(out).value = ctypes.addressof(name)
        return 0

    def _cuDeviceGet(self, out: int, ordinal: int) -> int:
        ctypes.c_int.from_address(out).value = ordinal
        return 0

    def _cuDevicePrimaryCtxRetain(self, out: int, device: int) -> int:
        self.contexts += 1
        ctypes.c_uint64.from_address(out).value = 0xC0
        return 0

    def _cuDevicePrimaryCtxRelease(self, device: int) -> int:
        self.contexts -= 1
        return 0

    def _cuCtxSetCurrent(self, context: int) -> int:
        return 0 if context == 0xC0 else INVALID_VALUE

    def _allocate(self, out: int, size: int) -> int:
        memory = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.allocations[address] = memory
        ctypes.c_uint64.from_address(out).value = address
        return 0

    def _cuMemAlloc(self, out: int, size: int) -> int:
        return self._allocate(out, size)

    def _cuMemFree(self, address: int) -> int:
        return 0 if self.allocations.pop(address, None) is not None else INVALID_VALUE

    def _cuMemHostAlloc(self, out: int, size: int, flags: int) -> int:
        return self._allocate(out, size)

    _cuMemFreeHost = _cuMemFree

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> int:
        if flags != 1 or address % 4096:
            return INVALID_VALUE
        self.registered[address] = size
        return 0

    def _cuMemHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else INVALID_VALUE

    def _handle(self, out: int) -> int:
        self._next += 16
        ctypes.c_uint64.from_address(out).value = self._next
        return self._next

    def _cuStreamCreate(self, out: int, flags: int) -> int:
        if flags != 1:
            return INVALID_VALUE
        self.streams[self._handle(out)] = _Stream()
        return 0

    def _cuStreamDestroy(self, stream: int) -> int:
        return 0 if self.streams.pop(stream, None) else INVALID_VALUE

    def _cuStreamSynchronize(self, stream: int) -> int:
        self.drain()
        return INVALID_VALUE if self.streams[stream or 0].work else 0

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        awaited = self.events[event]
        number = awaited.recorded  # the record that exists now; later ones do not count
        self.streams[stream or 0].work.append(lambda: awaited.reached >= number)
        self.log.append(("wait", stream, event))
        return 0

    def _cuEventCreate(self, out: int, flags: int) -> int:
        self.events[self._handle(out)] = _Event(timed=flags == 0)
        return 0

    def _cuEventDestroy(self, event: int) -> int:
        return 0 if self.events.pop(event, None) else INVALID_VALUE

    def _cuEventRecord(self, event: int, stream: int) -> int:
        recorded = self.events[event]
        recorded.recorded += 1
        number = recorded.recorded

        def reach() -> None:
            recorded.reached = max(recorded.reached, number)

        self.enqueue(stream or 0, reach)
        self.log.append(("record", stream, event))
        return 0

    def _cuEventQuery(self, event: int) -> int:
        self.some_steps()
        asked = self.events[event]
        return 0 if asked.reached >= asked.recorded else NOT_READY

    def _cuEventElapsedTime(self, out: int, start: int, end: int) -> int:
        if not (self.events[start].timed and self.events[end].timed):
            return INVALID_VALUE
        ctypes.c_float.from_address(out).value = 2.0
        return 0

    def _copy(self, name: str, target: int, source: int, size: int, stream: int) -> int:
        self.log.append((name, target, source, size))
        self.enqueue(stream or 0, lambda: ctypes.memmove(target, source, size) and None)
        return 0

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> int:
        return self._copy("load", target, source, size, stream)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> int:
        return self._copy("store", target, source, size, stream)

    def _batch(self, targets, sources, sizes, count, attributes, first, attribute_count, stream) -> int:
        if not count or attribute_count != 1 or ctypes.c_size_t.from_address(first).value != 0 or not stream:
            return INVALID_VALUE
        given = MemcpyAttributes.from_address(attributes)
        self.log.append(("batch", count, given.src_access_order, given.flags))
        rows = zip(*((ctypes.c_uint64 * count).from_address(column) for column in (targets, sources, sizes)))
        order = list(rows)
        self.random.shuffle(order)  # the driver promises no order within a batch
        for target, source, size in order:
            self.enqueue(stream, lambda t=target, s=source, n=size: ctypes.memmove(t, s, n) and None)
        return 0

    def _batch_13000(self, *arguments: int) -> int:
        return self._batch(*arguments)

    def _batch_12080(self, *arguments: int) -> int:
        *rest, failed, stream = arguments
        ctypes.c_size_t.from_address(failed).value = 2**64 - 1
        return self._batch(*rest, stream)


_TYPES_BATCH = (_pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer)
_TYPES: dict[str, tuple[object, ...]] = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_pointer,),
    "cuGetErrorName": (_int, _pointer),
    "cuDeviceGet": (_pointer, _int),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuDevicePrimaryCtxRelease": (_int,),
    "cuCtxSetCurrent": (_pointer,),
    "cuMemAlloc": (_pointer, _size),
    "cuMemFree": (_pointer,),
    "cuMemHostAlloc": (_pointer, _size, _uint),
    "cuMemFreeHost": (_pointer,),
    "cuMemHostRegister": (_pointer, _size, _uint),
    "cuMemHostUnregister": (_pointer,),
    "cuStreamCreate": (_pointer, _uint),
    "cuStreamDestroy": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
    "cuEventCreate": (_pointer, _uint),
    "cuEventDestroy": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuMemcpyHtoDAsync": (_pointer, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync": (_pointer, _pointer, _size, _pointer),
}


class DoubleKernel:
    """The gather kernel's contract on the double: reads its table when it runs, not when it is launched."""

    def __init__(self, double: CudaDouble) -> None:
        self.double = double
        self.launches: list[int] = []
        self.refuse = False

    def launch(self, table_address: int, pieces: int, largest_bytes: int, stream: int) -> None:
        if self.refuse:
            raise DeviceCopyError("no kernel today")
        self.launches.append(pieces)

        def run() -> None:
            rows = (ctypes.c_int64 * (3 * pieces)).from_address(table_address)
            for index in range(pieces):
                source, target, size = rows[3 * index : 3 * index + 3]
                assert 0 < size <= largest_bytes
                ctypes.memmove(target, source, size)

        self.double.enqueue(stream, run)
