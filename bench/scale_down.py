"""Scale-down from six engines to three under sixty sessions: the highest ordinals against the coldest pods. Simulated.

    PYTHONPATH=tests .venv/local/bin/python bench/scale_down.py

The gateway's own index, sessions, routing and deletion costs decide; engines are simulated as caches that keep the
blocks used last and prefill at one rate. Sessions come, take turns and go; some time later three engines are removed,
one after the other, and each session that is alive takes its next turn. Sessions begin on any engine (even), or a
quarter as often on three of the six, drawn by lot, as after their replacement (uneven). Nothing here measures a device.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.event_decoder import BlockRemoved, BlockStored, Tier
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.routing.load import load_time_ms
from spillway_gateway.routing.prefix import PromptBlocks, chain_blocks, namespace_key, token_bytes
from spillway_gateway.scaling.deletion_costs import PodWarmth, deletion_costs

ENGINES, LEFT, SESSIONS = 6, 3, 60
BLOCK, ENGINE_BLOCKS = 128, 3200  # tokens; blocks of device and CPU tier together
TURN_BLOCKS, ROUND_SECONDS, ALIVE_SECONDS = 4, 45.0, 900.0
SYSTEM_BLOCKS = 8  # that all sessions begin with
SEEDS = 12
UNEVEN = 0.25  # how often a session begins on a replaced engine, to 1 on others


@dataclass
class Session:
    name: str
    leaves_at: float
    tokens: list[int] = field(default_factory=list)


class Cluster:
    """Simulated engines behind the gateway's own routing; a stepped clock."""

    def __init__(
        self,
        seed: int,
        *,
        shared: bool,
        engines: int = ENGINES,
        routing: RoutingConfig | None = None,
        even: bool = True,
    ) -> None:
        self.now, self.shared, self.chance = 0.0, shared, random.Random(seed)
        replaced = set() if even else set(random.Random(seed).sample(range(engines), engines // 2))
        self.begins = [UNEVEN if number in replaced else 1.0 for number in range(engines)]
        index = PrefixIndex("m", bytes_max=1 << 28, orphans_max=10, default_block_tokens=BLOCK, clock=lambda: self.now)
        configs = tuple(EngineConfig(f"engine-{number}", f"http://e{number}:1") for number in range(engines))
        routing = routing or RoutingConfig()
        self.fleet = ModelFleet(ModelConfig("m", engines=configs), routing, index, lambda: self.now)
        self.held: dict[str, OrderedDict[int, None]] = {engine.name: OrderedDict() for engine in configs}
        for engine in self.fleet.engines.values():
            engine.set_state(EngineState.READY, "ready")
            engine.events_live = True

    def turn(self, session: Session) -> tuple[float, float]:
        """Returns the cached share of the prompt and the seconds to its first token."""
        session.tokens += [self.chance.randrange(1 << 30) for _ in range(TURN_BLOCKS * BLOCK)]
        data = token_bytes(session.tokens)
        keys = chain_blocks(namespace_key("m"), data, 4 * BLOCK)
        prompt = PromptBlocks(keys, BLOCK, len(session.tokens), keys[0])
        key = SessionKey.of("t", session.name.encode())
        first = self.fleet.sessions.engine_of(key) is None  # as many come at once, new sessions go anywhere
        only = self.chance.choices(sorted(self.fleet.engines), self.begins)[0] if first else None
        attempt = self.fleet.choose(prompt, frozenset(), only, key)
        held, rates = attempt.decision.held, attempt.engine.rates
        seconds = attempt.expected_prefill_seconds + load_time_ms(held, rates) / 1000.0
        self._store(attempt.engine.name, keys, session.tokens)
        attempt.accepted(self.now)
        self.now += attempt.decision.uncached_tokens / rates.prefill_tokens_per_second / ENGINES
        attempt.close(self.now)
        return held.total_tokens / len(session.tokens), seconds

    def _store(self, engine: str, keys: list[int], tokens: list[int]) -> None:
        held, index = self.held[engine], self.fleet.index
        stored = BlockStored(keys, None, tokens, BLOCK, Tier.DEVICE, None, [], 0, None)
        index.apply(engine, stored)
        if self.shared:
            index.apply(engine, BlockStored(keys, None, [], BLOCK, Tier.SHARED, None, [], 0, None, "redis/1"))
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        gone = [held.popitem(last=False)[0] for _ in range(max(0, len(held) - ENGINE_BLOCKS))]
        if gone:
            index.apply(engine, BlockRemoved(gone, Tier.DEVICE, 0))

    def costs(self) -> dict[str, int]:
        *_, alone = self.fleet.index.held_alone({name: name for name in self.fleet.engines})
        assert alone is not None
        alive = self.fleet.sessions.alive(self.now - ALIVE_SECONDS)
        return deletion_costs({name: PodWarmth(alive[name], alone.get(name, 0), 0) for name in self.fleet.engines})

    def remove(self, name: str) -> None:
        self.fleet.remove_engine(name)
        for _ in self.fleet.index.retire_engine(name):
            pass


def highest(cluster: Cluster) -> str:
    return max(cluster.fleet.engines)


def coldest(cluster: Cluster) -> str:
    costs = cluster.costs()
    return min(costs, key=lambda name: (costs[name], name))


def scaled(
    seed: int, choose: Callable[[Cluster], str], *, shared: bool, even: bool
) -> tuple[list[float], list[float], int]:
    """Cached shares and seconds to the first token of the next turns, and sessions that lost their engine."""
    cluster = Cluster(seed, shared=shared, even=even)
    system = [cluster.chance.randrange(1 << 30) for _ in range(SYSTEM_BLOCKS * BLOCK)]
    sessions = [Session(f"s{number}", 0.0, list(system)) for number in range(3 * SESSIONS)]
    for session in sessions:
        session.leaves_at = cluster.chance.expovariate(1 / 1800.0)
    waiting = sorted(sessions, key=lambda each: -each.leaves_at)
    alive = waiting[:SESSIONS]  # the long ones are alive when engines are removed
    for at in range(1, 41):
        for session in sessions:
            if session.leaves_at >= cluster.now and cluster.chance.random() < 0.25:
                cluster.turn(session)
        cluster.now = max(cluster.now, at * ROUND_SECONDS)
    served = {each.name: cluster.fleet.sessions.engine_of(SessionKey.of("t", each.name.encode())) for each in alive}
    for _ in range(ENGINES - LEFT):
        cluster.remove(choose(cluster))
    moved = sum(engine not in cluster.fleet.engines for engine in served.values())
    turns = [cluster.turn(session) for session in alive]
    return [share for share, _ in turns], [seconds for _, seconds in turns], moved


def main() -> None:
    argparse.ArgumentParser(
        description="From six engines to three: the highest ordinals against the coldest pods. Simulated."
    ).parse_args()
    print(f"Simulated: {ENGINES} -> {LEFT} engines, {SESSIONS} sessions, {SEEDS} seeds; next turn of each session")
    for even, shared in itertools.product((True, False), repeat=2):
        for name, choose in (("highest ordinals", highest), ("coldest", coldest)):
            shares: list[float] = []
            seconds: list[float] = []
            moved = 0
            for seed in range(SEEDS):
                found = scaled(seed, choose, shared=shared, even=even)
                shares, seconds, moved = shares + found[0], seconds + found[1], moved + found[2]
            tenths = statistics.quantiles(seconds, n=10)
            print(
                f"{'even' if even else 'uneven':6} shared tier {'on ' if shared else 'off'} {name:17} "
                f"cached {statistics.mean(shares):.1%}  first token mean {1000 * statistics.mean(seconds):.0f} ms  "
                f"p50 {1000 * tenths[4]:.0f} ms  p90 {1000 * tenths[8]:.0f} ms  "
                f"sessions that lost their engine {moved / SEEDS:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
