"""The disk space that the slabs of one root may take, and the chunk that is dropped when another size class needs its
space."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spillway_connector.tiers.disk.clock import FUTURE_SLACK_SECONDS
from spillway_connector.tiers.disk.directory_tier import DirectorySpace
from spillway_connector.tiers.disk.io import FrameFiles
from spillway_connector.tiers.disk.room import limit_bytes
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.chunks import Chunks
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.index_reader import open_index
from spillway_connector.tiers.disk.slab.policy import LIVE, WRITING
from spillway_connector.tiers.tier import Clock, EvictionReason

_log = logging.getLogger(__name__)

UPKEEP_SECONDS = 60.0  # between checks of the file system and for expired entries
GROW_RETRY_SECONDS = 10.0  # a full one tries to grow again after this long, or after a chunk's worth of evictions
EXPIRED_MAX = 4096  # expired entries removed at once: bounds the time the lock is held


@dataclass(frozen=True, slots=True)
class SizeClass:
    """The slots of one size, as this process holds them open."""

    index: SlabIndex
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Room:
    """limit_bytes: the smaller of the configured bound and the file system share. taken_bytes: all files below the
    root, indexes and documents included."""

    limit_bytes: int
    taken_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.taken_bytes


def measure_room(root: Path, max_bytes: int | None) -> Room:
    """Measure the disk. Files are few, a thousand per TB, so no ledger is needed. Raises OSError."""
    taken = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                taken += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return Room(limit_bytes(root, taken, max_bytes), taken)


def size_class_folders(root: Path) -> list[Path]:
    """The folders of all size classes of a root. Raises OSError."""
    with os.scandir(root / SLAB_FOLDER) as entries:
        return [Path(entry.path) for entry in entries if _is_size_class(entry)]


def _is_size_class(entry: os.DirEntry[str]) -> bool:
    return entry.name.isdigit() and entry.is_dir(follow_symlinks=False)


def resident_bytes(root: Path) -> int:
    """Bytes of the slots in use, all size classes and namespaces together. Raises OSError."""
    total = 0
    for folder in size_class_folders(root):
        with open_index(folder) as index:
            if index is not None:
                total += index.used_slots() * index.shape.slot_bytes
    return total


def stalest_chunk(index: SlabIndex) -> tuple[int, int] | None:
    """The chunk whose youngest use is longest ago, and when that was (wall clock seconds; 0: it is empty).

    A chunk that is being written to is none. Pure: reads the index alone.
    """
    shape = index.shape
    state = index.state.reshape(shape.chunks, -1)
    used_s = index.used_s.reshape(shape.chunks, -1)
    candidates = np.flatnonzero((index.chunk_epoch != 0) & ~(state == WRITING).any(1))
    if not len(candidates):
        return None
    youngest = np.where(state[candidates] == LIVE, used_s[candidates], 0).max(1)
    place = int(youngest.argmin())
    return int(candidates[place]), int(youngest[place])


def oldest_use(index: SlabIndex) -> int | None:
    """Return when the entry of a size class that has gone unused for longest was used last; None if there is no
    entry."""
    used_s = index.used_s[index.state == LIVE]
    return int(used_s.min()) if len(used_s) else None


class SlabSpace(DirectorySpace):
    """Changes how much disk the size classes of ``root`` take. All but ``measure`` under the root's lock.

    folder: of this process's size class. now_s: the clock of the entries' ages. OSError is left to the caller.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        files: FrameFiles,
        *,
        max_bytes: int | None,
        ttl_seconds: float | None,
        clock: Clock,
        now_s: Callable[[], int],
    ) -> None:
        super().__init__(root, max_bytes, clock)
        self._kept_bytes = max_bytes  # the bound at the last upkeep
        self._folder = folder
        self._files = files
        self._ttl_seconds = ttl_seconds
        self._now_s = now_s
        self._next_upkeep = 0.0
        self._next_growth = 0.0
        self._growth_pause = 0

    def measure(self) -> Room:
        return measure_room(self._root, self._bound.smallest())

    def evict(self, index: SlabIndex, slot: int) -> None:
        """Evict one entry to make room for another."""
        index.evict(slot)
        self.evictions[EvictionReason.ROOM] += 1
        self._growth_pause -= 1
        self.note_pressure()

    def evict_of_tenant(self, index: SlabIndex, slot: int) -> None:
        """Evict one entry of a tenant that has reached its quota."""
        index.evict(slot)
        self.evictions[EvictionReason.TENANT] += 1

    def expire(self, index: SlabIndex, slot: int) -> None:
        """Remove an expired entry."""
        index.release(slot)
        self.evictions[EvictionReason.TTL] += 1

    def may_grow(self) -> bool:
        """Whether it is time to try for another chunk again."""
        return self._growth_pause <= 0 or self._clock() >= self._next_growth

    def grow(self, size_class: SizeClass) -> bool:
        """Make another chunk within the bound; staler chunks of other size classes are dropped for it. Under the
        lock."""
        index = size_class.index
        absent = np.flatnonzero(index.chunk_epoch == 0)
        needed = index.shape.chunk_bytes
        left_bytes = self.measure().left_bytes
        while len(absent):
            if left_bytes < needed:
                # Counted, not measured again: some file systems free removed blocks later.
                dropped_bytes = self.drop_stalest(oldest_use(index))
                left_bytes += dropped_bytes
                if dropped_bytes:
                    continue
                break
            epoch = index.counter("chunk_changes") % 99_999_998 + 1
            try:
                size_class.chunks.headers.clear_chunk(int(absent[0]))
                size_class.chunks.make(int(absent[0]), epoch)
            except OSError as error:
                if not index.used:
                    raise
                _log.warning("NVMe tier %s: no further chunk: %s", self._folder, error.strerror)
                break
            index.set_chunk(int(absent[0]), epoch)
            return True
        self._growth_pause = index.shape.slots_per_chunk
        self._next_growth = self._clock() + GROW_RETRY_SECONDS
        return False

    def make_room(self, size_class: SizeClass, needed_bytes: int) -> bool:
        """Whether this number of further bytes fits within the bound; drops stale chunks if that is needed. Under the
        lock."""
        left_bytes = self.measure().left_bytes
        while left_bytes < needed_bytes:
            dropped_bytes = self.drop_stalest(None, also=size_class)
            if not dropped_bytes:
                return False
            left_bytes += dropped_bytes
        return True

    def drop_stalest(self, than_s: int | None, also: SizeClass | None = None) -> int:
        """Drop the chunk that has gone unused for longest, if its last use was before ``than_s``; None: in any case.

        The chunk is one of other size classes, or of ``also`` if given. Returns its bytes, 0 for none. Under the lock.
        """
        size_classes = [] if also is None else [also]
        for folder in size_class_folders(self._root):
            other = None if folder == self._folder else SlabIndex.open(folder, writable=True)
            if other is not None:
                if other.counter("dirty"):
                    other.recover()
                    other.put("dirty", 0, 0)
                    other.announce()
                size_classes.append(SizeClass(other, Chunks(folder, other.shape, self._files, writable=True)))
        candidates = [
            (found[1], found[0], size_class)
            for size_class in size_classes
            if (found := stalest_chunk(size_class.index)) is not None
        ]
        used_s, chunk, size_class = min(candidates, key=lambda candidate: candidate[0], default=(0, 0, None))
        if size_class is None or (than_s is not None and used_s >= than_s):
            return 0
        self._drop(size_class, chunk)
        return size_class.index.shape.chunk_bytes

    def _drop(self, size_class: SizeClass, chunk: int) -> None:
        epoch = int(size_class.index.chunk_epoch[chunk])
        before = size_class.index.used
        size_class.index.set_chunk(chunk, 0)
        size_class.chunks.unlink(chunk, epoch)
        size_class.index.announce()
        self.evictions[EvictionReason.ROOM] += before - size_class.index.used
        self.note_pressure()

    def maintain(self, size_class: SizeClass) -> bool:
        """Every UPKEEP_SECONDS, and when the processes' bound is another one: stay within a bound that has shrunk, and
        remove expired entries. Under the lock.

        Returns whether it was time to.
        """
        now, bound_bytes = self._clock(), self._bound.smallest()
        if now < self._next_upkeep and bound_bytes == self._kept_bytes:
            return False
        self._next_upkeep, self._kept_bytes = now + UPKEEP_SECONDS, bound_bytes
        size_class.index.refresh("used_s")
        size_class.index.refresh("frequency")
        self._remove_expired(size_class.index)
        left_bytes = self.measure().left_bytes
        while left_bytes < 0:
            dropped_bytes = self.drop_stalest(None, also=size_class)
            left_bytes += dropped_bytes
            if not dropped_bytes:
                break
        return True

    def _remove_expired(self, index: SlabIndex) -> None:
        now_s = self._now_s()
        used_s = index.used_s.astype(np.int64)
        live = index.state == LIVE
        ahead = np.flatnonzero(live & (used_s > now_s + FUTURE_SLACK_SECONDS))
        if len(ahead):
            index.put_at("used_s", ahead, now_s)  # else a clock that was once ahead would keep them forever
        if self._ttl_seconds is not None:
            for slot in np.flatnonzero(live & (used_s < now_s - self._ttl_seconds))[:EXPIRED_MAX].tolist():
                self.expire(index, slot)
