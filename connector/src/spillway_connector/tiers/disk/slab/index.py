"""The index of a pool: which slot holds which key, in one file that every process on the node maps.

Memory and disk hold the same arrays (slab_layout.COLUMNS, about 87 bytes per slot), so there is no journal, no snapshot
and no second copy. They are read through a read-only mapping and changed with ``pwrite``, which the kernel keeps
coherent: a disk that fails answers with an error number, where a store into a mapping would end the process (SIGBUS).
Changes are made under the root's lock, with one exception that needs none because a wrong value harms nobody: noting a
hit.

An entry believed by mistake costs one read: the frame says itself which key it holds. So the order of writes only has
to make sure that a process killed between any two of them leaves arrays that :meth:`SlabIndex.recover` can make sense
of: ``state`` is FREE while the other fields of a slot change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.disk.slab.fingerprint import U64, mixed, mixed_one
from spillway_connector.tiers.disk.slab.layout import (
    COLUMNS,
    HEADER_FIXED_BYTES,
    INDEX_NAME,
    TENANT_PLACES,
    WAYS,
    PoolShape,
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
    remembered,
)

_ORDER_MAX = 1 << 62  # no pool lives to see it; a larger number is damage
_FREE_BATCH = 1024
_HALF = np.uint64(32)
_ONE = np.uint32(1)
_TENANT_BITS = TENANT_PLACES.bit_length() - 1
_TENANT_FACTOR = 0x9E3779B97F4A7C15
_libc = ctypes.CDLL(None, use_errno=True)


class _ColumnFile:
    """Where the columns are written: the index's file, closed when the last who writes lets go.

    An object of its own, so that the policy, which writes too, does not refer back to the index: in a circle with it,
    the file and the locked mapping of an index that was replaced would stay until the interpreter looks for circles,
    which engines rarely do.
    """

    __slots__ = ("_descriptor", "_places")

    def __init__(self, descriptor: int, places: dict[str, tuple[int, int]]) -> None:
        """places: offset and bytes per item of each column."""
        self._descriptor = descriptor
        self._places = places

    def __del__(self) -> None:
        os.close(self._descriptor)

    def put(self, name: str, position: int, value: int) -> None:
        """Change one element of a column. Raises OSError."""
        offset, item_bytes = self._places[name]
        os.pwrite(self._descriptor, value.to_bytes(item_bytes, "little"), offset + position * item_bytes)

    def put_bytes(self, name: str, raw: memoryview, first: int) -> None:
        """Change consecutive elements of a column, from the place `first`. Raises OSError."""
        offset, item_bytes = self._places[name]
        position = offset + first * item_bytes
        while raw.nbytes:
            written = os.pwrite(self._descriptor, raw, position)
            raw, position = raw[written:], position + written


class SlabIndex:
    """The mapped index file at ``path``. Every change is made by the holder of the root's lock."""

    def __init__(self, shape: PoolShape, descriptor: int, *, writable: bool) -> None:
        self.shape = shape
        self.writable = writable
        offsets, _ = shape.offsets()
        self._file = _ColumnFile(descriptor, {c.name: (offsets[c.name], c.item_bytes) for c in COLUMNS})
        self.put = self._file.put
        status = os.fstat(descriptor)
        self.identity = (status.st_dev, status.st_ino)
        mapped = mmap.mmap(descriptor, shape.index_bytes, access=mmap.ACCESS_READ)
        arrays = {
            column.name: np.ndarray((shape.rows(column),), column.dtype, mapped, offsets[column.name])
            for column in COLUMNS
        }
        self._arrays = arrays
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
        self._tags: npt.NDArray[np.uint32] = arrays["bucket_tag"].reshape(-1, WAYS)
        self._slots: npt.NDArray[np.uint32] = arrays["bucket_slot"].reshape(-1, WAYS)
        self._slots_flat: npt.NDArray[np.uint32] = arrays["bucket_slot"]
        # Single elements are read through these: a number from an array costs several times as much.
        view = memoryview(mapped)

        def elements(name: str, kind: Literal["B", "I", "Q"]) -> memoryview[int]:
            return view[offsets[name] : offsets[name] + arrays[name].nbytes].cast(kind)

        self._tag_view, self._slot_view = elements("bucket_tag", "I"), elements("bucket_slot", "I")
        self._low_view, self._high_view = elements("key_low", "Q"), elements("key_high", "Q")
        self._state_view = elements("state", "B")
        self._bucket_count = shape.buckets
        self._buckets = np.uint64(shape.buckets)
        self._last_slot = np.uint32(shape.slots - 1)
        self.queues = QueueArrays(
            self.state, self.queue, self.frequency, self.order, arrays["next_order"], arrays["small_used"]
        )
        self.policy = S3Fifo(self.queues, self._file.put)
        self._free: list[int] = []
        # Held in memory where the limits allow: a mapped page that the disk fails to read back ends the process too.
        _libc.mlock(ctypes.c_void_p(self._slots_flat.ctypes.data - offsets["bucket_slot"]), shape.index_bytes)

    @classmethod
    def create(cls, folder: Path, shape: PoolShape) -> SlabIndex:
        """An empty index, not yet under its name: see :meth:`publish_file`. Raises OSError (ENOSPC included)."""
        path = folder / f"{INDEX_NAME}.new"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, shape.index_bytes)
            os.pwrite(descriptor, shape.pack(), 0)
            return cls(shape, descriptor, writable=True)
        except BaseException:
            os.unlink(path)
            raise

    @staticmethod
    def publish_file(folder: Path) -> None:
        """Put a created index in the place of the one before, for all who look from now on."""
        os.rename(folder / f"{INDEX_NAME}.new", folder / INDEX_NAME)

    @classmethod
    def open(cls, folder: Path, *, writable: bool) -> SlabIndex | None:
        """The index in ``folder``; None when there is none that this program can use. Raises OSError."""
        path = folder / INDEX_NAME
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        shape = PoolShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0))
        if shape is None or os.fstat(descriptor).st_size != shape.index_bytes:
            os.close(descriptor)
            return None
        return cls(shape, descriptor, writable=writable)

    # --- without the lock -------------------------------------------------------------------------------------------

    def find(self, keys: U64) -> npt.NDArray[np.int64]:
        """The slots of fingerprints (n, 2), -1 for those that are not there. WRITING entries are found too."""
        low, high = keys[:, 0], keys[:, 1]
        slots = self._probe(low, high, self._bucket(low))
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            slots[missing] = self._probe(low[missing], high[missing], self._bucket(high[missing]))
        return slots

    def find_one(self, key: tuple[int, int]) -> int:
        """:meth:`find` for one fingerprint."""
        tag = key[0] & 0xFFFFFFFF | 1
        for half in key:
            first = self._bucket_of(half) * WAYS
            tags = self._tag_view[first : first + WAYS].tolist()
            if tag in tags:
                for found, entry in zip(tags, self._slot_view[first : first + WAYS].tolist(), strict=True):
                    # An empty entry or damage: as in _probe, the key of the last slot decides.
                    slot = min(entry - 1 & 0xFFFFFFFF, self.shape.slots - 1)
                    if found == tag and self._is_of(slot, key) and self._state_view[slot] != FREE:
                        return slot
        return -1

    def holds(self, slot: int, key: tuple[int, int]) -> bool:
        """Whether a slot has a LIVE entry of ``key`` at this moment."""
        return self._is_of(slot, key) and self._state_view[slot] == LIVE

    def note_hit(self, slot: int, now_s: int) -> None:
        """Count a use for eviction and renew the age. A race with another process loses one count at worst."""
        if self.writable:
            hits = int(self.frequency[slot])
            if hits < FREQUENCY_MAX:
                self.put("frequency", slot, hits + 1)
            self.put("used_s", slot, now_s)

    def tenant_bytes_at_most(self, tenant: int) -> int:
        """What ``tenant`` and those that share its place in the table have in use."""
        return int(self._arrays["tenant_used"][tenant_place(tenant)]) * self.shape.slot_bytes

    def counter(self, name: str) -> int:
        """One of the columns of a single element."""
        return int(self._arrays[name][0])

    @property
    def used(self) -> int:
        """Slots in use, those being written included."""
        return self.counter("used")

    @property
    def present_slots(self) -> int:
        """Slots of the chunks that exist."""
        return int(np.count_nonzero(self.chunk_epoch)) * self.shape.slots_per_chunk

    # --- under the lock ---------------------------------------------------------------------------------------------

    def put_all(self, name: str, values: npt.NDArray[np.generic], first: int = 0) -> None:
        """Change consecutive elements of a column. Raises OSError."""
        self._file.put_bytes(name, memoryview(np.ascontiguousarray(values, self._arrays[name].dtype).tobytes()), first)

    def put_at(self, name: str, slots: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        """Change many scattered elements of a column, by writing all of it. Raises OSError."""
        changed = self._arrays[name].copy()
        changed[slots] = values
        self.put_all(name, changed)

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
        came_back = remembered(self.ghost, high, self.counter("evictions"), self.used)
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
        self._link(slot, low, high)
        self.put("state", slot, WRITING)
        self.put("used", 0, self.used + 1)
        return generation

    def publish(self, slot: int) -> None:
        """The frame is whole: readers may have it."""
        self.put("state", slot, LIVE)

    def release(self, slot: int) -> None:
        """Make an entry's slot FREE."""
        self.put("state", slot, FREE)
        self.put("used", 0, max(0, self.used - 1))
        self._count_tenant(int(self.tenant[slot]), -1)
        self.policy.leave(slot)
        for key in (int(self.key_low[slot]), int(self.key_high[slot])):
            bucket = self._bucket_of(key)
            for entry in range(bucket * WAYS, (bucket + 1) * WAYS):
                if self._slot_view[entry] == slot + 1:
                    self._clear_entry(entry)

    def evict(self, slot: int) -> None:
        """Release a slot to make room, and remember its key in case it comes back."""
        self.release(slot)
        fingerprint, eviction = int(self.key_high[slot]), self.counter("evictions")
        self.put("ghost", fingerprint % self.shape.slots, ghost_of(fingerprint, eviction))
        self.put("evictions", 0, eviction + 1)

    def victim(self) -> int | None:
        """The entry that eviction would take next; see S3Fifo.victim."""
        return self.policy.victim(self.used)

    def set_chunk(self, chunk: int, epoch: int) -> None:
        """Say that a chunk exists under this epoch, or with 0 that it and its entries do not."""
        if not epoch:
            gone = np.full(self.shape.slots_per_chunk, FREE, np.uint8)
            self.put_all("state", gone, chunk * self.shape.slots_per_chunk)
        self.put("chunk_epoch", chunk, epoch)
        self.put("chunk_changes", 0, self.counter("chunk_changes") + 1)
        if not epoch:
            self.recover()

    def recover(self) -> int:
        """Make all arrays agree after a crash or damage: the entries that make sense stay. Returns how many do.

        Vectorised: about a second for a million slots.
        """
        valid = ((self.state == LIVE) | (self.state == WRITING)).reshape(self.shape.chunks, -1)
        slots = np.flatnonzero(valid & (self.chunk_epoch != 0)[:, None])
        slots = slots[self.check[slots] == self._checks(slots)]
        absurd = slots[self.order[slots] >= _ORDER_MAX]
        if len(absurd):
            self.put_at("order", absurd, 0)
        slots = self._relink(self._without_duplicates(slots))
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
        """Enter what a scan of the slots found, all at once; the oldest first. For an index that is empty."""
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
        """Take over everything of an index of fewer chunks of the same kind. For an index that is empty."""
        for column in COLUMNS:
            if column.per in ("slot", "chunk") and column.name != "ghost":
                self.put_all(column.name, old._arrays[column.name])
        self.put("evictions", 0, old.counter("evictions"))
        self.recover()

    # --- the hash table: two possible buckets per key, eight entries each ------------------------------------------

    def _bucket(self, halves: U64) -> npt.NDArray[np.int64]:
        return (((halves >> _HALF) * self._buckets) >> _HALF).astype(np.int64)

    def _bucket_of(self, half: int) -> int:
        return (half >> 32) * self._bucket_count >> 32

    def _is_of(self, slot: int, key: tuple[int, int]) -> bool:
        return self._low_view[slot] == key[0] and self._high_view[slot] == key[1]

    def _probe(self, low: U64, high: U64, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        same = self._tags.take(buckets, 0) == _tags(low)[:, None]
        entries = same.argmax(1)
        entries += buckets * WAYS
        # An empty entry wraps around to a number past the end, as damage may be: to the last slot, whose key decides.
        slots = np.minimum(self._slots_flat.take(entries) - _ONE, self._last_slot)
        right = self.key_low.take(slots) == low
        right &= self.key_high.take(slots) == high
        right &= self.state.take(slots) != FREE
        return np.where(right, slots.astype(np.int64), -1)

    def _link(self, slot: int, low: int, high: int) -> None:
        buckets = self._bucket_of(low), self._bucket_of(high)
        vacancies = [[way for way in range(WAYS) if self._slot_view[bucket * WAYS + way] == 0] for bucket in buckets]
        first = 0 if len(vacancies[0]) > WAYS // 4 or len(vacancies[0]) >= len(vacancies[1]) else 1
        bucket = buckets[first]
        way = vacancies[first][0] if vacancies[first] else self._vacate(bucket)
        self.put("bucket_tag", bucket * WAYS + way, low & 0xFFFFFFFF | 1)
        self.put("bucket_slot", bucket * WAYS + way, slot + 1)

    def _count_tenant(self, tenant: int, more: int) -> None:
        place = tenant_place(tenant)
        self.put("tenant_used", place, max(0, int(self._arrays["tenant_used"][place]) + more))

    def _clear_entry(self, entry: int) -> None:
        self.put("bucket_slot", entry, 0)
        self.put("bucket_tag", entry, 0)

    def _vacate(self, bucket: int) -> int:
        """Both buckets of a key are full, which chance brings about once in many millions of claims: one must go."""
        for way in range(WAYS):
            held = int(self._slots[bucket, way]) - 1
            if held >= self.shape.slots or self.state[held] != WRITING:
                if held < self.shape.slots:
                    self.evict(held)
                self._clear_entry(bucket * WAYS + way)
                return way
        raise TierRefused(RefusedReason.RESOURCES, "the index has no entry free for this key just now")

    def _relink(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Build the hash table anew from these slots; returns those that found a place, which is nearly always all."""
        table_tags, table_slots = np.zeros_like(self._tags), np.zeros_like(self._slots)
        placed = []
        taken = np.zeros(self.shape.buckets, np.int64)
        # As _link does: the second bucket for some before the first is full, so that hardly any finds both full.
        for halves, limit in ((self.key_low, WAYS - WAYS // 4), (self.key_high, WAYS), (self.key_low, WAYS)):
            buckets = self._bucket(halves[slots])
            by_bucket = np.argsort(buckets, kind="stable")
            slots, buckets = slots[by_bucket], buckets[by_bucket]
            starts = np.flatnonzero(np.r_[True, buckets[1:] != buckets[:-1]])
            ranks = np.arange(len(slots)) - np.repeat(starts, np.diff(np.r_[starts, len(slots)]))
            ways = taken[buckets] + ranks
            fit = ways < limit
            table_tags[buckets[fit], ways[fit]] = _tags(self.key_low[slots[fit]])
            table_slots[buckets[fit], ways[fit]] = (slots[fit] + 1).astype(np.uint32)
            taken += np.bincount(buckets[fit], minlength=len(taken))
            placed.append(slots[fit])
            slots = slots[~fit]
            if not len(slots):
                break
        self.put_all("bucket_tag", table_tags)
        self.put_all("bucket_slot", table_slots)
        return np.concatenate(placed)

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
    """Where the tenants' table counts the slots of ``tenant``."""
    return (tenant * _TENANT_FACTOR & 0xFFFFFFFFFFFFFFFF) >> 64 - _TENANT_BITS


def _tags(low: U64) -> npt.NDArray[np.uint32]:
    """What a bucket holds of a key: never 0, which marks an empty entry."""
    return low.astype(np.uint32) | np.uint32(1)
