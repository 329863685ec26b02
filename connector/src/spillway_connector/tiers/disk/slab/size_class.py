"""One size class of a root as a process has it open: found or made, checked, kept current, and changed under a lock.

Another process may replace the index (it was damaged, or had to grow) or remove everything; each use checks that the
file it has open is still the current one.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from spillway_connector.errors import RefusedReason, TierError, TierRefused, TierTimeout
from spillway_connector.namespace import Namespace
from spillway_connector.own_files import make_folders, unlink_own
from spillway_connector.tiers.disk.clock import AgeClock
from spillway_connector.tiers.disk.file_lock import FileLock
from spillway_connector.tiers.disk.io import FrameFiles, preparing, supports_direct, tier_error
from spillway_connector.tiers.disk.page_cache import supports_page_cache
from spillway_connector.tiers.disk.root import DOCUMENT_NAME, SLAB_FOLDER, NamespaceDocument, make_root
from spillway_connector.tiers.disk.slab.chunks import Chunks, chunks_on_disk, clear_foreign_chunks
from spillway_connector.tiers.disk.slab.columns import FileCut
from spillway_connector.tiers.disk.slab.headers import HeaderTable
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import (
    INDEX_NAME,
    LOCK_DEPTH,
    LOCK_LINKS,
    LOCK_NAME,
    SIZE_CLASS_DEPTH,
    WRITERS_FOLDER,
    SizeClassShape,
    plan_shape,
)
from spillway_connector.tiers.disk.slab.policy import WRITING
from spillway_connector.tiers.disk.slab.rebuild import plan_from_chunks, rebuild
from spillway_connector.tiers.disk.slab.session_file import remove_sessions
from spillway_connector.tiers.disk.slab.space import Room, SizeClass, SlabSpace
from spillway_connector.tiers.disk.slab.writers import WriterLease
from spillway_connector.tiers.disk.store_mark import StoreMark
from spillway_connector.tiers.tier import Clock

_log = logging.getLogger(__name__)

READ_ONLY_RETRY_SECONDS = 5.0
_READING_GOES_ON = (RefusedReason.READ_ONLY, RefusedReason.PERMISSION, RefusedReason.NO_SPACE)


class OpenSizeClass:
    """The size class of slots of ``slot_bytes`` in ``root``, for the frames of one namespace. Safe from several
    threads."""

    def __init__(
        self,
        namespace: Namespace,
        slot_bytes: int,
        root: Path,
        *,
        files: FrameFiles,
        space: SlabSpace,
        ages: AgeClock,
        clock: Clock,
        page_cache: bool,
    ) -> None:
        self._page_cache = page_cache
        self.space = space
        self.lease = WriterLease(root / SLAB_FOLDER / WRITERS_FOLDER)
        self.document = NamespaceDocument(root / namespace.hex, namespace)
        self.mark = StoreMark(root)
        self._namespace = namespace
        self._slot_bytes = slot_bytes
        self._root = root
        self._folder = root / SLAB_FOLDER / str(slot_bytes)
        self._index_path = str(self._folder / INDEX_NAME)
        self._files = files
        self._ages = ages
        self._clock = clock
        self._lock = FileLock(root / SLAB_FOLDER / LOCK_NAME, clock, LOCK_DEPTH, links=LOCK_LINKS)
        self._prepare_lock = threading.Lock()
        self._size_class: SizeClass | None = None
        self._read_only_until = -math.inf
        self._changes_seen = -1
        self._suspected = False
        self._closed = False

    def writable(self, deadline: float) -> SizeClass:
        """The size class, made or opened if need be. Raises TierError."""
        size_class = self._size_class
        if size_class is not None and size_class.index.writable and not self.replaced(size_class.index):
            if self._follow(size_class):
                self._close_dropped_chunks(size_class)
                return size_class
            self._remove_index(size_class, deadline)
        if not self._prepare_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self._root}: another thread is still preparing the directory")
        try:
            size_class = self._size_class
            if size_class is None or not size_class.index.writable or self.replaced(size_class.index):
                size_class = self._attach(deadline)
            return size_class
        finally:
            self._prepare_lock.release()

    def readable(self, deadline: float) -> SizeClass | None:
        """Return the size class as :meth:`writable` does, but let readers go on if only writing is refused (a read-only
        mount). None: there is no size class."""
        if self._clock() >= self._read_only_until:
            try:
                return self.writable(deadline)
            except TierRefused as refused:
                if refused.reason not in _READING_GOES_ON:
                    raise
                self._read_only_until = self._clock() + READ_ONLY_RETRY_SECONDS
        size_class = self._size_class
        if size_class is not None and not self.replaced(size_class.index):
            self._follow(size_class)
            return size_class
        try:
            self.document.check()
            self._ages.share()
            self.mark.share()
            index = SlabIndex.open(self._folder, writable=False)
        except OSError as error:
            raise tier_error(error, f"{self._folder}: opening the index") from error
        self._size_class = None if index is None else self._open_chunks(index)
        return self._size_class

    def last_used(self) -> SizeClass | None:
        """The size class as it was last used, without reading the disk."""
        return self._size_class

    def replaced(self, index: SlabIndex) -> bool:
        """Whether the index file was removed, or replaced by a larger or rebuilt one. About a microsecond."""
        try:
            status = os.stat(self._index_path, follow_symlinks=False)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != index.identity

    @property
    def suspected(self) -> bool:
        return self._suspected

    def suspect(self) -> None:
        """A file that the index lists is missing: compare index and files before the next change."""
        self._suspected = True

    def _follow(self, size_class: SizeClass) -> bool:
        """Take over other processes' changes; False if the index was cut. Raises TierError."""
        try:
            size_class.index.follow()
        except FileCut as cut:
            if size_class.index.writable:
                return False
            raise tier_error(cut, f"{self._folder}: reading the index") from cut
        except OSError as error:
            raise tier_error(error, f"{self._folder}: reading the index") from error
        return True

    def _remove_index(self, size_class: SizeClass, deadline: float) -> None:
        """Have an index that was cut made again. Raises TierError."""
        try:
            with self._lock.held(deadline):
                if not self.replaced(size_class.index):
                    self._unlink_index()
        except OSError as error:
            raise tier_error(error, f"{self._folder}: removing an index that was cut") from error

    def _unlink_index(self) -> None:
        _log.error("NVMe tier %s: the index was cut or overwritten: it is made again", self._folder)
        unlink_own(self._index_path, SIZE_CLASS_DEPTH, missing_ok=True)

    def _close_dropped_chunks(self, size_class: SizeClass) -> None:
        count = size_class.index.counter("chunk_changes")
        if count != self._changes_seen:
            self._changes_seen = count
            epochs = size_class.index.chunk_epoch
            size_class.chunks.close_all_but({int(chunk): int(epochs[chunk]) for chunk in np.flatnonzero(epochs != 0)})

    def _open_chunks(self, index: SlabIndex) -> SizeClass:
        return SizeClass(index, Chunks(self._folder, index.shape, self._files, writable=index.writable))

    def _attach(self, deadline: float) -> SizeClass:
        """Make or open everything; a found index is checked and repaired."""
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, f"{self._root}: the tier is closed")
        with preparing(self._root):
            make_root(self._root)
            make_folders(self._folder, 2)
            make_folders(self._root / SLAB_FOLDER / WRITERS_FOLDER, 2)
            make_folders(self._root / self._namespace.hex, 1)
            document = self._root / self._namespace.hex / DOCUMENT_NAME
            self.document.ensure(lambda: document.with_name(f"{DOCUMENT_NAME}.{os.urandom(8).hex()}"), 2)
            self._ages.share()
            self.mark.share()
            with self._lock.held(deadline):
                self.lease.acquire()
                self.lease.sweep()
                self._files.direct = supports_direct(self._folder, SIZE_CLASS_DEPTH)
                caches = self._page_cache and self._files.direct
                self._files.page_cache = caches and supports_page_cache(self._folder, SIZE_CLASS_DEPTH)
                size_class = self._open_chunks(self._open_or_rebuild())
                self._repair(size_class)
        self._size_class, self._read_only_until = size_class, -math.inf
        self._close_dropped_chunks(size_class)
        return size_class

    def _open_or_rebuild(self) -> SlabIndex:
        index = SlabIndex.open(self._folder, writable=True)
        room = self.space.measure()
        wanted = plan_shape(self._slot_bytes, room.limit_bytes)
        if index is not None:
            return self._enlarged(index, wanted, room)
        if wanted is None:
            raise TierRefused(
                RefusedReason.NO_SPACE,
                f"max_bytes: {room.limit_bytes} (the smaller of the configured {self.space.max_bytes} and the share of "
                f"the file system) holds no slot of {self._slot_bytes} bytes and its index; raise max_bytes or free "
                "space",
            )
        clear_foreign_chunks(self._folder)
        found = chunks_on_disk(self._folder)
        shape = plan_from_chunks(self._slot_bytes, found, wanted)
        while self.space.measure().left_bytes < shape.index_bytes + shape.table_bytes + shape.changes_bytes:
            if not self.space.drop_stalest(None):
                break
        remove_sessions(self._folder)
        index = rebuild(self._folder, shape, self._ages.now_s())
        SlabIndex.publish_file(self._folder)
        if found:
            _log.warning("NVMe tier %s: the index was rebuilt: %d entries", self._folder, index.used)
        return index

    def _enlarged(self, index: SlabIndex, wanted: SizeClassShape | None, room: Room) -> SlabIndex:
        """The index, or one of more chunks in its place if the bound has been raised a good deal."""
        chunks = 0 if wanted is None else min(wanted.slots // index.shape.slots_per_chunk, 999_999)
        if chunks <= index.shape.chunks * 5 // 4:
            return index
        shape = SizeClassShape(index.shape.slot_bytes, index.shape.slots_per_chunk, chunks)
        if room.left_bytes < shape.index_bytes + shape.table_bytes - index.shape.table_bytes:
            return index
        larger = SlabIndex.create(self._folder, shape)
        larger.adopt(index)
        HeaderTable(self._folder, index.shape).grow(shape)
        SlabIndex.publish_file(self._folder)
        return larger

    def _repair(self, size_class: SizeClass) -> None:
        """Make index and files agree, and release orphaned slots. Under the lock."""
        index = size_class.index
        clear_foreign_chunks(self._folder)
        found = chunks_on_disk(self._folder)
        for chunk, (epoch, _) in found.items():
            if chunk >= index.shape.chunks or int(index.chunk_epoch[chunk]) != epoch:
                size_class.chunks.unlink(chunk, epoch)  # its maker was killed before it was entered
        for chunk in np.flatnonzero(index.chunk_epoch != 0).tolist():
            if found.get(chunk, (0, 0))[0] != int(index.chunk_epoch[chunk]):
                index.put("chunk_epoch", chunk, 0)
        index.recover()
        self.release_orphaned(index)
        index.put("dirty", 0, 0)
        index.announce()

    def maintain(self, size_class: SizeClass) -> None:
        """Every UPKEEP_SECONDS: apply the bound and the age limit, and release orphaned slots. Under the lock."""
        if self.space.maintain(size_class):
            self.release_orphaned(size_class.index)

    def release_orphaned(self, index: SlabIndex) -> None:
        """Free the slots that were claimed by writers that no longer run. Under the lock."""
        writing = np.flatnonzero(index.state == WRITING)
        owners = index.owner[writing]
        for owner in np.unique(owners).tolist():
            if not self.lease.is_held(owner):
                for slot in writing[owners == owner].tolist():
                    index.release(slot)  # its record in the header table is empty since it was claimed

    @contextmanager
    def locked(self, deadline: float) -> Iterator[SizeClass]:
        """Hold the root's lock with the size class that is current under it. An index that a killed holder left is
        repaired first. Raises TierError, OSError."""
        self.writable(deadline)
        while True:
            with self._lock.held(deadline):
                size_class = self._size_class
                if size_class is not None and size_class.index.writable and not self.replaced(size_class.index):
                    with ExitStack() as changing:
                        if self._begin_changing(size_class.index, changing):
                            yield from self._marked(size_class)
                            return
            if self._clock() >= deadline:
                raise TierTimeout(f"{self._folder}: the index kept being replaced")
            self.writable(deadline)

    def _begin_changing(self, index: SlabIndex, changing: ExitStack) -> bool:
        """Enter ``index.changing``; an index that was cut is removed instead. Raises OSError."""
        try:
            changing.enter_context(index.changing())
        except FileCut:
            self._unlink_index()
            return False
        return True

    def _marked(self, size_class: SizeClass) -> Iterator[SizeClass]:
        """Yield the size class, repaired if needed. While its holder changes it, it is marked for the next one to
        repair."""
        index = size_class.index
        if index.counter("dirty") or self._suspected:
            self._suspected = False
            self._repair(size_class)
        index.put("dirty", 0, 1)
        try:
            yield size_class
        except TierError:
            index.put("dirty", 0, 0)
            raise  # after any other exception the mark stays
        index.put("dirty", 0, 0)

    def close(self) -> None:
        """Release lock and lease. Files and mapping are closed when the last thread that uses them is done."""
        self._closed = True
        self._size_class = None
        self._lock.close()
        try:
            self.lease.release()
        except OSError:
            pass  # its lock is released all the same, and only the lock counts
