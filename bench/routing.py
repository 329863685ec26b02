"""Routing policies on the same traces over simulated engines, in virtual time and without sockets.

    python bench/routing.py [--engines 16] [--traces multi_turn ...] [--policies spillway ...]
                            [--fleets tiers device one_link]
                            [--scale 1.0] [--mooncake FILE.jsonl] [--seed 0]

SIMULATED: no figure here is of a real engine. Engines keep time by the rates of a preset of services/simulator, which
names the source of each; Spillway's part is the gateway's real routing code, the rivals are re-implemented from their
descriptions. What the run can show is how policies compare on the same engines, not how fast any engine is.

Hit rate is the share of prompt tokens that engines found in any tier; the oracle's is the share that any earlier
request contained, as one cache without bounds would find; `pooled` is one LRU cache as large as all tiers of all
engines together. Prints tables, writes build/bench/routing.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench_report import write_report
from routing_policies.blind import LeastLoaded, Random, RoundRobin
from routing_policies.policy import Policy, RoutedRequest, Scrape
from routing_policies.rivals import (
    AibrixPrefixCache,
    EndpointPickerApproximate,
    ProductionStackPrefixAware,
    VllmRouterCacheAware,
)
from routing_policies.spillway import Spillway
from traces.mooncake import generate_mooncake, mooncake_trace, read_mooncake
from traces.session import Session, Trace
from traces.synthetic import agents, bursts, hot_group, multi_turn, shared_prompts, unique_prompts

from spillway_gateway.config.settings import RoutingConfig
from spillway_simulator.fast_forward import FastForward
from spillway_simulator.model.engine import EngineShape, SimulatedEngine
from spillway_simulator.model.events import KvEvent
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.request import EngineRequest, Progress
from spillway_simulator.model.tiers import LoadLink, LruTier, SharedTier

BLOCK_TOKENS = 128
EVENT_DELAY_SECONDS = 0.002  # from an engine's step to the router's index
SCRAPE_SECONDS = 0.05
PRESET = "h200-qwen3-14b-redis"
DEVICE_BLOCKS = 2_400  # 307,200 tokens of KV per engine
OUTPUT = Path("build/bench/routing.json")


@dataclass(frozen=True, slots=True)
class FleetShape:
    """shared_blocks: of the shared tier. one_link: the store is the limit, so all engines' loads queue for one link of
    one engine's rate; its blocks are in events, as a router can only price blocks that it has in its index."""

    engine: EngineShape
    shared_blocks: int = 0
    one_link: bool = False


