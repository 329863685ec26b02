"""Moving one frame between page-aligned memory and a file, past the page cache or through it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.own_files import NotOwn, open_own, unlink_own
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.idle_memory import IdleMemory
from spillway_connector.tiers.disk.page_cache import is_cached, read_cached, write_through
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES
from spillway_connector.tiers.tier import Clock, WallClock

# Concurrent reads, and as many writes, by default. Enough to keep a disk busy, and fewer than threads: the others
# compute checksums and copy meanwhile. When all threads transfer at once they all end at once, and then the disk idles.
# See docs/benchmarks.md.
TRANSFERS_AT_ONCE = 4

STUCK_SECONDS = 5.0  # after its deadline a transfer counts as stuck
FRAME_LINKS = 2  # a file with a frame to itself has two names while it is published

_REFUSALS = {
    errno.ENOSPC: RefusedReason.NO_SPACE,
    errno.EDQUOT: RefusedReason.NO_SPACE,
    errno.EFBIG: RefusedReason.NO_SPACE,
    errno.EROFS: RefusedReason.READ_ONLY,
    errno.EACCES: RefusedReason.PERMISSION,
    errno.EPERM: RefusedReason.PERMISSION,
    errno.EMFILE: RefusedReason.RESOURCES,
    errno.ENFILE: RefusedReason.RESOURCES,
    errno.ENOMEM: RefusedReason.RESOURCES,
}
_INPUT_OUTPUT = {errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT, errno.EUCLEAN}


def tier_error(error: OSError, doing: str) -> TierError:
    """Return the tier error for a failed system call. No errno means that an entry is damaged."""
    sentence = f"{doing}: {error.strerror or error}"
    if isinstance(error, NotOwn):
        return TierRefused(RefusedReason.FOREIGN, sentence)
    if error.errno in _INPUT_OUTPUT:
        return TierUnreachable(UnreachableReason.INPUT_OUTPUT, sentence)
    return TierRefused(_REFUSALS.get(error.errno or 0, RefusedReason.OTHER), sentence)


@contextmanager
def preparing(root: Path) -> Iterator[None]:
    """Raise a tier error if a store's directory cannot be made or opened."""
    try:
        yield
    except FileExistsError as error:
        raise TierRefused(
            RefusedReason.OTHER, f"path: {error.filename} is a file; give a directory or remove it"
        ) from error
    except OSError as error:
        raise tier_error(error, f"path: {root}: preparing the directory") from error


