"""Beginnings of prompts that many requests shared lately, and their tokens. Pure but for its own bounded state.

Requests are counted at some depths of their prompts, a quarter further each, so a prompt of any length costs some forty
look-ups at most. If more than COUNTED_PER_SECOND come in a second, one in DRAWN_OF of the others is drawn and counts
for all of them: what is hot among so many shows in a part of them as well. A prefix counts as shared once prompts have
gone on from it in two ways: the turns of one conversation are no prefix that others need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp2
from random import random
from typing import NamedTuple

import msgspec

from spillway_gateway.routing.prefix import KEYS_MAX, TOKEN_BYTES, PromptTokens

HALF_LIFE_SECONDS = 120.0
REQUESTS_MIN = 3.0  # decayed, from which on a prefix is hot and its tokens are kept
ENTRIES_MAX = 8192
COUNTED_PER_SECOND = 16  # requests that are all counted
DRAWN_OF = 8  # further requests, of which one is counted
HALF_LIVES_MAX = 512  # until all weights are scaled down, far below what a float holds
TOKEN_BYTES_MAX = 8 * 1024 * 1024  # of tokens that are kept


def _depths() -> tuple[int, ...]:
    found, depth = [], 1
    while depth <= KEYS_MAX:
        found.append(depth)
        depth = max(depth + 1, depth * 5 // 4)
    return tuple(found)


DEPTHS = _depths()  # in blocks
_STEPS = tuple(pairwise((*DEPTHS, KEYS_MAX)))


class HotPrefix(NamedTuple):
    """key: The key of its last block. requests: The number of recent requests, which decays."""

    key: int
    blocks: int
    prompt_tokens: int
    tokens: PromptTokens
    requests: float


class _Entry(msgspec.Struct, gc=False):
    blocks: int
    weighted: float = 0.0  # requests, each with its weight
    further: tuple[int, int] | None = None  # blocks and key of a prefix that prompts went on to from here
    shared: bool = False
    ids: bytes | None = None
    cache_salt: str | None = None


class HotPrefixes:
    """The hot prefixes of one model. now: monotonic seconds. draw: returns a random number from 0 to 1."""

    def __init__(self, draw: Callable[[], float] = random) -> None:
        self._draw = draw
        self._second = 0  # the last one in which a request came
        self._came = 0  # requests in it
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently requested first
        self._bytes = 0
        self._weighs_one_at = 0.0  # monotonic seconds

    @property
    def token_bytes(self) -> int:
        """The size of all tokens that are kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def counts_for(self, now: float) -> int:
        """Return for how many requests one that comes now is counted; 0: it is not."""
        second = int(now)
        if second != self._second:
            self._second, self._came = second, 0
        self._came += 1
        if self._came <= COUNTED_PER_SECOND:
            return 1
        return DRAWN_OF if self._draw() * DRAWN_OF < 1.0 else 0

    def requested(
        self,
        keys: Sequence[int],
        ids: bytes | memoryview,
        block_bytes: int,
        cache_salt: str | None,
        now: float,
        *,
        count: int = 1,
    ) -> None:
        """Count a request.

        Args:
            keys: The keys of its full blocks, in order.
            ids: Its tokens, as token_bytes() gives them.
            block_bytes: How many bytes of `ids` are one block.
            cache_salt: The salt of its blocks.
            now: Monotonic seconds.
            count: What counts_for() has returned.
        """
        entries = self._entries
        one = self._weight(now)
        weight = count * one
        length = len(keys)
        for depth, next_depth in _STEPS:
            if depth > length:
                break
            key = keys[depth - 1]
            entry = entries.get(key)
            if entry is None:
                entries[key] = _Entry(depth, weight, _further(keys, depth, next_depth))
                continue
            entries.move_to_end(key)
            entry.weighted += weight
            if not entry.shared:
                further = entry.further
                if further is None or further[0] > length:  # nothing to compare with, or a longer prompt
                    entry.further = _further(keys, depth, next_depth) or further
                    continue
                if keys[further[0] - 1] == further[1]:
                    continue
                entry.shared = True
            if entry.ids is None and entry.weighted >= REQUESTS_MIN * one:
                entry.ids, entry.cache_salt = bytes(ids[: depth * block_bytes]), cache_salt
                self._bytes += len(entry.ids)
        while len(entries) > ENTRIES_MAX or self._bytes > TOKEN_BYTES_MAX:
            _, oldest = entries.popitem(last=False)
            self._bytes -= len(oldest.ids or b"")

    def hottest(self, count: int, now: float) -> list[HotPrefix]:
        """Return the prefixes that save most tokens: requests times length, without what another one covers."""
        weight = self._weight(now)
        hot = [
            HotPrefix(
                key, entry.blocks, len(entry.ids) // TOKEN_BYTES, PromptTokens(entry.ids, entry.cache_salt), requests
            )
            for key, entry in self._entries.items()
            if entry.ids is not None and (requests := entry.weighted / weight) >= REQUESTS_MIN / 2
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

    def _weight(self, now: float) -> float:
        """The weight of a request that comes now. Older ones do not lose weight, newer ones gain it, so that only what
        is requested changes."""
        half_lives = (now - self._weighs_one_at) / HALF_LIFE_SECONDS
        if half_lives > HALF_LIVES_MAX:
            for entry in self._entries.values():
                entry.weighted *= exp2(-half_lives)
            self._weighs_one_at, half_lives = now, 0.0
        return exp2(half_lives)


def _further(keys: Sequence[int], depth: int, next_depth: int) -> tuple[int, int] | None:
    """Find the blocks with which a prompt goes on after its first `depth` blocks; None if it ends there."""
    count = len(keys)
    if depth == count:
        return None
    blocks = next_depth if next_depth < count else count
    return blocks, keys[blocks - 1]
