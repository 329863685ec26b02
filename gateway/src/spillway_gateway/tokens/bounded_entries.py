"""LRU entries that are bounded in bytes, for caches which the event loop and the tokenizer threads share: each method
holds the lock for a few steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class BoundedEntries(Generic[_Key, _Value]):
    """Entries by key; the least recently used ones leave.

    Attributes:
        estimated_bytes: The size of all entries.
    """

    def __init__(self, bytes_max: int, bytes_of: Callable[[_Value], int]) -> None:
        """bytes_of: returns the size of an entry, its bookkeeping included."""
        self._bytes_max, self._bytes_of = bytes_max, bytes_of
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()
        self._lock = threading.Lock()
        self.estimated_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, key: _Key) -> _Value | None:
        """Return the entry, or None; this is no use of it."""
        return self._entries.get(key)

    def get_all(self, keys: Sequence[_Key]) -> list[_Value | None]:
        """Return the entry of each key, or None, as used now."""
        entries = self._entries
        with self._lock:
            found = list(map(entries.get, keys))
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    entries.move_to_end(key)
        return found

    def put(self, key: _Key, value: _Value, *, in_place_of: _Key | None = None) -> None:
        """Keep an entry, and drop the least recently used ones over the bound.

        Args:
            key: Its former entry is dropped, as two threads may make the same one.
            value: The entry.
            in_place_of: Another key whose entry is dropped.
        """
        with self._lock:
            for old in (key, in_place_of):
                if old is not None and (dropped := self._entries.pop(old, None)) is not None:
                    self.estimated_bytes -= self._bytes_of(dropped)
            self._entries[key] = value
            self.estimated_bytes += self._bytes_of(value)
            while self.estimated_bytes > self._bytes_max:
                _, dropped = self._entries.popitem(last=False)
                self.estimated_bytes -= self._bytes_of(dropped)
