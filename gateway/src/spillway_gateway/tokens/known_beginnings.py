"""Texts that were tokenised before, by their beginnings: a turn of a conversation begins as the turn before it, so one
comparison takes the place of cutting all of it into segments and looking each of them up.

A beginning is found by the few characters before the last of MARKS that it reaches, and is then compared as a whole. So
conversations that begin alike are both known once they differ before a mark. An answer never comes sooner because
another tenant has sent the same text."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple, TypeVar

from spillway_gateway.tokens.bounded_entries import BoundedEntries

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


class KnownBeginnings(BoundedEntries[_Key, Beginning]):
    """The beginnings of texts. bytes_max: of all of them, each as a whole."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max, attrgetter("estimated_bytes"))

    def find(self, owner: str, text: str) -> Beginning | None:
        """Return the longest known beginning of the owner's texts with which this one begins."""
        for at in range(bisect_right(MARKS, len(text)) - 1, -1, -1):
            key = _key(owner, text, MARKS[at])
            if (found := self.peek(key)) is not None and found.begins(text):
                self.get_all((key,))
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
        beginning = Beginning(texts, all_ids, end, key, size)
        self.put(key, beginning, in_place_of=None if before is None else before.key)


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
