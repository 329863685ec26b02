"""Which beginnings of prompts many requests share, lately, and their tokens. Pure but for its own bounded state.

Requests are counted at some depths of their prompts, a quarter further each, so a prompt of any length costs some forty
look-ups at most. A prefix counts as shared once prompts have gone on from it in two ways: the turns of one conversation
are no prefix that others need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from spillway_gateway.routing.prefix import KEYS_MAX, TOKEN_BYTES, PromptTokens

HALF_LIFE_SECONDS = 120.0
REQUESTS_MIN = 3.0  # decayed, from which on a prefix is hot and its tokens are kept
ENTRIES_MAX = 8192
TOKEN_BYTES_MAX = 8 * 1024 * 1024  # of tokens that are kept


def _depths() -> tuple[int, ...]:
    found, depth = [], 1
    while depth <= KEYS_MAX:
        found.append(depth)
        depth = max(depth + 1, depth * 5 // 4)
    return tuple(found)


DEPTHS = _depths()  # in blocks


class HotPrefix(NamedTuple):
    """key: The key of its last block. requests: The number of recent requests, which decays."""

    key: int
    blocks: int
    prompt_tokens: int
    tokens: PromptTokens
    requests: float


class _Entry(msgspec.Struct, gc=False):
    blocks: int
    requests: float
    as_of: float
    further: tuple[int, int] | None = None  # blocks and key of a prefix that prompts went on to from here
    shared: bool = False
    ids: bytes | None = None
    cache_salt: str | None = None


class HotPrefixes:
    """The hot prefixes of one model. now: monotonic seconds."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently requested first
        self._bytes = 0

    @property
    def token_bytes(self) -> int:
        """The size of all tokens that are kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def requested(
        self, keys: Sequence[int], ids: bytes | memoryview, block_bytes: int, cache_salt: str | None, now: float
    ) -> None:
        """A request has come.

        Args:
            keys: The keys of its full blocks, in order.
            ids: Its tokens, as token_bytes() gives them.
            block_bytes: How many bytes of `ids` are one block.
            cache_salt: The salt of its blocks.
            now: Monotonic seconds.
        """
        entries = self._entries
        for depth, next_depth in pairwise((*DEPTHS, len(keys))):
            if depth > len(keys):
                break
            key = keys[depth - 1]
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = _Entry(depth, 0.0, now)
            else:
                entries.move_to_end(key)
            entry.requests = 1.0 + _decayed(entry, now)
            entry.as_of = now
            if entry.further is not None and entry.further[0] <= len(keys):
                entry.shared = entry.shared or keys[entry.further[0] - 1] != entry.further[1]
            elif depth < len(keys):  # nothing to compare with, or only what is longer than this prompt
                blocks = min(next_depth, len(keys))
                entry.further = blocks, keys[blocks - 1]
            if entry.shared and entry.ids is None and entry.requests >= REQUESTS_MIN:
                entry.ids, entry.cache_salt = bytes(ids[: depth * block_bytes]), cache_salt
                self._bytes += len(entry.ids)
        while len(entries) > ENTRIES_MAX or self._bytes > TOKEN_BYTES_MAX:
            _, oldest = entries.popitem(last=False)
            self._bytes -= len(oldest.ids or b"")

    def hottest(self, count: int, now: float) -> list[HotPrefix]:
        """Return the prefixes that save most tokens: requests times length, without what another one covers."""
        hot = [
            HotPrefix(
                key, entry.blocks, len(entry.ids) // TOKEN_BYTES, PromptTokens(entry.ids, entry.cache_salt), requests
            )
            for key, entry in self._entries.items()
            if entry.ids is not None and (requests := _decayed(entry, now)) >= REQUESTS_MIN / 2
        ]
        hot.sort(key=lambda each: (-each.requests * each.blocks, each.key))
        chosen: list[HotPrefix] = []
        for each in hot:
            if len(chosen) == count:
                break
            if not any(
                other.tokens.cache_salt == each.tokens.cache_salt and other.tokens.ids.startswith(each.tokens.ids)
                for other in chosen
            ):
                chosen.append(each)
        return chosen


def _decayed(entry: _Entry, now: float) -> float:
    return float(entry.requests * 0.5 ** ((now - entry.as_of) / HALF_LIFE_SECONDS))
