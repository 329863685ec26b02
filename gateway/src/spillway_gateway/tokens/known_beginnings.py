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
from typing import NamedTuple, TypeVar

ENTRY_BYTES = 1024  # of the entry, its key and its objects; measured with tracemalloc on CPython 3.11, rounded up
CHARS_MIN = 4096  # shorter texts have few segments
CHARS_MAX = 4 * 1024 * 1024
MARK_CHARS = 64  # before a mark


def _marks() -> Iterator[int]:
    mark = CHARS_MIN
    while mark <= CHARS_MAX:
        yield mark
        mark = mark * 5 // 4


MARKS = tuple(_marks())
Piece = TypeVar("Piece", str, bytes)
_Key = tuple[str, int, str]  # the owner, the mark, and the characters before it


class Beginning(NamedTuple):
    """texts, ids: in pieces, which the next turns share. end: The ids, as little-endian uint32, are of the text up to
    here, and nothing behind the beginning's text changes them."""

    texts: tuple[str, ...]
    ids: tuple[bytes, ...]
    end: int
    key: _Key
    estimated_bytes: int

    def begins(self, text: str) -> bool:
        """Whether the text begins like this."""
        at = 0
        for piece in self.texts:
            if not text.startswith(piece, at):
                return False
            at += len(piece)
        return True


class KnownBeginnings:
    """The beginnings of texts; the least recently used ones leave. bytes_max: of all of them, each as a whole."""

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
            if found is not None and found.begins(text):
                with self._lock:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                return found
        return None

    def keep(self, owner: str, text: str, chars: int, ids: bytes, *, end: int, before: Beginning | None = None) -> None:
        """Keep the beginning of a text, in the place of the one that it extends.

        Args:
            owner: The tenant whose text it is.
            text: The text. Nothing is kept of one that has no mark, or takes more than all may take.
            chars: How much of it is the beginning.
            ids: Those of the beginning, behind those of `before`.
            end: Where the last one of them ends in the text.
            before: What find() returned for the text.
        """
        at = bisect_right(MARKS, chars) - 1
        if at < 0:
            return
        texts, all_ids = ((), ()) if before is None else (before.texts, before.ids)
        texts = _longer(texts, text[sum(map(len, texts)) : chars])
        all_ids = _longer(all_ids, ids)
        size = sum(map(sys.getsizeof, (*texts, *all_ids))) + ENTRY_BYTES
        if size > self._bytes_max:
            return
        key = _key(owner, text, MARKS[at])
        with self._lock:
            for old in (key, key if before is None else before.key):
                dropped = self._entries.pop(old, None)
                self.estimated_bytes -= dropped.estimated_bytes if dropped is not None else 0
            self._entries[key] = Beginning(texts, all_ids, end, key, size)
            self.estimated_bytes += size
            while self.estimated_bytes > self._bytes_max:
                _, oldest = self._entries.popitem(last=False)
                self.estimated_bytes -= oldest.estimated_bytes


def _longer(pieces: tuple[Piece, ...], new: Piece) -> tuple[Piece, ...]:
    """Add a piece at the end. Each piece is twice as long as the next one at least, so there are few, and a turn seldom
    copies much."""
    longer: list[Piece] = list(pieces)
    while longer and len(longer[-1]) < 2 * len(new):
        new = longer.pop() + new
    longer.append(new)
    return tuple(longer)


def _key(owner: str, text: str, mark: int) -> _Key:
    return owner, mark, text[mark - MARK_CHARS : mark]