_TIERED = EngineShape(BLOCK_TOKENS, DEVICE_BLOCKS, 2 * DEVICE_BLOCKS)
FLEETS = {
    "tiers": FleetShape(_TIERED, 100_000),
    "device": FleetShape(EngineShape(BLOCK_TOKENS, DEVICE_BLOCKS, 0)),
    # Device and CPU tier of all engines together hold half of what the agents of the trace `agents` have at their end:
    # 272 times 69,400 tokens, and 20,000 common ones.
    "half": FleetShape(EngineShape(BLOCK_TOKENS, DEVICE_BLOCKS // 2, DEVICE_BLOCKS + DEVICE_BLOCKS // 2)),
    "one_link": FleetShape(
        EngineShape(BLOCK_TOKENS, DEVICE_BLOCKS, DEVICE_BLOCKS // 4, announce_shared=True), 100_000, one_link=True
    ),
}


def _policies() -> dict[str, Callable[[], Policy]]:
    return {
        "spillway": lambda: Spillway(BLOCK_TOKENS),
        "spillway_without_events": lambda: Spillway(BLOCK_TOKENS, events=False),
        "spillway_sessions": lambda: Spillway(BLOCK_TOKENS, sessions=True),
        "spillway_without_events_sessions": lambda: Spillway(BLOCK_TOKENS, events=False, sessions=True),
        # Operators can configure the store's rate; it matters only in the fleet with one link.
        "spillway_store_rate": lambda: Spillway(
            BLOCK_TOKENS,
            routing=RoutingConfig(shared_store_tokens_per_second=PRESETS[PRESET].shared.load_tokens_per_second),
        ),
        "spillway_bursts_apart": lambda: Spillway(BLOCK_TOKENS, bursts_together=False),
        "spillway_without_rates": lambda: Spillway(BLOCK_TOKENS, engine_rates=False),
        "round_robin": RoundRobin,
        "random": Random,
        "least_loaded": LeastLoaded,
        "vllm_router_cache_aware": VllmRouterCacheAware,
        "production_stack_prefixaware": ProductionStackPrefixAware,
        "epp_approximate_prefix": lambda: EndpointPickerApproximate(BLOCK_TOKENS, DEVICE_BLOCKS),
        "aibrix_prefix_cache": AibrixPrefixCache,
    }


def _traces(scale: float, mooncake: Path | None, engines: int, seed: int) -> dict[str, Callable[[], Trace]]:
    """Traces for 16 engines, made larger or smaller with the fleet. seed: added to each trace's own."""
    size = engines / 16

    def count(full: int) -> int:
        return max(1, round(full * scale * size))

    def from_mooncake() -> Trace:
        if mooncake is not None:
            with mooncake.open(encoding="utf-8") as lines:
                return mooncake_trace(read_mooncake(lines))
        return mooncake_trace(
            generate_mooncake(
                seed=5 + seed,
                requests=count(2_400),
                requests_per_second=44.0 * size,
                conversations_open=round(400 * size),
            )
        )

    return {
        "multi_turn": lambda: multi_turn(seed=1 + seed, sessions=count(600), sessions_per_second=6.0 * size),
        "many_groups": lambda: shared_prompts(
            seed=2 + seed, requests=count(3_600), requests_per_second=60.0 * size, groups=round(900 * size)
        ),
        "hot_group": lambda: hot_group(seed=3 + seed, requests=count(3_600), requests_per_second=100.0 * size),
        "unique": lambda: unique_prompts(seed=4 + seed, requests=count(2_400), requests_per_second=50.0 * size),
        "bursts": lambda: bursts(seed=8 + seed, count=count(60), per_second=2.0 * size),
        "mooncake": from_mooncake,
        "agents": lambda: agents(seed=6 + seed, sessions=count(272), sessions_per_second=2.0 * size),
        # Pauses longer than routing.approximateSeconds.
        "agents_idle": lambda: agents(
            seed=7 + seed,
            name="agents_idle",
            sessions=count(272),
            sessions_per_second=2.0 * size,
            turns=6,
            pause_seconds=1_800.0,
        ),
    }


@dataclass(slots=True)
class Totals:
    """The totals of one run. Seconds are virtual."""

    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    device_tokens: int = 0
    cpu_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    oracle_tokens: int = 0
    pooled_tokens: int = 0
    first_sent: float = float("inf")
    last_answer: float = 0.0
    decide_seconds: float = 0.0
    sent_to: list[int] = field(default_factory=list)

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.cpu_tokens + self.shared_tokens


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    session: Session
    turn: int
    engine: int
    sent: float
    prompt: array[int]
    answer: array[int]


class Experiment:
    """One policy on one trace. Implements policy.Fleet."""

    def __init__(self, policy: Policy, trace: Trace, engines: int, *, fleet: FleetShape, seed: int):
        rates = PRESETS[PRESET]
        shape, shared_blocks = fleet.engine, fleet.shared_blocks
        shared = SharedTier(shared_blocks, LoadLink() if fleet.one_link else None) if shared_blocks else None
        self.engines = [SimulatedEngine(f"engine-{at}", shape, rates, shared) for at in range(engines)]
        self.in_flight = [0] * engines
        self.totals = Totals(sent_to=[0] * engines)
        self._policy = policy
        self._trace = trace
        self._time = FastForward(self.engines, self._progress, self._events)
        self._open: dict[str, _Open] = {}
        self._scrapes: list[Scrape] = []
        self._scraped_at = -1.0
        self._ever: set[int] = set()
        blocks = engines * (shape.device_blocks + shape.cpu_blocks) + shared_blocks
        self._pooled = LruTier(blocks)
        policy.start(self, engines, seed)

    @property
    def now(self) -> float:
        now: float = self._time.now
        return now

    def scrape(self, engine: int) -> Scrape:
        if not self._scrapes or self.now - self._scraped_at >= SCRAPE_SECONDS:
            self._scraped_at = self.now
            self._scrapes = [self._read(engine) for engine in self.engines]
        return self._scrapes[engine]

    def scrape_now(self, engine: int) -> Scrape:
        return self._read(self.engines[engine])

    @staticmethod
    def _read(engine: SimulatedEngine) -> Scrape:
        return Scrape(
            engine.waiting_requests,
            engine.running_requests,
            engine.kv_usage,
            engine.shape.device_blocks * engine.shape.block_tokens,
            engine.prefill_meter.per_second,
            engine.rates.shared.load_tokens_per_second,
            declined_tiers=engine.tiers.declined_tiers,
        )

    def run(self) -> Totals:
        for session in self._trace.sessions:
            self._time.at(session.start_seconds, lambda session=session: self._send(session, 0, array("I")))
        self._time.run()
        assert not self._open
        return self.totals

    def _send(self, session: Session, turn: int, context: array[int]) -> None:
        said = session.turns[turn]
        prompt = array("I", context)
        for segment in said.added:
            prompt.extend(segment.ids())
        answer = said.answer.ids()
        request = RoutedRequest(f"{session.name}/{turn}", prompt, session.name)
        self._ask_oracle(request)
        began = time.perf_counter()
        engine = self._policy.choose(request)
        self.totals.decide_seconds += time.perf_counter() - began
        self.in_flight[engine] += 1
        self.totals.sent_to[engine] += 1
        self.totals.first_sent = min(self.totals.first_sent, self.now)
        self._open[request.id] = _Open(session, turn, engine, self.now, prompt, answer)
        self._time.submit(engine, EngineRequest(request.id, prompt, answer))

    def _ask_oracle(self, request: RoutedRequest) -> None:
        keys = request.keys(BLOCK_TOKENS)
        limit = (len(request.tokens) - 1) // BLOCK_TOKENS
        found = next((at for at, key in enumerate(keys[:limit]) if key not in self._ever), limit)
        pooled = next((at for at, key in enumerate(keys[:limit]) if key not in self._pooled), limit)
        self.totals.oracle_tokens += found * BLOCK_TOKENS
        self.totals.pooled_tokens += pooled * BLOCK_TOKENS
        self._ever.update(keys)
        self._pooled.put(keys)

    def _progress(self, engine: int, progress: Progress) -> None:
        request = self._open[progress.request_id]
        totals = self.totals
        totals.output_tokens += progress.tokens
        if progress.first:
            totals.ttft.append(progress.seconds - request.sent)
            totals.prompt_tokens += len(request.prompt)
            totals.device_tokens += progress.cached.device
            totals.cpu_tokens += progress.cached.cpu
            totals.shared_tokens += progress.cached.shared
            self._policy.first_token(progress.request_id)
        if progress.finished:
            self._finished(engine, progress, request)

    def _finished(self, engine: int, progress: Progress, request: _Open) -> None:
        del self._open[progress.request_id]
        self.in_flight[engine] -= 1
        self.totals.latency.append(progress.seconds - request.sent)
        self.totals.last_answer = max(self.totals.last_answer, progress.seconds)
        self._policy.finished(progress.request_id)
        self._ever.update(RoutedRequest("", request.prompt + request.answer[:-1]).keys(BLOCK_TOKENS))
        turn = request.turn + 1
        if turn < len(request.session.turns):
            context = request.prompt + request.answer
            pause = request.session.turns[turn].pause_seconds
            self._time.at(self.now + pause, lambda: self._send(request.session, turn, context))

    def _events(self, engine: int, events: list[KvEvent]) -> None:
        self._time.at(self.now + EVENT_DELAY_SECONDS, lambda: self._policy.events(engine, events))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(totals: Totals) -> dict[str, float]:
    span = max(1e-9, totals.last_answer - totals.first_sent)
    mean = sum(totals.sent_to) / len(totals.sent_to)
    return {
        "hit_rate": totals.hit_tokens / totals.prompt_tokens,
        "hit_rate_device": totals.device_tokens / totals.prompt_tokens,
        "hit_rate_cpu": totals.cpu_tokens / totals.prompt_tokens,
        "hit_rate_shared": totals.shared_tokens / totals.prompt_tokens,
        "hit_rate_of_oracle": totals.hit_tokens / totals.oracle_tokens if totals.oracle_tokens else 1.0,
        "hit_rate_of_pooled": totals.hit_tokens / totals.pooled_tokens if totals.pooled_tokens else 1.0,
        "ttft_p50_ms": 1000 * percentile(totals.ttft, 0.50),
        "ttft_p90_ms": 1000 * percentile(totals.ttft, 0.90),
        "ttft_p99_ms": 1000 * percentile(totals.ttft, 0.99),
        "latency_p50_ms": 1000 * percentile(totals.latency, 0.50),
        "output_tokens_per_second": totals.output_tokens / span,
        "requests_max_over_mean": max(totals.sent_to) / mean,
        "decision_us": 1e6 * totals.decide_seconds / len(totals.ttft),
    }


_COLUMNS = (
    ("hit_rate", "hit", 100.0, "%6.1f"),
    ("hit_rate_device", "device", 100.0, "%7.1f"),
    ("hit_rate_of_oracle", "/oracle", 100.0, "%8.1f"),
    ("ttft_p50_ms", "ttft p50", 1.0, "%9.0f"),
    ("ttft_p90_ms", "p90", 1.0, "%7.0f"),
    ("ttft_p99_ms", "p99 ms", 1.0, "%7.0f"),
    ("output_tokens_per_second", "out tok/s", 1.0, "%10.0f"),
    ("requests_max_over_mean", "max/mean", 1.0, "%9.2f"),
    ("decision_us", "us each", 1.0, "%8.0f"),
)


def _row(name: str, values: dict[str, float]) -> str:
    cells = "".join(pattern % (values[key] * factor) for key, _, factor, pattern in _COLUMNS)
    return f"{name:30}{cells}"


def _heading() -> str:
    widths = [len(pattern % 0) for _, _, _, pattern in _COLUMNS]
    return f"{'policy':30}" + "".join(
        f"{title:>{width}}" for (_, title, _, _), width in zip(_COLUMNS, widths, strict=True)
    )


def _fitting(policies: Iterable[str], shape: FleetShape) -> list[str]:
    """A store's rate is a setting only if one store is the limit."""
    return [name for name in policies if shape.one_link or name != "spillway_store_rate"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--fleets", nargs="+", choices=sorted(FLEETS), default=["tiers", "device"])
    parser.add_argument("--traces", nargs="+", choices=sorted(_traces(1.0, None, 16, 0)))
    parser.add_argument("--policies", nargs="+", choices=sorted(_policies()))
    parser.add_argument("--scale", type=float, default=1.0, help="share of each trace's requests")
    parser.add_argument("--mooncake", type=Path, help="a trace file in Mooncake's format instead of the generated one")
    parser.add_argument(
        "--silent-shared", action="store_true", help="no events of the shared tier, as engines of other connectors"
    )
    parser.add_argument("--seed", type=int, default=0, help="of traces, and of policies that draw lots")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    traces = _traces(options.scale, options.mooncake, options.engines, options.seed)
    policies = _policies()
    report: dict[str, float | str] = {"simulated": "true", "preset": PRESET, "engines": options.engines}
    for source, text in PRESETS[PRESET].sources:
        report[f"rates_{source.replace(' ', '_').replace(',', '')}"] = text
    print(f"SIMULATED: {options.engines} engines, rates of preset {PRESET}; rivals re-implemented from descriptions")
    for fleet in options.fleets:
        shape = FLEETS[fleet]
        if options.silent_shared:
            shape = replace(shape, engine=replace(shape.engine, announce_shared=False))
        for trace_name in options.traces or traces:
            trace = traces[trace_name]()
            print(f"\n{fleet}: {trace.name}: {trace.about}\n{_heading()}")
            for policy_name in options.policies or _fitting(policies, shape):
                policy = policies[policy_name]()
                values = figures(Experiment(policy, trace, options.engines, fleet=shape, seed=options.seed).run())
                print(_row(policy_name, values), flush=True)
                for key, value in values.items():
                    report[f"{fleet}_{trace_name}_{policy_name}_{key}"] = round(value, 6)
    write_report(report, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
