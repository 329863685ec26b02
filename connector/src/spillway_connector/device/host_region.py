"""The CPU tier's memory: one shared mapping of rows that every process of a replica sees.

The file in /dev/shm exists only from the first opener until `unlink_name`, which the last opener calls: afterwards
the memory lives exactly as long as the processes that map it, so a killed engine leaves nothing behind
(vLLM's file survives it: vllm#54002, #57303).

A page lies on the memory node of the process that takes it first. So the opener that makes the file takes none; each
rank takes those of its own cells (`claim`), then whatever is left (`claim_rest`), before anything touches them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillway_connector.cut_files import WatchedMapping
from spillway_connector.errors import HostMemoryError
from spillway_connector.own_files import NotOwn, open_own

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11's mmap does not name it
_POPULATED_AT_ONCE_BYTES = 4 << 20  # a call of 1 ms, during which the process can map nothing else
_OPEN_TIMEOUT_SECONDS = 30.0
REGION_DEPTH = 1  # names at the end of a region's path that are the engine's own
_SHM = Path("/dev/shm")  # noqa: S108 - the point of the file is to be in shared memory

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise keeps the GIL
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def region_path(replica_id: str) -> Path:
    """The path of the replica's file while it has a name; the name that vLLM's tiers use."""
    return _SHM / f"vllm_offload_{replica_id}.mmap"


class HostRegion:
    """`num_rows` rows of `row_bytes`, zero at first. Open it in every process, close it once in each."""

    def __init__(self, path: Path, num_rows: int, row_bytes: int, *, keeps_name: bool = False) -> None:
        """keeps_name: the memory outlives the processes that map it; whoever made the path removes it."""
        self.path = path
        self._keeps_name = keeps_name
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self.size_bytes = num_rows * row_bytes
        self._descriptor = self._open_or_create()
        try:
            self._inode = os.fstat(self._descriptor).st_ino
            self._mapping: mmap.mmap | None = mmap.mmap(self._descriptor, self.size_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._bytes: npt.NDArray[np.int8] | None = np.frombuffer(self._mapping, dtype=np.int8)
        self._watched: WatchedMapping | None = None
        if keeps_name:  # others can cut a file as long as it has a name
            self._watched = WatchedMapping.of(self._descriptor, self.address, self.size_bytes)
        self._populating: threading.Thread | None = None
        self._closing = False

    def _open_or_create(self) -> int:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileExistsError:
            return self._open_created_by_another()
        try:
            room = os.statvfs(self.path.parent)
            if room.f_blocks and room.f_bavail * room.f_frsize < self.size_bytes:  # no blocks: a tmpfs without a limit
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, self.size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise self._no_room(error) from error
        return descriptor

    def _no_room(self, error: OSError) -> HostMemoryError:
        if not self._keeps_name:
            self.path.unlink(missing_ok=True)
        free = os.statvfs(self.path.parent)
        remedy = "lower num_cpu_blocks or enlarge the pod's shared memory"
        if self._keeps_name:
            remedy = "lower the node tier's bytes, or enlarge that file system (mount -o remount,size=...)"
        return HostMemoryError(
            f"the CPU tier needs {self.size_bytes} bytes in {self.path.parent}, "
            f"{free.f_bavail * free.f_frsize} are free ({error.strerror}); {remedy}"
        )

    def _open_created_by_another(self) -> int:
        try:
            descriptor = open_own(self.path, os.O_RDWR, REGION_DEPTH)
        except NotOwn as error:
            raise HostMemoryError(
                f"the CPU tier's memory cannot be shared: {error.strerror}; every user may put files there: remove "
                "this one"
            ) from error
        deadline = time.monotonic() + _OPEN_TIMEOUT_SECONDS
        while os.fstat(descriptor).st_size < self.size_bytes:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise HostMemoryError(
                    f"{self.path} stayed below {self.size_bytes} bytes for {_OPEN_TIMEOUT_SECONDS:.0f} s; "
                    "it is left from another configuration: remove it and start again"
                )
            time.sleep(0.005)
        return descriptor

    @property
    def taken_bytes(self) -> int:
        """The bytes that all processes have in memory by now."""
        return os.fstat(self._descriptor).st_blocks * 512

    def claim(self, offset_bytes: int, length_bytes: int) -> None:
        """Take these bytes of every row, whole pages, from the memory node that this thread runs on.

        Raises HostMemoryError: without it a full /dev/shm would show up later, as SIGBUS.
        """
        if length_bytes == self.row_bytes:
            self._take(0, self.size_bytes)
            return
        for row in range(self.num_rows if length_bytes else 0):
            self._take(row * self.row_bytes + offset_bytes, length_bytes)

    def claim_rest(self, patience_seconds: float = 5.0) -> None:
        """Wait while other processes take their pages, then take the rest: all pages of a rank that takes none.

        patience_seconds: without a page taken by anyone. Raises HostMemoryError.
        """
        taken, since = self.taken_bytes, time.monotonic()
        while taken < self.size_bytes and time.monotonic() - since < patience_seconds:
            time.sleep(0.005)
            now = self.taken_bytes
            if now != taken:
                taken, since = now, time.monotonic()
        self._take(0, self.size_bytes)

    def _take(self, offset_bytes: int, length_bytes: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, offset_bytes, length_bytes)
        except OSError as error:
            raise self._no_room(error) from error

    @property
    def is_whole(self) -> bool:
        """Whether the file is whole. False: it was cut, and the rows hold no chunks any more."""
        return self._watched is None or self._watched.is_whole

    @property
    def address(self) -> int:
        """The address of row 0 in this process."""
        assert self._bytes is not None
        return int(self._bytes.ctypes.data)

    def populate(self, offset_bytes: int, length_bytes: int) -> bool:
        """Take page faults now instead of in the first copies; a hint, so failure only costs time.

        Every process takes its page faults itself, even for pages that another one, or `claim`, has taken.
        Returns False if this kernel cannot, or the region is being closed. Raises OSError.
        """
        address, end = self.address, offset_bytes + length_bytes
        for start in range(offset_bytes, end, _POPULATED_AT_ONCE_BYTES):
            if self._closing:
                return False
            if _madvise(address + start, min(_POPULATED_AT_ONCE_BYTES, end - start), _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code == errno.EINVAL:
                    return False  # a kernel before 5.14. The pages themselves are taken by `claim_rest`.
                raise OSError(code, os.strerror(code))
        return True

    def populate_behind(self) -> None:
        """Populate the whole region on a background thread, row 0 first; `cleanup` ends it."""

        def populate() -> None:
            try:
                self.populate(0, self.size_bytes)
            except OSError as error:
                logger.warning("CPU tier: pages could not be mapped ahead of their use: %s", error)

        self._populating = threading.Thread(target=populate, name="spillway-populate", daemon=True)
        self._populating.start()

    def create_kv_memoryview(self) -> memoryview:
        """Rows as vLLM's tiers want them: (num_rows, row_bytes), int8, writable, no copy."""
        assert self._bytes is not None
        return self._bytes.reshape(self.num_rows, self.row_bytes).data

    def unlink_name(self) -> None:
        """Remove the file's name if it still is this region's; the memory stays until every mapping is closed."""
        if self._keeps_name:
            return
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass

    def cleanup(self) -> None:
        """Close this process's mapping; vLLM's tier manager calls it by this name. Twice is harmless."""
        self.unlink_name()
        self._closing = True
        if self._populating is not None:
            self._populating.join()  # at most one call
        self._bytes = None
        if self._watched is not None:
            self._watched.forget()
            self._watched = None
        if self._mapping is not None:
            os.close(self._descriptor)
            try:
                self._mapping.close()
            except BufferError:
                # A slice of a row is still held somewhere; the mapping then goes with the process.
                logger.debug("CPU tier mapping still referenced at close")
            self._mapping = None
