"""Chunks of a shared tier that have not been used for a while, of those that this engine stored or loaded.

A full tier evicts roughly the least recently used chunks, and it cannot be asked which these are. So the order of use
is kept here. A request uses its chunks from the first one on; so the chunk that was idle for longest is the beginning
of a prefix, and the rest of that prefix follows. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple


class IdleChunk(NamedTuple):
    key: bytes
    tenant: bytes


class IdleChunks:
    """Remembers the ``chunks_max`` chunks that were used last. forgotten: how many were dropped for want of room."""

    def __init__(self, chunks_max: int) -> None:
        self.forgotten = 0
        self._chunks_max = chunks_max
        self._used: dict[bytes, tuple[bytes, float]] = {}  # tenant and last use, in the order of that

    def __len__(self) -> int:
        return len(self._used)

    def add(self, keys: Sequence[bytes], tenant: bytes, now: float) -> None:
        """Record that these chunks are in the tier, and were used in this order."""
        for key in keys:
            self._used.pop(key, None)
            self._used[key] = tenant, now
        while len(self._used) > self._chunks_max:
            del self._used[next(iter(self._used))]
            self.forgotten += 1

    def use(self, keys: Sequence[bytes], now: float) -> None:
        """A request has these chunks; those that are not known here stay unknown."""
        for key in keys:
            if (known := self._used.pop(key, None)) is not None:
                self._used[key] = known[0], now

    def take(self, used_before: float, count: int) -> list[IdleChunk]:
        """Remove and return up to ``count`` chunks that were not used after this time, the oldest first."""
        due = [
            IdleChunk(key, tenant)
            for key, (tenant, used_at) in islice(self._used.items(), count)
            if used_at <= used_before
        ]
        for chunk in due:
            del self._used[chunk.key]
        return due

    def remove(self, key: bytes) -> None:
        """Record that the tier does not hold this chunk."""
        self._used.pop(key, None)

    def clear(self) -> None:
        self._used.clear()
