"""The device's block pool: what running requests hold, and what of it can be found again.

As in vLLM: a block is private until it is full, then cached under its key; requests with the same prefix share cached
blocks by reference; an unreferenced block stays until room is needed, least recently released first, and of
one request the end of the prompt before its start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class DeviceCache:
    """capacity in blocks. Invariant: cached + private <= capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._references: dict[int, int] = {}  # cached key -> requests that hold it
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached keys, in order of eviction
        self._private = 0

    def __contains__(self, key: int) -> bool:
        return key in self._references

    def keys(self) -> frozenset[int]:
        return frozenset(self._references)

    @property
    def used_blocks(self) -> int:
        """Blocks held by requests."""
        return len(self._references) - len(self._unreferenced) + self._private

    @property
    def available_blocks(self) -> int:
        """Free, or free after an eviction."""
        return self.capacity - self.used_blocks

    def longest_prefix(self, keys: Sequence[int], limit: int) -> int:
        """Count the keys, among the first `limit`, that are cached without a hole before them."""
        for position in range(min(limit, len(keys))):
            if keys[position] not in self._references:
                return position
        return min(limit, len(keys))

    def unreferenced_among(self, keys: Sequence[int]) -> int:
        return sum(1 for key in keys if key in self._unreferenced)

    def acquire(self, keys: Sequence[int]) -> None:
        """Reference cached blocks."""
        for key in keys:
            self._references[key] += 1
            self._unreferenced.pop(key, None)

    def reserve(self, blocks: int) -> tuple[int, ...]:
        """Take private blocks. Returns the keys that were evicted for them. Needs available_blocks >= blocks."""
        assert blocks <= self.available_blocks
        self._private += blocks
        evicted: list[int] = []
        while len(self._references) + self._private > self.capacity:
            key, _ = self._unreferenced.popitem(last=False)
            del self._references[key]
            evicted.append(key)
        return tuple(evicted)

    def publish(self, key: int) -> bool:
        """A private block became full: cache it, held by its request. False when another request's copy is cached
        already; then the block stays private."""
        if key in self._references:
            return False
        self._private -= 1
        self._references[key] = 1
        return True

    def release(self, keys: Sequence[int], private: int) -> None:
        """A request ends: `keys` in prompt order, and its private blocks."""
        self._private -= private
        for key in reversed(keys):
            left = self._references[key] - 1
            self._references[key] = left
            if left == 0:
                self._unreferenced[key] = None

    def forget_unreferenced(self) -> None:
        """The prefix cache is reset. Only allowed while no request runs, as in the engine."""
        assert self.used_blocks == 0
        self._references.clear()
        self._unreferenced.clear()
