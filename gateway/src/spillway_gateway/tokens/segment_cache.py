"""LRU cache of token ids by the hash of their text segment and its owner, bounded in bytes. An answer never comes
sooner because another tenant has sent the same text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import xxhash

from spillway_gateway.tokens.bounded_entries import BoundedEntries

# Key, bytes object, and the entry of an OrderedDict; measured with tracemalloc on CPython 3.11, rounded up.
ENTRY_BYTES = 256


SegmentKey = tuple[str, bytes]  # its owner, and XXH3-128 of its text


def segment_key(owner: str, segment: str) -> SegmentKey:
    """Raises UnicodeEncodeError for lone surrogates, which no tokenizer takes."""
    return owner, xxhash.xxh3_128_digest(segment.encode())


def segment_keys(owner: str, text: str, cuts: Sequence[int]) -> list[SegmentKey]:
    """Return the keys of the segments between each two cuts of a text. Pure ASCII is not copied for each."""
    if len(cuts) < 3 or not text.isascii():
        return [segment_key(owner, text[start:end]) for start, end in pairwise(cuts)]
    first, digest = cuts[0], xxhash.xxh3_128_digest
    data = memoryview(text[first : cuts[-1]].encode())
    return [(owner, digest(data[start - first : end - first])) for start, end in pairwise(cuts)]


class SegmentCache(BoundedEntries[SegmentKey, bytes]):
    """Ids as little-endian uint32. bytes_max: of the ids and their bookkeeping."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max, _bytes_of)


def _bytes_of(ids: bytes) -> int:
    return len(ids) + ENTRY_BYTES