def supports_direct(directory: Path, depth: int = 1) -> bool:
    """Whether files in ``directory`` take O_DIRECT with page-aligned buffers: tried, because the kernel has no query.

    overlayfs, NFS, FUSE and older tmpfs answer EINVAL, some only at the first transfer. Raises OSError when not even a
    plain file can be written. depth: of a file in ``directory``, see own_files.py.
    """
    path = directory / f"probe-{os.urandom(8).hex()}"
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        descriptor = open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, depth)
    except OSError as error:
        if error.errno == errno.EINVAL:
            unlink_own(path, depth, missing_ok=True)  # the file is made before the flag is refused
            return False
        raise
    try:
        os.pwritev(descriptor, [page], 0)
        return os.preadv(descriptor, [page], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(descriptor)
        unlink_own(path, depth, missing_ok=True)


def enable_direct(descriptor: int) -> None:
    """Use direct I/O from now on, if the file system takes it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        pass


def disable_direct(descriptor: int) -> bool:
    """Use the page cache from now on, for file systems that accept O_DIRECT and reject the transfer.

    Returns whether direct I/O was on.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


class _Turns:
    """``at_once`` transfers at a time. One that is stuck in the kernel long after its deadline loses its turn, so that
    it does not end the tier; as many as there are turns may be stuck so. Safe from several threads."""

    def __init__(self, at_once: int, clock: Clock) -> None:
        self._at_once = at_once
        self._clock = clock
        self._changed = threading.Condition()
        self._deadlines: dict[object, float] = {}  # of the transfers under way
        self._stuck: set[object] = set()

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Raises TierTimeout if none is free before the deadline."""
        mine = object()
        with self._changed:
            while len(self._deadlines) >= self._at_once and not self._take_from_stuck():
                left = deadline - self._clock()
                if left <= 0 or not self._changed.wait(left):
                    raise TierTimeout("earlier transfers were still running at the deadline")
            self._deadlines[mine] = deadline
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.pop(mine, None)
                self._stuck.discard(mine)
                self._changed.notify()

    def _take_from_stuck(self) -> bool:
        overdue = self._clock() - STUCK_SECONDS
        for holder, deadline in self._deadlines.items():
            if deadline <= overdue and len(self._stuck) < self._at_once:
                del self._deadlines[holder]
                self._stuck.add(holder)
                return True
        return False


class FrameFiles:
    """Reads and writes frames as frame_places.py places their headers, with zeros up to a whole page.

    payload_bytes: of every frame. direct: use O_DIRECT; set by the tier if supports_direct is true, and cleared for
    good by the first EINVAL. page_cache: beside it, leave frames in the page cache while memory is idle, and read those
    that lie there; set by the tier if supports_page_cache is true. wall_clock: of the frames' ages.
    transfers_at_once: of each direction, for any number of threads. Safe from several threads.
    """

    def __init__(
        self,
        payload_bytes: int,
        transfers_at_once: int = TRANSFERS_AT_ONCE,
        *,
        clock: Clock,
        wall_clock: WallClock,
    ) -> None:
        self.direct = False
        self.page_cache = False
        self._idle_memory = IdleMemory(clock)
        # One each: a request waits for reads, so they must not queue behind writes.
        self._reading = _Turns(transfers_at_once, clock)
        self._writing = _Turns(transfers_at_once, clock)
        self._clock = clock
        self._wall_clock = wall_clock
        self.places = FramePlaces.of(payload_bytes)
        self.frame_bytes = self.places.frame_bytes
        self._tail_bytes = self.places.tail_bytes
        self._whole_bytes = payload_bytes - self._tail_bytes
        self._pages = threading.local()

    def read(
        self, path: str, depth: int, target: memoryview, deadline: float, oldest_ns: int = 0, *, renew: bool = True
    ) -> memoryview:
        """Fill ``target`` and return the header (valid until this thread's next call); may renew the mtime.

        depth: see own_files.py. oldest_ns: a frame last used before is expired. Raises TierMiss (expired),
        FileNotFoundError, OSError, TierCorrupt(SHORT, LENGTH or FOREIGN), TierTimeout. Nothing is verified.
        """
        try:
            descriptor = open_own(path, os.O_RDONLY | self.direct_flag(target), depth, links=FRAME_LINKS)
        except NotOwn as foreign:
            raise TierCorrupt(CorruptReason.FOREIGN, str(foreign.strerror)) from None
        try:
            status = os.fstat(descriptor)
            if status.st_mtime_ns < oldest_ns:
                raise TierMiss("the frame has expired")
            size = status.st_size
            if size != self.frame_bytes:
                reason = CorruptReason.SHORT if size < self.frame_bytes else CorruptReason.LENGTH
                raise TierCorrupt(reason, f"{path}: {size} bytes, a frame has {self.frame_bytes}")
            header = self.read_at(descriptor, 0, target, deadline)
            try:
                if renew and status.st_nlink == 1:  # or it is being published, or a file from outside
                    self.renew(descriptor)
            except OSError:
                pass  # a read-only file system keeps its order
        finally:
            os.close(descriptor)
        return header

    def read_at(self, descriptor: int, offset: int, target: memoryview, deadline: float) -> memoryview:
        """Fill ``target`` from the frame at ``offset`` in one call of the kernel; returns the header.

        It is valid until this thread's next call. Raises OSError, TierCorrupt(SHORT), TierTimeout. Nothing is
        verified.
        """
        header, tail = self._thread_pages()
        views = self._views(header, target, tail)
        with self._reading.turn(deadline):
            self._move(os.preadv, descriptor, views, deadline, offset)
        return self._taken(header, target, tail)

    def read_cached_at(self, descriptor: int, offset: int, target: memoryview) -> memoryview | None:
        """Read as :meth:`read_at` does, but only from the page cache, without waiting; None if a part is not there.

        descriptor: without O_DIRECT. ``target`` is then undefined.
        """
        header, tail = self._thread_pages()
        if not is_cached(descriptor, offset, self.frame_bytes):
            return None
        if not read_cached(descriptor, offset, self._views(header, target, tail)):
            return None
        return self._taken(header, target, tail)

    def renew(self, descriptor: int) -> None:
        """Mark an open file as used now: eviction is in the order of mtimes. Raises OSError.

        With explicit nanoseconds, because the kernel's timestamps advance in steps of milliseconds and would tie.
        """
        now_ns = int(self._wall_clock() * 1e9)
        os.utime(descriptor, ns=(now_ns, now_ns))

    def create(self, path: str, depth: int, source: memoryview) -> int:
        """Open a new file for :meth:`write`, exclusively. Raises OSError."""
        return open_own(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self.direct_flag(source), depth)

    def write(self, descriptor: int, header: bytes, source: memoryview, deadline: float) -> None:
        """Write a whole frame. Raises OSError, TierTimeout; the file's contents are then undefined."""
        self.write_at(descriptor, 0, header, source, deadline)
        self.renew(descriptor)

    def write_at(self, descriptor: int, offset: int, header: bytes, source: memoryview, deadline: float) -> None:
        """Write a frame at ``offset`` in one call of the kernel. Raises as :meth:`write` does."""
        page, tail = self._thread_pages()
        if self._tail_bytes:
            tail[: self._tail_bytes] = source[self._whole_bytes :]
            tail[self._tail_bytes :] = bytes(PAGE_BYTES - self._tail_bytes)
        if self.places.header_is_last:
            tail[-HEADER_BYTES:] = header
        else:
            page[:] = header
        with self._writing.turn(deadline):
            self._move(os.pwritev, descriptor, self._views(page, source, tail), deadline, offset)

    def write_through_at(
        self, descriptor: int, offset: int, header: bytes, source: memoryview, deadline: float
    ) -> None:
        """Write through the page cache, which then holds the frame. descriptor: opened without O_DIRECT.

        It ends when the disk has taken the frame, so a slow or failing disk shows as it does without the page cache,
        and no more than the transfers under way waits in memory to be written.
        """
        self.write_at(descriptor, offset, header, source, deadline)
        with self._writing.turn(deadline):
            write_through(descriptor, offset, self.frame_bytes)

    @property
    def uses_page_cache(self) -> bool:
        """Whether to use the page cache now, for reads too: memory that was read twice is no longer idle."""
        return self.page_cache and self._idle_memory.enough

    def _views(self, header: memoryview, payload: memoryview, tail: memoryview) -> list[memoryview]:
        views = [payload[: self._whole_bytes]] if self.places.header_is_last else [header, payload[: self._whole_bytes]]
        return [*views, tail] if self._tail_bytes else views

    def _taken(self, header: memoryview, target: memoryview, tail: memoryview) -> memoryview:
        """Complete ``target`` from the pages beside it that were read, and return the header."""
        if self._tail_bytes:
            target[self._whole_bytes :] = tail[: self._tail_bytes]
        return tail[-HEADER_BYTES:] if self.places.header_is_last else header

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        views: list[memoryview],
        deadline: float,
        offset: int = 0,
    ) -> None:
        """Repeat a vectored call until all views are done: a signal or a full device ends it early."""
        views = [view for view in views if view.nbytes]
        refused = False
        while views:
            if self._clock() >= deadline:
                raise TierTimeout("the deadline passed between two parts of a file transfer")
            try:
                moved = call(descriptor, views, offset)
            except OSError as error:
                # Another thread may have had the same error and cleared the flag of the shared descriptor.
                if error.errno == errno.EINVAL and (self._drop_direct(descriptor) or not refused):
                    refused = True
                    continue
                raise
            if moved == 0:
                raise TierCorrupt(CorruptReason.SHORT, f"the file ended {sum(v.nbytes for v in views)} bytes early")
            offset += moved
            while views and moved >= views[0].nbytes:
                moved -= views.pop(0).nbytes
            if moved:
                views[0] = views[0][moved:]

    def direct_flag(self, payload: memoryview) -> int:
        """Return O_DIRECT if the file system takes it and ``payload`` lies on a page boundary, else 0."""
        aligned = np.frombuffer(payload, np.uint8).ctypes.data % PAGE_BYTES == 0 if payload.nbytes else False
        return os.O_DIRECT if self.direct and aligned else 0

    def _drop_direct(self, descriptor: int) -> bool:
        dropped = disable_direct(descriptor)
        if dropped:
            self.direct = False
        return dropped

    def _thread_pages(self) -> tuple[memoryview, memoryview]:
        try:
            return self._pages.header, self._pages.tail
        except AttributeError:
            self._pages.header = memoryview(mmap.mmap(-1, PAGE_BYTES))
            self._pages.tail = memoryview(mmap.mmap(-1, PAGE_BYTES))
            return self._pages.header, self._pages.tail
