"""The chunk files of a size class: making, opening and dropping them, and moving one frame to or from a slot.

``Chunks.headers`` is the size class's header table.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.own_files import NotOwn, clear_the_place, is_regular, open_own, unlink_own
from spillway_connector.tiers.disk.io import FrameFiles
from spillway_connector.tiers.disk.page_cache import is_cached
from spillway_connector.tiers.disk.slab.headers import HeaderTable
from spillway_connector.tiers.disk.slab.layout import SIZE_CLASS_DEPTH, SizeClassShape, chunk_name, parse_chunk_name
from spillway_connector.tiers.frame import PAGE_BYTES

OPEN_FILES_MAX = 256
ZEROS = memoryview(mmap.mmap(-1, PAGE_BYTES, access=mmap.ACCESS_READ))


class _OpenFile:
    """File that is closed with its last reference, so that its number is not reused during a transfer."""

    def __init__(self, path: Path, flags: int) -> None:
        self.descriptor = open_own(path, flags, SIZE_CLASS_DEPTH)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class CachedFrame:
    """The frame was in the page cache a moment ago."""

    __slots__ = ("_file", "_files", "_offset")

    def __init__(self, files: FrameFiles, file: _OpenFile, offset: int) -> None:
        self._files = files
        self._file = file
        self._offset = offset

    def read(self, target: memoryview) -> memoryview | None:
        """Read the payload into ``target`` and return the header, as :meth:`Chunks.read` does; None if pages have gone.

        A copy from memory to memory. Not verified.
        """
        return self._files.read_cached_at(self._file.descriptor, self._offset, target)


class Chunks:
    """The files of one size class in ``folder``. ``files`` moves the frames, with direct I/O or without. Safe from
    several threads."""

    def __init__(self, folder: Path, shape: SizeClassShape, files: FrameFiles, *, writable: bool) -> None:
        self.headers = HeaderTable(folder, shape)
        self._folder = folder
        self._shape = shape
        self._files = files
        self._mode = os.O_RDWR if writable else os.O_RDONLY
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, int, int], _OpenFile] = OrderedDict()

    def read(self, slot: int, epoch: int, target: memoryview, deadline: float) -> memoryview:
        """Read one frame into ``target`` and return its header, valid until this thread's next call. Not verified.

        Raises TierCorrupt (SHORT, LENGTH) if the file has another size, OSError (FileNotFoundError: the chunk has
        gone), TierTimeout.
        """
        file = self._file(self._shape.chunk_of(slot), epoch, self._files.direct_flag(target))
        offset = self._shape.offset_of(slot)
        self._check_size(file, slot)
        return self._files.read_at(file.descriptor, offset, target, deadline)

    def cached(self, slot: int, epoch: int) -> CachedFrame | None:
        """The frame in a slot, if all of it lies in the page cache now. Raises as :meth:`read` does."""
        file = self._file(self._shape.chunk_of(slot), epoch, 0)
        self._check_size(file, slot)
        offset = self._shape.offset_of(slot)
        if not is_cached(file.descriptor, offset, self._files.frame_bytes):
            return None
        return CachedFrame(self._files, file, offset)

    def _check_size(self, file: _OpenFile, slot: int) -> None:
        offset = self._shape.offset_of(slot)
        size = os.fstat(file.descriptor).st_size
        if size < offset + self._files.frame_bytes:
            raise TierCorrupt(CorruptReason.SHORT, f"chunk {self._shape.chunk_of(slot)} ends after {size} bytes")
        if size > self._shape.chunk_bytes:
            raise TierCorrupt(CorruptReason.LENGTH, f"a chunk of {size} bytes; {self._shape.chunk_bytes} is its size")

    def write(self, slot: int, epoch: int, header: bytes, source: memoryview, deadline: float) -> None:
        """Write one frame from ``source``. Raises OSError (FileNotFoundError: the chunk has gone), TierTimeout."""
        chunk, offset, files = self._shape.chunk_of(slot), self._shape.offset_of(slot), self._files
        if files.uses_page_cache:
            file = self._file(chunk, epoch, 0)
            files.write_through_at(file.descriptor, offset, header, source, deadline)
        else:
            file = self._file(chunk, epoch, files.direct_flag(source))
            files.write_at(file.descriptor, offset, header, source, deadline)

    def blank(self, slot: int, epoch: int) -> None:
        """Overwrite the page with a slot's header: a rebuilt index must not find a frame that was proven wrong."""
        self.headers.clear(slot)
        # Directly: a dirty page would stall later writes.
        file = self._file(self._shape.chunk_of(slot), epoch, self._files.direct_flag(ZEROS))
        at = self._files.places.header_at // PAGE_BYTES * PAGE_BYTES
        os.pwritev(file.descriptor, [ZEROS], self._shape.offset_of(slot) + at)

    def make(self, chunk: int, epoch: int) -> None:
        """Make a chunk's file with all its blocks allocated. Raises OSError; then there is no file."""
        path = self._folder / chunk_name(chunk, epoch)
        descriptor = open_own(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, SIZE_CLASS_DEPTH)
        try:
            os.posix_fallocate(descriptor, 0, self._shape.chunk_bytes)
        except OSError:
            unlink_own(path, SIZE_CLASS_DEPTH, missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def unlink(self, chunk: int, epoch: int) -> None:
        """Remove a chunk. Its space is free at once, though other processes may still have it open. Raises OSError.

        What has its name and is no file of the store loses the name, and is not cut.
        """
        path = self._folder / chunk_name(chunk, epoch)
        clear_the_place(path, SIZE_CLASS_DEPTH)
        try:
            descriptor = open_own(path, os.O_WRONLY, SIZE_CLASS_DEPTH)
        except FileNotFoundError:
            return
        except NotOwn:  # of another user
            unlink_own(path, SIZE_CLASS_DEPTH, missing_ok=True)
            return
        try:
            unlink_own(path, SIZE_CLASS_DEPTH, missing_ok=True)
            os.ftruncate(descriptor, 0)  # a reader finds it short, and its entries removed: a miss
        finally:
            os.close(descriptor)

    def close_all_but(self, epochs: dict[int, int]) -> None:
        """Close the files of chunks that no longer exist. epochs: of those that do, by chunk number."""
        with self._lock:
            for chunk, epoch, direct in list(self._open):
                if epochs.get(chunk) != epoch:
                    del self._open[chunk, epoch, direct]

    def _file(self, chunk: int, epoch: int, direct: int) -> _OpenFile:
        """direct: O_DIRECT or 0."""
        place = (chunk, epoch, direct)
        with self._lock:
            file = self._open.get(place)
            if file is not None:
                self._open.move_to_end(place)
                return file
            file = self._open[place] = _OpenFile(self._folder / chunk_name(chunk, epoch), self._mode | direct)
            while len(self._open) > OPEN_FILES_MAX:
                self._open.popitem(last=False)
            return file


def chunks_on_disk(folder: Path) -> dict[int, tuple[int, int]]:
    """Epoch and size of every chunk in ``folder``, the newest if there are two. Raises OSError.

    What has the name of a chunk and is no file, or one with a second name, is none.
    """
    found: dict[int, tuple[int, int]] = {}
    for _, (chunk, epoch), status in _named_as_chunks(folder):
        if is_regular(status) and status.st_nlink == 1 and epoch > found.get(chunk, (0, 0))[0]:
            found[chunk] = (epoch, status.st_size)
    return found


def clear_foreign_chunks(folder: Path) -> None:
    """Take away what has the name of a chunk and is none. Raises OSError."""
    for path, _, status in _named_as_chunks(folder):
        if not is_regular(status) or status.st_nlink > 1:
            clear_the_place(path, SIZE_CLASS_DEPTH)


def _named_as_chunks(folder: Path) -> list[tuple[Path, tuple[int, int], os.stat_result]]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            parsed = parse_chunk_name(entry.name)
            if parsed is not None:
                with suppress(FileNotFoundError):
                    found.append((Path(entry.path), parsed, entry.stat(follow_symlinks=False)))
    return found
