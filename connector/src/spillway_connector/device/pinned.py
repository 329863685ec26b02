"""Page-lock the CPU tier for the device: without it every "asynchronous" copy waits for its stream and blocks.

The ways, best first: aclrtHostRegisterV2, torch_npu's hook for the same call, mlock alone, nothing. Only the first
two make copies asynchronous; mlock merely keeps the pages in memory. Registration is tried in chunks, because
single registrations above about 200 GB fail (LMCache-Ascend#242), and either all chunks are registered or none.

A zero return proves little: in CANN 8.5 to 9.1 the PINNED flag only enters the range in a table of the runtime. So
the pages are locked by mlock as well, and `python -m spillway_connector.device.npu_probe` times real copies.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from spillway_connector.errors import DeviceCopyError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 30
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = _libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class PinMethod(enum.Enum):
    ACL = "acl"
    TORCH_NPU = "torch_npu"
    CUDA = "cuda"
    MLOCK = "mlock"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Registrar:
    """One way to register a host range with the runtime. Both raise DeviceCopyError."""

    method: PinMethod
    register: Callable[[int, int], None]  # address, bytes
    unregister: Callable[[int], None]  # address


@dataclass(frozen=True, slots=True)
class Chunk:
    address: int
    size_bytes: int


class HostPin:
    """The result of `pin_host_memory`. Release it after the last copy and before the memory is unmapped."""

    def __init__(self, method: PinMethod, chunks: tuple[Chunk, ...], registrar: Registrar | None, locked: bool) -> None:
        self.method = method
        self.locked = locked  # by mlock: the pages stay in memory whatever the runtime's registration means
        self._chunks = chunks
        self._registrar = registrar
        self._released = False

    @classmethod
    def unpinned(cls) -> HostPin:
        """The pin of memory that was not to be pinned."""
        return cls(PinMethod.NONE, (), None, locked=False)

    @property
    def pinned(self) -> bool:
        """Whether the runtime takes the memory for page-locked, so that copies are asynchronous."""
        return self._registrar is not None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The addresses inside the memory at which one registration ends and the next begins."""
        return tuple(chunk.address for chunk in self._chunks[1:]) if self.pinned else ()

    def release(self) -> None:
        """Release the memory. May be called twice."""
        if self._released:
            return
        self._released = True
        if self._registrar is not None:
            _unregister(self._registrar, self._chunks)
        if self.locked:
            for chunk in self._chunks:
                _libc.munlock(chunk.address, chunk.size_bytes)


def pin_host_memory(
    address: int, num_rows: int, row_bytes: int, registrars: list[Registrar], chunk_bytes: int = CHUNK_BYTES
) -> HostPin:
    """Pin the rows without ever raising: memory that cannot be pinned is used as it is, with a loud log line and a
    metric.

    The calling thread has set its device. The memory is page-aligned and rows are whole pages.
    """
    chunks = row_chunks(address, num_rows, row_bytes, chunk_bytes)
    failures = []
    for registrar in registrars:
        failure = _register(registrar, chunks)
        if failure is None:
            locked, why = _lock(chunks)
            if not locked:
                logger.info("Spillway: CPU tier registered with the runtime; mlock beside it failed: %s", why)
            logger.info("Spillway: CPU tier pinned by %s in %d chunks", registrar.method.value, len(chunks))
            return HostPin(registrar.method, chunks, registrar, locked)
        failures.append(f"{registrar.method.value}: {failure}")
    locked, why = _lock(chunks)
    if not locked:
        failures.append(f"mlock: {why}")
    logger.error(
        "Spillway: the CPU tier of %d bytes is not pinned (%s), so each copy blocks the model until it is done; an "
        "unlimited memlock limit (IPC_LOCK) is needed, and on an NPU CANN >= 8.5 and a kernel above 5.10",
        num_rows * row_bytes,
        "; ".join(failures) or "no way to register it",
    )
    return HostPin(PinMethod.MLOCK if locked else PinMethod.NONE, chunks, None, locked)


def row_chunks(address: int, num_rows: int, row_bytes: int, chunk_bytes: int) -> tuple[Chunk, ...]:
    """The memory in pieces of whole rows, each of at most `chunk_bytes` (or one row)."""
    rows_each = max(1, chunk_bytes // row_bytes)
    return tuple(
        Chunk(address + first * row_bytes, min(rows_each, num_rows - first) * row_bytes)
        for first in range(0, num_rows, rows_each)
    )


def _register(registrar: Registrar, chunks: tuple[Chunk, ...]) -> str | None:
    """Register all chunks and return None, or register none and return why."""
    for position, chunk in enumerate(chunks):
        try:
            registrar.register(chunk.address, chunk.size_bytes)
        except DeviceCopyError as error:
            _unregister(registrar, chunks[:position])
            return f"chunk {position} of {len(chunks)}: {error}"
    return None


def _unregister(registrar: Registrar, chunks: tuple[Chunk, ...]) -> None:
    for chunk in reversed(chunks):
        try:
            registrar.unregister(chunk.address)
        except DeviceCopyError as error:
            logger.warning("Spillway: a range of the CPU tier stays registered: %s", error)


def _lock(chunks: tuple[Chunk, ...]) -> tuple[bool, str]:
    """Lock all chunks, or none; return whether they are locked, and why not."""
    for position, chunk in enumerate(chunks):
        if _libc.mlock(chunk.address, chunk.size_bytes) != 0:
            reason = os.strerror(ctypes.get_errno())
            for done in chunks[:position]:
                _libc.munlock(done.address, done.size_bytes)
            return False, reason
    return True, ""
