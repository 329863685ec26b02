"""A new engine's first minute, with and without its warm start. Simulated.

    PYTHONPATH=tests .venv/local/bin/python bench/new_engine.py

The gateway's own index, routing, hot prefixes, slow start and warm starts decide; engines are simulated as caches that
keep the blocks used last, prefill at one rate and load from the shared tier at another (bench/scale_down.py). Requests
of many programs, each behind its own long beginning, come at one rate to three engines; then a fourth is ready. Nothing
here measures a device.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import statistics
from typing import Any

from scale_down import BLOCK, Cluster

from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.event_decoder import BlockStored, Tier
from spillway_gateway.routing.hot_prefixes import HotPrefixes
from spillway_gateway.routing.load import load_time_ms
from spillway_gateway.routing.prefix import PromptBlocks, PromptTokens, chain_blocks, namespace_key, token_bytes
from spillway_gateway.scaling.warm_starts import WarmStarts

ENGINES, ROUNDS = 3, 4
PROGRAMS, BEGINNING_BLOCKS, OWN_BLOCKS = 16, 64, 4
REQUESTS_PER_SECOND = 25.0  # five sixths of what three engines compute
BEFORE_SECONDS, MINUTE = 30.0, 60.0
NEW = "engine-new"


class Growing(Cluster):
    """Three engines, and a fourth after a while. first_tokens: by engine, with the cached share, since it joined."""

    def __init__(self, seed: int, warm_start_seconds: float) -> None:
        super().__init__(
            seed, shared=True, engines=ENGINES, routing=RoutingConfig(warm_start_seconds=warm_start_seconds)
        )
        self.hot = HotPrefixes()
        self.programs = [self._tokens(BEGINNING_BLOCKS) for _ in range(PROGRAMS)]
        self.first_tokens: dict[str, list[tuple[float, float]]] = {}
        self._attempts: list[tuple[float, int, Any]] = []
        self._promoted: list[tuple[float, list[int], list[int]]] = []
        self._serial = itertools.count()

    def _tokens(self, blocks: int) -> list[int]:
        return [self.chance.randrange(1 << 30) for _ in range(blocks * BLOCK)]

    def run(self, seconds: float) -> None:
        """Requests come for so long."""
        end = self.now + seconds
        while (next_at := self.now + self.chance.expovariate(REQUESTS_PER_SECOND)) < end:
            self.now = next_at
            self._request()
        self.now = end

    def join(self) -> None:
        """A fourth engine is ready."""
        self.first_tokens.clear()
        engine = self.fleet.add_engine(EngineConfig(NEW, "http://new:1"), newcomer=True)
        self.held[NEW] = type(self.held["engine-0"])()
        engine.set_state(EngineState.READY, "ready")
        engine.events_live = True
        starts = WarmStarts(
            [self.fleet], lambda _: self.hot, self, lies_in_store=lambda *_: True, clock=lambda: self.now
        )
        if engine.take_warm_start():
            asyncio.run(starts.warm(self.fleet, engine))

    async def send(self, engine: Engine, tokens: PromptTokens, first: int) -> str:
        """The engine promotes one prefix after the other, until its warm start is over."""
        ids = memoryview(tokens.ids).cast("I").tolist()[:first]
        keys = chain_blocks(namespace_key("m"), token_bytes(ids), 4 * BLOCK)
        before = self._promoted[-1][0] if self._promoted else self.now
        ready = before + first / engine.rates.shared_load_tokens_per_second
        if engine.in_warm_start(ready):
            self._promoted.append((ready, keys, ids))
        return "accepted"

    def _request(self) -> None:
        while self._attempts and self._attempts[0][0] <= self.now:
            heapq.heappop(self._attempts)[2].close(self.now)
        while self._promoted and self._promoted[0][0] <= self.now:
            _, keys, ids = self._promoted.pop(0)
            self.fleet.index.apply(NEW, BlockStored(keys, None, ids, BLOCK, Tier.CPU, None, [], 0, None))
        tokens = self.chance.choice(self.programs) + self._tokens(OWN_BLOCKS)
        data = token_bytes(tokens)
        keys = chain_blocks(namespace_key("m"), data, 4 * BLOCK)
        self.hot.requested(keys, data, 4 * BLOCK, None, self.now)
        attempt = self.fleet.choose(PromptBlocks(keys, BLOCK, len(tokens), keys[0]), frozenset(), None, None)
        held, rates = attempt.decision.held, attempt.engine.rates
        seconds = attempt.expected_prefill_seconds + load_time_ms(held, rates) / 1000.0
        self._store(attempt.engine.name, keys, tokens)
        attempt.accepted(self.now)
        heapq.heappush(self._attempts, (self.now + seconds, next(self._serial), attempt))
        share = held.total_tokens / len(tokens)
        self.first_tokens.setdefault(attempt.engine.name, []).append((seconds, share))


def main() -> None:
    argparse.ArgumentParser(
        description="A new engine's first minute, with and without its warm start. Simulated."
    ).parse_args()
    print(
        f"Simulated: {ENGINES} engines and a new one, {PROGRAMS} programs behind {BEGINNING_BLOCKS * BLOCK:,} tokens "
        f"each, {REQUESTS_PER_SECOND:g} requests/s, {ROUNDS} seeds; the first {MINUTE:g} s of the new engine"
    )
    for warm_start_seconds in (0.0, 5.0):
        new: list[float] = []
        everywhere: list[float] = []
        for seed in range(ROUNDS):
            cluster = Growing(seed, warm_start_seconds)
            cluster.run(BEFORE_SECONDS)
            cluster.join()
            cluster.run(MINUTE)
            new += [seconds for seconds, _ in cluster.first_tokens.get(NEW, [])]
            everywhere += [seconds for each in cluster.first_tokens.values() for seconds, _ in each]
        print(
            f"warmStartSeconds {warm_start_seconds:g}: requests {len(new) / ROUNDS:.0f} on the new engine, first token "
            f"there {_figures(new)}; of all {_figures(everywhere)}"
        )


def _figures(seconds: list[float]) -> str:
    tenths = statistics.quantiles(seconds, n=10)
    figures = {"mean": statistics.mean(seconds), "p50": tenths[4], "p90": tenths[8], "longest": max(seconds)}
    return ", ".join(f"{name} {1000 * value:.0f}" for name, value in figures.items()) + " ms"


if __name__ == "__main__":
    main()
