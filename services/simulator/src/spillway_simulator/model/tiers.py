"""Tiers below the device: bounded sets of blocks, the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class LruTier:
    """A tier of at most `capacity` blocks; 0: it holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> frozenset[int]:
        return frozenset(self._blocks)

    def touch(self, key: int) -> None:
        if key in self._blocks:
            self._blocks.move_to_end(key)

    def put(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        """Store what is missing, touch what is there. Returns (stored, removed); no key is in both."""
        stored: list[int] = []
        removed: list[int] = []
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            elif self.capacity > 0:
                if len(self._blocks) >= self.capacity:
                    removed.append(self._blocks.popitem(last=False)[0])
                self._blocks[key] = None
                stored.append(key)
        both = set(stored) & set(removed)
        if both:  # more new blocks than the tier holds: the first of them came and went
            stored = [key for key in stored if key not in both]
            removed = [key for key in removed if key not in both]
        return stored, removed


class LoadLink:
    """Carries one load after the other. free_at: when the last one under way is through."""

    def __init__(self) -> None:
        self.free_at = 0.0


class SharedTier:
    """The tier that all engines of a process read and write. Each block has one owner, which announces its removal.

    link: the one that all engines' loads share, if the store is the limit; None: every engine has its own.
    below: the tier behind it.
    """

    def __init__(self, capacity: int, link: LoadLink | None = None, below: SharedTier | None = None) -> None:
        self.link = link
        self.below = below
        self._tier = LruTier(capacity)
        self._owners: dict[int, Callable[[tuple[int, ...]], None]] = {}

    @property
    def capacity(self) -> int:
        return self._tier.capacity

    def __contains__(self, key: int) -> bool:
        return key in self._tier

    def __len__(self) -> int:
        return len(self._tier)

    def keys(self) -> frozenset[int]:
        return self._tier.keys()

    def touch(self, key: int) -> None:
        self._tier.touch(key)

    def put(self, keys: Iterable[int], on_removed: Callable[[tuple[int, ...]], None]) -> list[int]:
        """Store what is missing. on_removed: called with keys of this owner when they are evicted later."""
        stored, removed = self._tier.put(keys)
        by_owner: dict[int, tuple[Callable[[tuple[int, ...]], None], list[int]]] = {}
        for key in removed:
            owner = self._owners.pop(key)
            by_owner.setdefault(id(owner), (owner, []))[1].append(key)
        for owner, lost in by_owner.values():
            owner(tuple(lost))
        for key in stored:
            self._owners[key] = on_removed
        return stored
