"""Frequency of recent requests for chunks, in half a megabyte: the admission filter of a tier under pressure.

A count-min sketch (Cormode and Muthukrishnan, 2005) with conservative update (Estan and Varghese, 2002): four rows of
counters that saturate at 15. A key's estimate is the least of its four counters, so collisions can only make it too
high. After ``adds_max`` additions every counter is halved, as in TinyLFU (Einziger, Friedman and Manes, 2017): a key
requested once drops to 0, and the load of the rows stays bounded. At that moment a key that was never added has a
nonzero estimate with probability below 0.3 % (4 counters, each in use with probability at most 1 - exp(-1/4)).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

ROWS = 4
COUNTERS_PER_ROW = 1 << 17  # one byte each
ADDS_MAX = COUNTERS_PER_ROW // 4
COUNT_MAX = 15
NOTED_MAX = 4096  # requested keys not counted yet; those of the oldest requests are dropped
_HASH_BYTES = 32  # of a key that is used: a block hash is uniform as it is


class FrequencySketch:
    """A counter for one thread. Keys are block hashes of 32 bytes or more; anything shorter is hashed first."""

    def __init__(self, counters_per_row: int = COUNTERS_PER_ROW, adds_max: int = ADDS_MAX) -> None:
        if counters_per_row & (counters_per_row - 1) or counters_per_row < 1:
            raise ValueError(f"counters_per_row: {counters_per_row} is not a power of two")
        self._mask = np.uint64(counters_per_row - 1)
        self._adds_max = adds_max
        self._adds = 0
        self._noted: deque[tuple[bytes, ...]] = deque()
        self._noted_keys = 0
        self._counters = np.zeros(ROWS * counters_per_row, np.uint8)
        self._row_starts = (np.arange(ROWS, dtype=np.int64) * counters_per_row)[:, None]

    @property
    def size_bytes(self) -> int:
        return self._counters.nbytes

    def add(self, keys: Sequence[bytes]) -> None:
        """Count each key once more; a key that is there twice counts once."""
        if keys:
            self._count(keys, 1)

    def note(self, keys: Sequence[bytes]) -> None:
        """Add keys as :meth:`add` does, but count them at the next estimate: without one it costs nothing.

        At most ``NOTED_MAX`` keys are kept for it, or the last request's.
        """
        if keys:
            self._noted.append(tuple(keys))
            self._noted_keys += len(keys)
            while self._noted_keys > NOTED_MAX and len(self._noted) > 1:
                self._noted_keys -= len(self._noted.popleft())

    def _count_noted(self) -> None:
        """All at once: the fixed cost of arrays is paid once for the requests of many steps."""
        times: Counter[bytes] = Counter()
        for keys in self._noted:
            times.update(dict.fromkeys(keys).keys())
        self._noted.clear()
        self._noted_keys = 0
        self._count(list(times), np.fromiter(times.values(), np.int64, len(times)))

    def _count(self, keys: Sequence[bytes], times: int | npt.NDArray[np.int64]) -> None:
        places = self._places(keys)
        raised = np.minimum(self._counters[places].min(axis=0) + times, COUNT_MAX).astype(np.uint8)
        # Conservative: only the counters that hold the estimate down move. `maximum.at`, for keys that share a counter.
        np.maximum.at(self._counters, places, raised[None, :])
        self._adds += len(keys)
        if self._adds >= self._adds_max:
            self._counters >>= 1
            self._adds //= 2

    def estimate(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """(len(keys),) counts of 0 to 15: how often each was added, halved with age; never too low."""
        if self._noted:
            self._count_noted()
        if not keys:
            return np.zeros(0, np.uint8)
        estimates: npt.NDArray[np.uint8] = self._counters[self._places(keys)].min(axis=0)
        return estimates

    def _places(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """(ROWS, len(keys)) indices into the counters."""
        if any(length < _HASH_BYTES for length in set(map(len, keys))):
            keys = [key if len(key) >= _HASH_BYTES else _stretched(key) for key in keys]
        length = len(keys[0])
        if set(map(len, keys)) != {length}:
            return np.concatenate([self._places([key]) for key in keys], axis=1)
        table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
        words = np.ascontiguousarray(table[:, :_HASH_BYTES]).view(np.uint64)
        # The rest of a key (its KV group) moves all of its counters.
        rest = np.zeros(len(keys), np.uint64)
        for column in range(_HASH_BYTES, length):
            rest = rest * np.uint64(257) + table[:, column]
        words = words ^ (rest * np.uint64(0x9E3779B97F4A7C15))[:, None]
        places: npt.NDArray[np.int64] = (words & self._mask).T.astype(np.int64) + self._row_starts
        return places


def _stretched(key: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key, 0) + xxhash.xxh3_128_digest(key, 1)
