"""The index of a size class: which slot holds which key, in one file that every process on the node has a copy of.

Memory and disk hold the same arrays (layout.COLUMNS, about 87 bytes per slot; columns.py), so there is no journal and
no snapshot. Changes are made under the root's lock, except noting a hit: a wrong count does no harm.

A wrong entry costs one read, because the frame itself names its key. So writes are ordered for one purpose alone: a
process killed between any two of them leaves arrays that :meth:`SlabIndex.recover` can repair. ``state`` is FREE while
the other fields of a slot change.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    open_anew,
    open_own,
    rename_own,
    unlink_own,
)
from spillway_connector.tiers.disk.slab.buckets import BucketTable
from spillway_connector.tiers.disk.slab.change_log import ChangeLog
from spillway_connector.tiers.disk.slab.columns import Columns
from spillway_connector.tiers.disk.slab.fingerprint import U64, mixed, mixed_one
from spillway_connector.tiers.disk.slab.layout import (
    CHANGES_NAME,
    COLUMNS,
    HEADER_FIXED_BYTES,
    INDEX_NAME,
    SIZE_CLASS_DEPTH,
    TENANT_PLACES,
    SizeClassShape,
)
from spillway_connector.tiers.disk.slab.policy import (
    FREE,
    FREQUENCY_MAX,
    LIVE,
    MAIN,
    SMALL,
    WRITING,
    QueueArrays,
    S3Fifo,
    ghost_of,
    recently_evicted,
)

_ORDER_MAX = 1 << 62  # more than any size class ever counts to; a larger number is damage
_FREE_BATCH = 1024
_HALF = np.uint64(32)
_TENANT_BITS = TENANT_PLACES.bit_length() - 1
_TENANT_FACTOR = 0x9E3779B97F4A7C15


class SlabIndex:
    """The index of a size class. Every change but :meth:`note_hit` is made by the holder of the root's lock."""

    def __init__(self, shape: SizeClassShape, descriptor: int, log: ChangeLog, *, writable: bool) -> None:
        self.shape = shape
        self.writable = writable
        status = os.fstat(descriptor)
        self.identity = (status.st_dev, status.st_ino)
        columns = Columns(shape, descriptor, log=log, header=shape.pack())
        self.buckets = BucketTable(shape, columns)
        # Bound here once: these are called for every lookup and every change.
        self.put, self.put_all, self.put_at = columns.put, columns.put_all, columns.put_at
        self.counter, self.fresh, self.refresh = columns.counter, columns.fresh, columns.refresh
        self.follow, self.announce = columns.follow, columns.announce
        self.find, self.find_one, self.holds = self.buckets.find, self.buckets.find_one, self.buckets.holds
        self._arrays = arrays = columns.arrays
        self.key_low: U64 = arrays["key_low"]
        self.key_high: U64 = arrays["key_high"]
        self.namespace: U64 = arrays["namespace"]
        self.tenant: U64 = arrays["tenant"]
        self.owner: U64 = arrays["owner"]
        self.order: U64 = arrays["order"]
        self.generation: npt.NDArray[np.uint32] = arrays["generation"]
        self.used_s: npt.NDArray[np.uint32] = arrays["used_s"]
        self.check: npt.NDArray[np.uint32] = arrays["check"]
        self.state: npt.NDArray[np.uint8] = arrays["state"]
        self.queue: npt.NDArray[np.uint8] = arrays["queue"]
        self.frequency: npt.NDArray[np.uint8] = arrays["frequency"]
        self.ghost: U64 = arrays["ghost"]
        self.chunk_epoch: npt.NDArray[np.uint32] = arrays["chunk_epoch"]
        self.queues = QueueArrays(
            self.state, self.queue, self.frequency, self.order, arrays["next_order"], arrays["small_used"]
        )
        self.policy = S3Fifo(self.queues, columns.put, columns.fresh)
        self._columns = columns
        self._free: list[int] = []

    @classmethod
    def create(cls, folder: Path, shape: SizeClassShape) -> SlabIndex:
        """An empty index, not yet under its name: see :meth:`publish_file`. Raises OSError (ENOSPC included)."""
        path = folder / f"{INDEX_NAME}.new"
        descriptor = open_anew(path, SIZE_CLASS_DEPTH)
        try:
            os.posix_fallocate(descriptor, 0, shape.index_bytes)
            os.pwrite(descriptor, shape.pack(), 0)
            return cls(shape, descriptor, ChangeLog(folder / CHANGES_NAME, shape, writable=True), writable=True)
        except BaseException:
            unlink_own(path, SIZE_CLASS_DEPTH, missing_ok=True)
            raise

    @staticmethod
    def publish_file(folder: Path) -> None:
        """Put a created index in the place of the one before, for every process that opens it from now on."""
        clear_the_place(folder / INDEX_NAME, SIZE_CLASS_DEPTH)
        rename_own(folder / f"{INDEX_NAME}.new", folder / INDEX_NAME, SIZE_CLASS_DEPTH)

    @classmethod
    def open(cls, folder: Path, *, writable: bool, owners_checked: bool = True) -> SlabIndex | None:
        """The index in ``folder``; None when there is none that this program can use. owners_checked: see own_files.py.
        Raises OSError."""
        path = folder / INDEX_NAME
        try:
            flags = os.O_RDWR if writable else os.O_RDONLY
            descriptor = open_own(path, flags, SIZE_CLASS_DEPTH, owners_checked=owners_checked)
        except (FileNotFoundError, NotOwn):
            return None
        shape = SizeClassShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0))
        if shape is None or os.fstat(descriptor).st_size != shape.index_bytes:
            os.close(descriptor)
            return None
        log = ChangeLog(folder / CHANGES_NAME, shape, writable=writable, owners_checked=owners_checked)
        return cls(shape, descriptor, log, writable=writable)

    # --- without the lock -------------------------------------------------------------------------------------------

    def note_hit(self, slot: int, now_s: int) -> None:
        """Count a use for eviction and renew the age. A race with another process loses one count at worst."""
        if self.writable:
            hits = int(self.frequency[slot])
            if hits < FREQUENCY_MAX:
                self.put("frequency", slot, hits + 1)
            self.put("used_s", slot, now_s)

    def still_holds(self, slot: int, key: tuple[int, int], generation: int) -> bool:
        """Whether a slot has the LIVE entry of ``key`` that was found in it, by the file and not the copy.

        Who removes an entry announces that after the frame has been overwritten or cut off, so a copy may be late.
        Raises OSError.
        """
        # The state comes first: a slot that is LIVE again by then has another generation after that.
        entry = (("state", LIVE), ("generation", generation), ("key_low", key[0]), ("key_high", key[1]))
        return all(self._columns.in_file(name, slot) == value for name, value in entry)

    def tenant_bytes_at_most(self, tenant: int) -> int:
        """Bytes in use by ``tenant`` and the tenants that share its place in the table."""
        return int(self._arrays["tenant_used"][tenant_place(tenant)]) * self.shape.slot_bytes

    def changing(self) -> AbstractContextManager[None]:
        """See Columns.changing."""
        return self._columns.changing()

    def require_whole(self) -> None:
        """See Columns.require_whole."""
        self._columns.require_whole()

    @property
    def used(self) -> int:
        """Slots in use, those being written included."""
        return self.counter("used")

    @property
    def present_slots(self) -> int:
        """Slots of the chunks that exist."""
        return int(np.count_nonzero(self.chunk_epoch)) * self.shape.slots_per_chunk

    # --- under the lock ---------------------------------------------------------------------------------------------

    def free_slot(self) -> int | None:
        """A FREE slot of a chunk that exists."""
        while True:
            while self._free:
                slot = self._free.pop()
                if self.state[slot] == FREE and self.chunk_epoch[self.shape.chunk_of(slot)]:
                    return slot
            if self.used >= self.present_slots:
                return None
            by_chunk = self.state.reshape(self.shape.chunks, -1) == FREE
            by_chunk = by_chunk & (self.chunk_epoch != 0)[:, None]
            self._free = np.flatnonzero(by_chunk)[:_FREE_BATCH][::-1].tolist()
            if not self._free:
                self.put("used", 0, self.present_slots)  # the count was wrong: a damaged header
                return None

    def claim(self, slot: int, key: tuple[int, int], *, namespace: int, tenant: int, owner: int, now_s: int) -> int:
        """Make a FREE slot the WRITING entry of ``key``, which must not be there. Returns its generation."""
        low, high = key
        came_back = recently_evicted(self.ghost, high, self.counter("evictions"), self.used)
        generation = int(self.generation[slot]) + 1 & 0xFFFFFFFF
        self.put("generation", slot, generation)
        self.put("key_low", slot, low)
        self.put("key_high", slot, high)
        self.put("namespace", slot, namespace)
        self.put("tenant", slot, tenant)
        self._count_tenant(tenant, 1)
        self.put("owner", slot, owner)
        self.put("used_s", slot, now_s)
        self.put("check", slot, _check(slot, low, high, namespace, tenant))
        self.policy.enter(slot, MAIN if came_back else SMALL)
        self._link(slot, key)
        self.put("state", slot, WRITING)
        self.put("used", 0, self.used + 1)
        return generation

    def publish(self, slot: int) -> None:
        """The frame is complete: readers may load it."""
        self.put("state", slot, LIVE)

    def release(self, slot: int) -> None:
        """Make an entry's slot FREE."""
        self.put("state", slot, FREE)
        self.put("used", 0, max(0, self.used - 1))
        self._count_tenant(int(self.tenant[slot]), -1)
        self.policy.remove(slot)
        self.buckets.unlink(slot)

    def evict(self, slot: int) -> None:
        """Release a slot to make room, and record its fingerprint in the ghost queue."""
        self.release(slot)
        fingerprint, eviction = int(self.key_high[slot]), self.counter("evictions")
        self.put("ghost", fingerprint % self.shape.slots, ghost_of(fingerprint, eviction))
        self.put("evictions", 0, eviction + 1)

    def victim(self) -> int | None:
        """The entry that eviction would take next; see S3Fifo.victim."""
        return self.policy.victim(self.used)

    def set_chunk(self, chunk: int, epoch: int) -> None:
        """Enter a chunk that exists under this epoch; with 0, remove it and its entries."""
        if not epoch:
            gone = np.full(self.shape.slots_per_chunk, FREE, np.uint8)
            self.put_all("state", gone, chunk * self.shape.slots_per_chunk)
        self.put("chunk_epoch", chunk, epoch)
        self.put("chunk_changes", 0, self.counter("chunk_changes") + 1)
        if not epoch:
            self.recover()

    def recover(self) -> int:
        """Make all arrays agree after a crash or damage: consistent entries stay. Returns how many do.

        Vectorised: about a second for a million slots.
        """
        valid = ((self.state == LIVE) | (self.state == WRITING)).reshape(self.shape.chunks, -1)
        slots = np.flatnonzero(valid & (self.chunk_epoch != 0)[:, None])
        slots = slots[self.check[slots] == self._checks(slots)]
        absurd = slots[self.order[slots] >= _ORDER_MAX]
        if len(absurd):
            self.put_at("order", absurd, 0)
        slots = self.buckets.rebuild(self._without_duplicates(slots))
        state = np.full_like(self.state, FREE)
        state[slots] = self.state[slots]
        self.put_all("state", state)
        self.put_all("queue", np.where(self.queue == SMALL, np.uint8(SMALL), np.uint8(MAIN)))
        self.put("next_order", 0, int(self.order[slots].max()) + 1 if len(slots) else 0)
        self.put("used", 0, len(slots))
        self.put("small_used", 0, int(np.count_nonzero(self.queue[slots] == SMALL)))
        places = (self.tenant[slots] * np.uint64(_TENANT_FACTOR)) >> np.uint64(64 - _TENANT_BITS)
        self.put_all("tenant_used", np.bincount(places.astype(np.int64), minlength=TENANT_PLACES))
        self._free = []
        return len(slots)

    def fill(
        self,
        slots: npt.NDArray[np.int64],
        keys: U64,
        namespaces: U64,
        tenants: U64,
        used_s: npt.NDArray[np.uint32],
    ) -> None:
        """Enter the frames that a scan found, all at once, the oldest first. For an empty index. Raises OSError."""
        self.put_at("key_low", slots, keys[:, 0])
        self.put_at("key_high", slots, keys[:, 1])
        self.put_at("namespace", slots, namespaces)
        self.put_at("tenant", slots, tenants)
        self.put_at("used_s", slots, used_s)
        self.put_at("order", slots, np.arange(len(slots), dtype=np.uint64))
        self.put_at("queue", slots, MAIN)
        self.put_at("check", slots, self._checks(slots))
        self.put_at("state", slots, LIVE)
        self.recover()

    def adopt(self, old: SlabIndex) -> None:
        """Copy the contents of an index with fewer chunks of the same size. For an empty index. Raises OSError."""
        for column in COLUMNS:
            if column.per in ("slot", "chunk") and column.name != "ghost":
                self.put_all(column.name, old._arrays[column.name])
        self.put("evictions", 0, old.counter("evictions"))
        self.recover()

    def _link(self, slot: int, key: tuple[int, int]) -> None:
        entry, bucket = self.buckets.vacancy(key)
        self.buckets.link(self._vacate(bucket) if entry is None else entry, slot, key[0])

    def _count_tenant(self, tenant: int, more: int) -> None:
        place = tenant_place(tenant)
        self.put("tenant_used", place, max(0, int(self._arrays["tenant_used"][place]) + more))

    def _vacate(self, bucket: range) -> int:
        """Make an entry of a full bucket empty by evicting its key. Both buckets of a key are full about once in many
        millions of claims."""
        for entry in bucket:
            held = self.buckets.slot_at(entry)
            if held is None or self.state[held] != WRITING:
                if held is not None:
                    self.evict(held)
                self.buckets.clear(entry)
                return entry
        raise TierRefused(RefusedReason.RESOURCES, "the index has no entry free for this key just now")

    def _without_duplicates(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One slot per key, the one claimed last."""
        ranks = np.lexsort((self.order[slots], self.key_high[slots], self.key_low[slots]))
        slots = slots[ranks]
        low, high = self.key_low[slots], self.key_high[slots]
        last = np.r_[(low[1:] != low[:-1]) | (high[1:] != high[:-1]), np.ones(min(1, len(slots)), bool)]
        return slots[last]

    def _checks(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        sums = mixed(self.key_low[slots] + slots.astype(np.uint64))
        sums = mixed(sums ^ self.key_high[slots])
        sums = mixed(sums ^ self.namespace[slots])
        return (mixed(sums ^ self.tenant[slots]) >> _HALF).astype(np.uint32)


def _check(slot: int, low: int, high: int, namespace: int, tenant: int) -> int:
    """SlabIndex._checks for one entry."""
    total = mixed_one(low + slot & 0xFFFFFFFFFFFFFFFF)
    for field in (high, namespace, tenant):
        total = mixed_one(total ^ field)
    return total >> 32


def tenant_place(tenant: int) -> int:
    """Place in the tenants' table that counts the slots of ``tenant``."""
    return (tenant * _TENANT_FACTOR & 0xFFFFFFFFFFFFFFFF) >> 64 - _TENANT_BITS
