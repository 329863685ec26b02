"""Routers of other projects, reimplemented from their documentation and papers.

They see whole tokens where the originals often see characters (a token counts as four), which favours them slightly:
no template or tokenizer ever disagrees here.
"""

from __future__ import annotations

import random
import statistics
from collections import OrderedDict

from routing_policies.policy import Fleet, Policy, RoutedRequest

CHARACTERS_PER_TOKEN = 4
NOTE = "re-implemented from its description"


class VllmRouterCacheAware(Policy):
    """One tree of prompts with the engines that saw each part. A prompt goes to the engine of its longest matching
    start if that is more than 30 % of it, else to the engine with the smallest tree; when the busiest engine has over
    64 requests more and over 1.5 times as many as the idlest, to the idlest."""

    name = "vllm_router_cache_aware"
    note = NOTE + "; thresholds 0.3 / 64 / 1.5, tree in pieces of 16 tokens, 2^25 characters per engine"

    PIECE = 16
    CACHE_THRESHOLD = 0.3
    BALANCE_ABSOLUTE = 64
    BALANCE_RELATIVE = 1.5
    PIECES_MAX = 2**25 // CHARACTERS_PER_TOKEN // PIECE

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._fleet = fleet
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._last: dict[int, int] = {}  # piece -> the engine that saw it last

    def choose(self, request: RoutedRequest) -> int:
        loads = self._fleet.in_flight
        keys = request.keys(self.PIECE)
        idlest = min(range(len(loads)), key=lambda engine: loads[engine])
        busiest = max(loads)
        if busiest - loads[idlest] > self.BALANCE_ABSOLUTE and busiest > self.BALANCE_RELATIVE * loads[idlest]:
            chosen = idlest
        else:
            matched, holder = 0, -1
            for position, key in enumerate(keys):
                seen = self._last.get(key)
                if seen is None:
                    break
                matched, holder = position + 1, seen
            if holder >= 0 and matched / max(1, len(keys)) > self.CACHE_THRESHOLD:
                chosen = holder
            else:
                chosen = min(range(len(self._trees)), key=lambda engine: len(self._trees[engine]))
        self._insert(chosen, keys)
        return chosen

    def _insert(self, engine: int, keys: list[int]) -> None:
        tree = self._trees[engine]
        for key in keys:
            tree[key] = None
            tree.move_to_end(key)
            self._last[key] = engine
        while len(tree) > self.PIECES_MAX:
            key, _ = tree.popitem(last=False)
            if self._last.get(key) == engine:
                del self._last[key]


class ProductionStackPrefixAware(Policy):
    """A trie of 128-character chunks, each with all engines that saw it, never evicted; a random holder of the longest
    matching start, whatever its load."""

    name = "production_stack_prefixaware"
    note = NOTE

    CHUNK = 128 // CHARACTERS_PER_TOKEN

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._all = frozenset(range(engines))
        self._holders: dict[int, set[int]] = {}

    def choose(self, request: RoutedRequest) -> int:
        keys = request.keys(self.CHUNK)
        candidates: frozenset[int] | set[int] = self._all
        for key in keys:
            holders = self._holders.get(key)
            if not holders:
                break
            candidates = holders
        chosen = self._rng.choice(sorted(candidates))
        for key in keys:
            self._holders.setdefault(key, set()).add(chosen)
        return chosen


class EndpointPickerApproximate(Policy):
    """Weighted sum of three scores from 0 to 1: share of the prompt's blocks routed to the engine before (weight 3, one
    LRU per engine, at most 256 blocks), shortness of its queue (2) and free KV cache (2); the highest wins, ties at
    random. Queue and cache come from scrapes every 50 ms; block size and LRU size from the engine's own."""

    name = "epp_approximate_prefix"
    note = NOTE + "; weights prefix 3, queue 2, KV 2"

    BLOCKS_MAX = 256
    WEIGHT_PREFIX, WEIGHT_QUEUE, WEIGHT_KV = 3.0, 2.0, 2.0

    def __init__(self, block_tokens: int, engine_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._engine_blocks = engine_blocks

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]

    def choose(self, request: RoutedRequest) -> int:
        keys = request.keys(self._block_tokens)[: self.BLOCKS_MAX]
        scrapes = [self._fleet.scrape(engine) for engine in range(len(self._seen))]
        longest, shortest = max(item.waiting for item in scrapes), min(item.waiting for item in scrapes)
        scores = []
        for seen, scrape in zip(self._seen, scrapes, strict=True):
            matched = 0
            for key in keys:
                if key not in seen:
                    break
                matched += 1
            prefix = matched / len(keys) if keys else 0.0
            queue = (longest - scrape.waiting) / (longest - shortest) if longest > shortest else 1.0
            score = self.WEIGHT_PREFIX * prefix + self.WEIGHT_QUEUE * queue + self.WEIGHT_KV * (1 - scrape.kv_usage)
            scores.append(score)
        best = max(scores)
        chosen = self._rng.choice([engine for engine, score in enumerate(scores) if score == best])
        seen = self._seen[chosen]
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._engine_blocks:
            seen.popitem(last=False)
        return chosen


class AibrixPrefixCache(Policy):
    """A table of blocks with the engines that saw them. While running requests differ by no more than 8, engines in
    order of matched share and then of load, the first whose load is within mean + one standard deviation; otherwise, or
    when none matches, the engine with the fewest requests."""

    name = "aibrix_prefix_cache"
    note = NOTE + "; blocks of 16 tokens, table of 200,000 blocks, imbalance 8"

    BLOCK = 16
    TABLE_BLOCKS = 200_000
    IMBALANCE = 8
    DEVIATIONS = 1.0

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._table: OrderedDict[int, set[int]] = OrderedDict()

    def choose(self, request: RoutedRequest) -> int:
        loads = self._fleet.in_flight
        keys = request.keys(self.BLOCK)
        chosen = self._by_prefix(keys, list(loads)) if max(loads) - min(loads) <= self.IMBALANCE else None
        if chosen is None:
            least = min(loads)
            chosen = self._rng.choice([engine for engine, load in enumerate(loads) if load == least])
        for key in keys:
            self._table.setdefault(key, set()).add(chosen)
            self._table.move_to_end(key)
        while len(self._table) > self.TABLE_BLOCKS:
            self._table.popitem(last=False)
        return chosen

    def _by_prefix(self, keys: list[int], in_flight: list[int]) -> int | None:
        matched: dict[int, int] = {}
        for position, key in enumerate(keys):
            holders = self._table.get(key)
            if not holders:
                break
            for engine in holders:
                if matched.get(engine, 0) == position:
                    matched[engine] = position + 1
        bound = statistics.fmean(in_flight) + self.DEVIATIONS * statistics.pstdev(in_flight)
        for engine in sorted(matched, key=lambda item: (-matched[item], in_flight[item])):
            if in_flight[engine] <= bound:
                return engine
        return None
