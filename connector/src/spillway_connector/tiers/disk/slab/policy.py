"""The eviction order of a full size class: S3-FIFO.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.

New entries enter a small queue, a tenth of the size class. Entries that are hit before they reach its end move to the
main queue. The others are evicted, and their fingerprints enter a ghost queue: an entry that is stored again while its
fingerprint is there enters the main queue. The main queue gives an entry one more round per hit. So a burst of blocks
that are never used again takes a tenth of the space, and recency and frequency both count, without changing a list on a
hit.

The device's prefix cache and the CPU tier absorb repeated hits, so one hit here is enough for the main queue.

Pure: reads the given arrays and changes them through ``put``, without clock, lock or file. The arrays may be shared
with other processes as long as calls are made one at a time (the caller's lock); hits may be counted at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FREE, WRITING, LIVE = 0, 0x57, 0x4C  # far apart in bits: one flip does not turn one into another
SMALL, MAIN = 0, 1
FREQUENCY_MAX = 3
SMALL_SHARE = 10  # the small queue gets one slot in this number
_BATCH = 512  # oldest entries looked up at once; one lookup passes over the whole array
_U32 = (1 << 32) - 1

Put = Callable[[str, int, int], None]
"""Set one element of an array, by its name in QueueArrays; the array shows it at once."""
Fresh = Callable[[str, int], int]
"""One element of an array as other processes see it now."""


@dataclass(frozen=True, slots=True)
class QueueArrays:
    """One element per slot, except the last two, of shape (1,): the next entry's order number, and how many entries
    are in the small queue."""

    state: npt.NDArray[np.uint8]
    queue: npt.NDArray[np.uint8]
    frequency: npt.NDArray[np.uint8]
    order: npt.NDArray[np.uint64]
    next_order: npt.NDArray[np.uint64]
    small_used: npt.NDArray[np.uint64]

    @classmethod
    def zeros(cls, slots: int) -> QueueArrays:
        """The arrays of an empty size class, in this process's memory alone."""
        return cls(
            state=np.zeros(slots, np.uint8),
            queue=np.zeros(slots, np.uint8),
            frequency=np.zeros(slots, np.uint8),
            order=np.zeros(slots, np.uint64),
            next_order=np.zeros(1, np.uint64),
            small_used=np.zeros(1, np.uint64),
        )


class S3Fifo:
    """Two queues whose order is in the arrays; the only state here is a cache of the oldest entries, checked at use."""

    def __init__(self, arrays: QueueArrays, put: Put, fresh: Fresh | None = None) -> None:
        self._arrays = arrays
        self._put = put
        self._fresh = fresh
        self._oldest: tuple[deque[tuple[int, int]], deque[tuple[int, int]]] = (deque(), deque())

    def enter(self, slot: int, queue: int) -> None:
        """Put a slot at the young end of a queue."""
        self._put("queue", slot, queue)
        self._put("frequency", slot, 0)
        if queue == SMALL:
            self._put("small_used", 0, int(self._arrays.small_used[0]) + 1)
        self._to_young_end(slot)

    def remove(self, slot: int) -> None:
        """Take a slot out of its queue."""
        small = int(self._arrays.small_used[0])
        if self._arrays.queue[slot] == SMALL and small:
            self._put("small_used", 0, small - 1)

    def victim(self, used: int) -> int | None:
        """The entry to evict, still LIVE and in its queue; None if none is. May move others.

        used: how many entries are in both queues.
        """
        arrays = self._arrays
        while True:
            small = int(arrays.small_used[0])
            from_small = small * SMALL_SHARE > used or small == used
            queue = SMALL if from_small else MAIN
            slot = self._pop_oldest(queue)
            if slot is None:
                queue = MAIN if from_small else SMALL  # all of the preferred queue is being written
                slot = self._pop_oldest(queue)
                if slot is None:
                    return None
            hits = int(arrays.frequency[slot]) if self._fresh is None else self._fresh("frequency", slot)
            if not hits:
                return slot
            if queue == SMALL:
                self.remove(slot)
                self._put("queue", slot, MAIN)
                self._put("frequency", slot, 0)
            else:
                self._put("frequency", slot, min(hits, FREQUENCY_MAX) - 1)  # bounded whatever a damaged index says
            self._to_young_end(slot)

    def spare(self, slot: int) -> None:
        """Keep what :meth:`victim` returned: it counts as used."""
        if self._arrays.queue[slot] == SMALL:
            self.remove(slot)
            self._put("queue", slot, MAIN)
        self._put("frequency", slot, 0)
        self._to_young_end(slot)

    def _to_young_end(self, slot: int) -> None:
        order = int(self._arrays.next_order[0])
        self._put("order", slot, order)
        self._put("next_order", 0, order + 1)

    def _pop_oldest(self, queue: int) -> int | None:
        arrays = self._arrays
        oldest = self._oldest[queue]
        for fresh in (False, True):
            if fresh:
                oldest.extend(oldest_entries(arrays, queue, _BATCH))
            while oldest:
                slot, order = oldest.popleft()
                # An entry that entered the queue since the lookup is younger than all that the lookup found.
                if arrays.order[slot] == order and arrays.state[slot] == LIVE and arrays.queue[slot] == queue:
                    return slot
        return None


def oldest_entries(arrays: QueueArrays, queue: int, count: int) -> list[tuple[int, int]]:
    """Return up to ``count`` LIVE entries of a queue with their order numbers, oldest first."""
    slots = np.flatnonzero((arrays.state == LIVE) & (arrays.queue == queue))
    orders = arrays.order[slots]
    if len(slots) > count:
        near = np.argpartition(orders, count)[:count]
        slots, orders = slots[near], orders[near]
    ranks = np.argsort(orders, kind="stable")
    return list(zip(slots[ranks].tolist(), orders[ranks].tolist(), strict=True))


def tenant_victim(
    arrays: QueueArrays, tenants: npt.NDArray[np.uint64], used_s: npt.NDArray[np.uint32], tenant: int
) -> int | None:
    """The entry of a tenant to evict for its next one: the one least recently used; None if it has none.

    By age alone: if hits counted, too, an entry that the tenant once used often would fill its quota forever.
    """
    slots = np.flatnonzero((arrays.state == LIVE) & (tenants == np.uint64(tenant)))
    if not len(slots):
        return None
    return int(slots[np.lexsort((arrays.order[slots], used_s[slots]))[0]])


def ghost_of(fingerprint: int, eviction: int) -> int:
    """The ghost queue's element for the eviction of that number, at ``fingerprint`` modulo the size of the array."""
    return fingerprint & ~_U32 | eviction & _U32


def recently_evicted(ghosts: npt.NDArray[np.uint64], fingerprint: int, eviction: int, window: int) -> bool:
    """Whether an entry was evicted within the last ``window`` evictions; ``eviction`` is the next one's number."""
    noted = int(ghosts[fingerprint % len(ghosts)])
    return noted != 0 and (noted ^ fingerprint) >> 32 == 0 and 0 < (eviction - noted & _U32) <= window
