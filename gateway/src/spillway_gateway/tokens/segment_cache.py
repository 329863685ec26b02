"""LRU cache of token ids by the hash of their text segment and of who sent it, bounded in bytes. Nobody's answers come
sooner because somebody else has sent the same text.

The event loop and the tokenizer threads share it: each method holds the lock for a few steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

# Key, bytes object, and the entry of an OrderedDict; measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 256


SegmentKey = tuple[str, bytes]  # its owner, and XXH3-128 of its text


def segment_key(owner: str, segment: str, *, kind: int = 0) -> SegmentKey:
    """kind: of what is cached, so that one text may have an entry of each. Raises UnicodeEncodeError for lone
    surrogates, which no tokenizer takes."""
    return owner, xxhash.xxh3_128_digest(segment.encode(), kind)


class SegmentCache:
    """Ids as little-endian uint32. bytes_max: of the ids and their bookkeeping."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[SegmentKey, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.estimated_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_all(self, keys: Sequence[SegmentKey]) -> list[bytes | None]:
        """Ids of each key, None if they are not cached."""
        entries = self._entries
        with self._lock:
            found = list(map(entries.get, keys))
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    entries.move_to_end(key)
        return found

    def put(self, key: SegmentKey, ids: bytes) -> None:
        """Store the ids and evict the least recently used ones over the bound."""
        with self._lock:
            before = self._entries.pop(key, None)  # two threads may have tokenised the same segment
            if before is not None:
                self.estimated_bytes -= _bytes_of(before)
            self._entries[key] = ids
            self.estimated_bytes += _bytes_of(ids)
            while self.estimated_bytes > self._bytes_max:
                _, dropped = self._entries.popitem(last=False)
                self.estimated_bytes -= _bytes_of(dropped)


def _bytes_of(ids: bytes) -> int:
    return len(ids) + ENTRY_BYTES
