"""The hash table of an index: from a key's fingerprint to its slot.

Each key has two possible buckets of eight entries, one per half of its fingerprint, and takes the second when the first
is nearly full ("Balanced allocations", Azar, Broder, Karlin, Upfal, SIAM J. Comput. 29(1), 1999). At a load of one half
both are practically never full. An entry is 32 bits of the fingerprint and the slot number plus one; the slot's own key
decides, so damage costs a miss and never finds a wrong key.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spillway_connector.tiers.disk.slab.columns import Columns
from spillway_connector.tiers.disk.slab.fingerprint import U64
from spillway_connector.tiers.disk.slab.layout import WAYS, SizeClassShape
from spillway_connector.tiers.disk.slab.policy import FREE, LIVE

_HALF = np.uint64(32)
_ONE = np.uint32(1)
_SPILL_AT = WAYS - WAYS // 4  # entries in the first bucket from which on the second is preferred


class BucketTable:
    """The table in ``columns``. Lookups need no lock; changes are made by the holder of the root's lock."""

    def __init__(self, shape: SizeClassShape, columns: Columns) -> None:
        arrays = columns.arrays
        self.slots: npt.NDArray[np.uint32] = arrays["bucket_slot"]
        self._tags: npt.NDArray[np.uint32] = arrays["bucket_tag"].reshape(-1, WAYS)
        self._key_low: U64 = arrays["key_low"]
        self._key_high: U64 = arrays["key_high"]
        self._state: npt.NDArray[np.uint8] = arrays["state"]
        self._tag_view, self._slot_view = columns.elements("bucket_tag", "I"), columns.elements("bucket_slot", "I")
        self._low_view, self._high_view = columns.elements("key_low", "Q"), columns.elements("key_high", "Q")
        self._state_view = columns.elements("state", "B")
        self._columns = columns
        self._bucket_count = shape.buckets
        self._buckets = np.uint64(shape.buckets)
        self._last_slot = shape.slots - 1
        self._last_slot_u32 = np.uint32(self._last_slot)

    # --- without the lock -------------------------------------------------------------------------------------------

    def find(self, keys: U64) -> npt.NDArray[np.int64]:
        """The slots of fingerprints (n, 2), shape (n,); -1 for absent ones. WRITING entries are found, too."""
        low, high = keys[:, 0], keys[:, 1]
        slots = self._probe(low, high, self._buckets_of(low))
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            slots[missing] = self._probe(low[missing], high[missing], self._buckets_of(high[missing]))
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
                    slot = min(entry - 1 & 0xFFFFFFFF, self._last_slot)
                    if found == tag and self._is_of(slot, key) and self._state_view[slot] != FREE:
                        return slot
        return -1

    def holds(self, slot: int, key: tuple[int, int]) -> bool:
        """Whether a slot has a LIVE entry of ``key`` at this moment."""
        return self._is_of(slot, key) and self._state_view[slot] == LIVE

    def _is_of(self, slot: int, key: tuple[int, int]) -> bool:
        return self._low_view[slot] == key[0] and self._high_view[slot] == key[1]

    def _probe(self, low: U64, high: U64, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        same = self._tags.take(buckets, 0) == _tags(low)[:, None]
        entries = same.argmax(1)
        entries += buckets * WAYS
        # An empty entry wraps around to a number past the end, as damage may be: to the last slot, whose key decides.
        slots = np.minimum(self.slots.take(entries) - _ONE, self._last_slot_u32)
        right = self._key_low.take(slots) == low
        right &= self._key_high.take(slots) == high
        right &= self._state.take(slots) != FREE
        return np.where(right, slots.astype(np.int64), -1)

    def _buckets_of(self, halves: U64) -> npt.NDArray[np.int64]:
        return (((halves >> _HALF) * self._buckets) >> _HALF).astype(np.int64)

    def _bucket_of(self, half: int) -> int:
        return (half >> 32) * self._bucket_count >> 32

    # --- under the lock ---------------------------------------------------------------------------------------------

    def vacancy(self, key: tuple[int, int]) -> tuple[int | None, range]:
        """A vacant entry for ``key``, None if both buckets are full; and the entries of the bucket preferred."""
        buckets = [range(first, first + WAYS) for first in (self._bucket_of(half) * WAYS for half in key)]
        vacant = [[entry for entry in bucket if self._slot_view[entry] == 0] for bucket in buckets]
        first = 0 if len(vacant[0]) > WAYS - _SPILL_AT or len(vacant[0]) >= len(vacant[1]) else 1
        return (vacant[first][0] if vacant[first] else None), buckets[first]

    def slot_at(self, entry: int) -> int | None:
        """The slot that an entry points to; None for one that is empty or damaged."""
        slot = self._slot_view[entry] - 1
        return slot if 0 <= slot <= self._last_slot else None

    def link(self, entry: int, slot: int, low: int) -> None:
        """Have an entry point to the slot of a fingerprint whose low half is ``low``. Raises OSError."""
        self._columns.put("bucket_tag", entry, low & 0xFFFFFFFF | 1)
        self._columns.put("bucket_slot", entry, slot + 1)

    def unlink(self, slot: int) -> None:
        """Clear the entries of a slot's key that point to it. Raises OSError."""
        for half in (self._low_view[slot], self._high_view[slot]):
            first = self._bucket_of(half) * WAYS
            for entry in range(first, first + WAYS):
                if self._slot_view[entry] == slot + 1:
                    self.clear(entry)

    def clear(self, entry: int) -> None:
        """Make an entry empty. Raises OSError."""
        self._columns.put("bucket_slot", entry, 0)
        self._columns.put("bucket_tag", entry, 0)

    def rebuild(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Build the table again from these slots; returns those that found a place, nearly always all. OSError."""
        table_tags, table_slots = np.zeros_like(self._tags), np.zeros(self._tags.shape, np.uint32)
        placed = []
        taken = np.zeros(self._bucket_count, np.int64)
        # As in vacancy(): the second bucket for some before the first is full, so that hardly any finds both full.
        for halves, limit in ((self._key_low, _SPILL_AT), (self._key_high, WAYS), (self._key_low, WAYS)):
            buckets = self._buckets_of(halves[slots])
            by_bucket = np.argsort(buckets, kind="stable")
            slots, buckets = slots[by_bucket], buckets[by_bucket]
            starts = np.flatnonzero(np.r_[True, buckets[1:] != buckets[:-1]])
            ranks = np.arange(len(slots)) - np.repeat(starts, np.diff(np.r_[starts, len(slots)]))
            ways = taken[buckets] + ranks
            fit = ways < limit
            table_tags[buckets[fit], ways[fit]] = _tags(self._key_low[slots[fit]])
            table_slots[buckets[fit], ways[fit]] = (slots[fit] + 1).astype(np.uint32)
            taken += np.bincount(buckets[fit], minlength=len(taken))
            placed.append(slots[fit])
            slots = slots[~fit]
            if not len(slots):
                break
        self._columns.put_all("bucket_tag", table_tags)
        self._columns.put_all("bucket_slot", table_slots)
        return np.concatenate(placed)


def _tags(low: U64) -> npt.NDArray[np.uint32]:
    """Return the tags of keys in entries: never 0, which marks an empty entry."""
    return low.astype(np.uint32) | np.uint32(1)
