"""Texts that were tokenised before, by their beginnings: a turn of a conversation begins as the turn before it, so one
comparison takes the place of cutting all of it into segments and looking each of them up.

A beginning is found by the few characters before the last of MARKS that it reaches, and is then compared as a whole. So
conversations that begin alike are both known once they differ before a mark. An answer never comes sooner because
another tenant has sent the same text.

The event loop and the tokenizer threads share it: each method holds the lock for a few steps.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

ENTRY_BYTES = 1024  # of the entry, its key and its two objects; measured with tracemalloc on CPython 3.11, rounded up
CHARS_MIN = 4096  # shorter texts have few segments
CHARS_MAX = 4 * 1024 * 1024
MARK_CHARS = 64  # before a mark


def _marks() -> Iterator[int]:
    mark = CHARS_MIN
    while mark <= CHARS_MAX:
        yield mark
        mark = mark * 5 // 4


MARKS = tuple(_marks())
_Key = tuple[str, int, str]  # the owner, the mark, and the characters before it


class Beginning(NamedTuple):
    """ids: of text[:end], as little-endian uint32. What is behind `end` changes none of them."""

    text: str
    end: int
    ids: bytes

    @property
    def estimated_bytes(self) -> int:
        """Memory that it takes."""
        return sys.getsizeof(self.text) + len(self.ids) + ENTRY_BYTES


class KnownBeginnings:
    """The beginnings of texts; the least recently used ones leave. bytes_max: of all of them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[_Key, Beginning] = OrderedDict()
        self._lock = threading.Lock()
        self.estimated_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: str, text: str) -> Beginning | None:
        """Return the longest known beginning of the owner's texts with which this one begins."""
        for at in range(bisect_right(MARKS, len(text)) - 1, -1, -1):
            key = _key(owner, text, MARKS[at])
            found = self._entries.get(key)
            if found is not None and text.startswith(found.text):
                with self._lock:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                return found
        return None

    def keep(self, owner: str, beginning: Beginning, before: Beginning | None = None) -> None:
        """Keep a beginning, in the place of the one that it extends.

        Args:
            owner: The tenant whose text it is.
            beginning: Not kept if it is shorter than CHARS_MIN or takes more than all may take.
            before: What find() returned for the text.
        """
        at = bisect_right(MARKS, len(beginning.text)) - 1
        if at < 0 or beginning.estimated_bytes > self._bytes_max:
            return
        with self._lock:
            for known in (before, beginning):
                if known is not None:
                    mark = MARKS[bisect_right(MARKS, len(known.text)) - 1]
                    dropped = self._entries.pop(_key(owner, known.text, mark), None)
                    self.estimated_bytes -= dropped.estimated_bytes if dropped is not None else 0
            self._entries[_key(owner, beginning.text, MARKS[at])] = beginning
            self.estimated_bytes += beginning.estimated_bytes
            while self.estimated_bytes > self._bytes_max:
                _, oldest = self._entries.popitem(last=False)
                self.estimated_bytes -= oldest.estimated_bytes


def _key(owner: str, text: str, mark: int) -> _Key:
    return owner, mark, text[mark - MARK_CHARS : mark]
