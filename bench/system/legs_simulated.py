"""Prefill and decode apart in virtual time: the gateway's own decisions over simulated engines, many runs in turns.

    PYTHONPATH=bench python -m system.legs_simulated [--systems plain plain_again auto always] [--engines 2] [--runs 8]
        [--seconds 60] [--uncached-tokens-min 1024] [--token-ms-max MS]

The systems, the mixes and the rates of arrivals are those of disaggregation.py. Engines have the times of rates.py,
steps of 2,048 tokens and one CPU tier of the node. The n-th run of each system has the same arrivals; its prompts
differ, as they do on real engines, which would find a prompt that they have served before. So other hashes decide
between equal costs, and two runs of one system differ. `plain_again` is `plain` with other prompts: how far figures
differ by that alone.

Prints each figure over the same run of `plain` (median, and the mean's standard error), and writes OUTPUT (flat).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench_report import write_report
from routing_policies.spillway import gateway_event

from spillway_gateway.config.disaggregation import DisaggregationConfig
from spillway_gateway.config.settings import EngineConfig, HealthConfig, IndexConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet import event_decoder
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.hand_over import LOOK_SECONDS
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.fleet_view import NOTHING_HELD, Leg
from spillway_gateway.routing.prefix import PromptBlocks, short_prompt_key, token_block_keys, token_bytes
from spillway_settings.roles import EngineRole
from spillway_settings.wire import NODE_STORE
from spillway_simulator.fast_forward import FastForward
from spillway_simulator.model.engine import EngineShape, SimulatedEngine
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, KvEvent, Medium
from spillway_simulator.model.rates import LinkRates
from spillway_simulator.model.request import EngineRequest, Progress
from spillway_simulator.model.tiers import SharedTier
from system.legs_load import FIRST_ID, Kind, Timed, arrivals
from system.legs_report import figures
from system.legs_scale import CUDA
from system.legs_systems import SYSTEMS, Way
from system.rates import BLOCK_TOKENS, H200_QWEN3_8B, KV_BYTES_PER_TOKEN

NODE = f"{NODE_STORE}/simulated"
EVENT_SECONDS = 0.002
VOCABULARY = 49_152
WARM_UP = 8_192, 0.23  # tokens that an engine has computed before, and the seconds that it took
SHAPE = EngineShape(BLOCK_TOKENS, 2_000, 2_000, max_batched_tokens=2_048, max_model_tokens=16_384)
# The request's own cost is that of token ids: one engine's first token of 8,192 of them came after 0.24 s.
RATES = replace(H200_QWEN3_8B, request_overhead_seconds=0.015)
NODE_BLOCKS = (48 << 30) // (KV_BYTES_PER_TOKEN * BLOCK_TOKENS)


AGAIN = "plain_again"
SIMULATED = {name: way for name, way in SYSTEMS.items() if not way.nixl} | {AGAIN: SYSTEMS["plain"]}
FIGURES = (
    "first_token_p50_seconds",
    "first_token_p99_seconds",
    "between_tokens_p99_seconds",
    "goodput_requests_per_second",
)


@dataclass(slots=True)
class _Asked:
    timed: Timed
    prompt: array[int]
    blocks: PromptBlocks
    sent: float
    leg: Leg = Leg.OPEN
    attempt: Attempt | None = None
    loading: str | None = None
    last: float = 0.0
    turn: ColdTurn = field(default_factory=ColdTurn)


class LegsRun:
    """One system under one mix. prompts: the seed of the prompts alone. transfers_slower: so many times as slowly as
    from an engine's own CPU tier, whose rate the gateway expects, a prompt is loaded that another engine computed."""

    def __init__(
        self, way: Way, terms: DisaggregationConfig, *, engines: int, prompts: str, transfers_slower: float = 1.0
    ) -> None:
        node, cpu = SharedTier(NODE_BLOCKS), RATES.cpu
        link = LinkRates(cpu.load_tokens_per_second / transfers_slower, float("inf"), cpu.load_fixed_seconds)
        rates = replace(RATES, shared=link)
        shape = replace(SHAPE, gates_loads=not terms.by_connector)
        self.engines = [SimulatedEngine(f"engine-{at}", shape, rates, node) for at in range(engines)]
        self.chosen: list[tuple[str, str]] = []  # the decision and its engine, in order
        self._intervals = {engine.name: (0, 0.0) for engine in self.engines}  # tokens behind first ones, seconds
        self._time = FastForward(self.engines, self._progress, self._events)
        self._random = random.Random(prompts)
        self._asked: dict[str, _Asked] = {}
        self._terms = terms
        bounds, clock = IndexConfig(), lambda: self._time.now
        self._index = PrefixIndex(
            "model",
            bytes_max=bounds.bytes_max,
            orphans_max=bounds.orphans_max,
            default_block_tokens=BLOCK_TOKENS,
            clock=clock,
        )
        roles = [EngineRole(way.roles[2 * at // engines]) for at in range(engines)]
        configs = tuple(
            EngineConfig(engine.name, f"http://127.0.0.1:{8100 + at}", role=role)
            for at, (engine, role) in enumerate(zip(self.engines, roles, strict=True))
        )
        self._fleet = ModelFleet(
            ModelConfig("model", configs), RoutingConfig(), self._index, clock=clock, disaggregation=terms
        )
        for routed in self._fleet.engines.values():
            routed.set_state(EngineState.READY, "ready")
            routed.events_live = True
        for at, engine in enumerate(self.engines):
            self._apply(at, engine.take_events())  # from which store it loads
            engine.prefill_meter.add(*WARM_UP, 0.0)

    def run(self, plan: Sequence[tuple[float, Kind]]) -> list[Timed]:
        """The requests, in order of arrival."""
        requests = []
        for number, (at, kind) in enumerate(plan):
            prompt = array("I", self._random.choices(range(FIRST_ID, VOCABULARY), k=kind.prompt_tokens))
            keys = token_block_keys(self._index.namespace(), prompt, BLOCK_TOKENS)
            spread = keys[0] if keys else short_prompt_key(self._index.namespace(), token_bytes(prompt))
            blocks = PromptBlocks(keys, BLOCK_TOKENS, len(prompt), spread)
            leg = Leg.WHOLE if self._terms.is_off else Leg.OPEN
            asked = _Asked(Timed(kind, prompt_tokens=len(prompt), error=None), prompt, blocks, at, leg)
            self._asked[str(number)] = asked
            requests.append(asked.timed)
            self._time.at(at, partial(self._route, str(number)))
        self._time.at(0.0, partial(self._observe, plan[-1][0]))
        self._time.run()
        assert not self._asked
        return requests

    @property
    def legs(self) -> dict[str, int]:
        """Requests by decision."""
        return {each: sum(decision == each for decision, _ in self.chosen) for each in ("one", "two")}

    def _observe(self, until: float) -> None:
        for simulated, engine in zip(self.engines, self._fleet.engines.values(), strict=True):
            reading = EngineReading(
                simulated.waiting_requests,
                simulated.running_requests,
                simulated.kv_usage,
                SHAPE.device_blocks * BLOCK_TOKENS,
                simulated.prefill_meter.per_second,
                token_intervals=self._intervals[simulated.name][0],
                token_seconds=self._intervals[simulated.name][1],
            )
            engine.observed(reading, engine.running_requests)
        if self._time.now < until:
            self._time.at(self._time.now + HealthConfig().metrics_period_seconds, partial(self._observe, until))

    def _route(self, name: str) -> None:
        asked = self._asked[name]
        attempt = self._fleet.choose_unless_held(asked.blocks, frozenset(), turn=asked.turn, leg=asked.leg)
        if attempt is None:
            until = asked.turn.until
            assert until is not None
            self._time.at(min(until, self._time.now + LOOK_SECONDS), partial(self._route, name))
            return
        asked.attempt = attempt
        legs = attempt.decision.legs
        two = legs is not None and legs.prefill is not None
        if asked.leg is not Leg.SECOND:
            self.chosen.append(("two" if two else "one", attempt.engine.name))
        asked.loading = self._fleet.loading_engine(attempt.decision)
        asked.leg = Leg.SECOND if two else Leg.WHOLE
        answer = array(
            "I", self._random.choices(range(FIRST_ID, VOCABULARY), k=1 if two else asked.timed.kind.answer_tokens)
        )
        at = [engine.name for engine in self.engines].index(attempt.engine.name)
        self._time.submit(at, EngineRequest(name, asked.prompt, answer))

    def _progress(self, at: int, progress: Progress) -> None:
        asked, now = self._asked[progress.request_id], self._time.now
        attempt, timed = asked.attempt, asked.timed
        assert attempt is not None
        if progress.first:
            attempt.first_byte(now, measures_prefill=True)
        if asked.leg is Leg.SECOND:
            attempt.close()
            if asked.loading is None:  # the second leg transfers
                self._route(progress.request_id)
            else:
                self._hand_over(progress.request_id, now)
            return
        if progress.first:
            timed.first_token_seconds, timed.cached_tokens = now - asked.sent, progress.cached.total
        else:
            gap = (now - asked.last) / progress.tokens
            timed.gaps += [gap] * progress.tokens
            tokens, seconds = self._intervals[self.engines[at].name]
            self._intervals[self.engines[at].name] = tokens + progress.tokens, seconds + now - asked.last
        timed.ids += [0] * progress.tokens
        asked.last = now
        if progress.finished:
            attempt.close(now)
            del self._asked[progress.request_id]

    def _hand_over(self, name: str, began: float) -> None:
        """Look whether the prompt can be loaded, as HandOver does."""
        asked, now = self._asked[name], self._time.now
        assert asked.loading is not None
        wanted = (len(asked.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        arrived = self._fleet.held(asked.blocks).get(asked.loading, NOTHING_HELD).total_tokens >= wanted
        if arrived or now - began >= self._terms.hand_over_seconds_max:
            self._fleet._hand_overs.waits.measured(wanted, now - began)
            self._route(name)
        else:
            self._time.at(now + LOOK_SECONDS, partial(self._hand_over, name, began))

    def _events(self, at: int, events: list[KvEvent]) -> None:
        self._time.at(self._time.now + EVENT_SECONDS, partial(self._apply, at, events))

    def _apply(self, at: int, events: list[KvEvent]) -> None:
        for event in events:
            medium = event.medium if isinstance(event, BlocksStored | BlocksRemoved) else None
            if medium is Medium.CPU:  # of the engine alone, on the way to the node's
                continue
            decoded = gateway_event(event, BLOCK_TOKENS)
            if medium is Medium.SHARED and not isinstance(decoded, event_decoder.AllBlocksCleared):
                decoded = replace(decoded, tier=event_decoder.Tier.CPU, store=NODE)
            self._index.apply(self.engines[at].name, decoded)


def measured(options: argparse.Namespace, name: str, mix: str, number: int) -> dict[str, float]:
    """The figures of one run."""
    terms = DisaggregationConfig(
        mode=SIMULATED[name].mode,
        strict_roles=SIMULATED[name].strict,
        uncached_tokens_min=options.uncached_tokens_min,
        token_ms_max=options.token_ms_max,
        hand_over=options.hand_over,
    )
    prompts, slower = f"{options.seed} {name} {number}", options.transfers_slower
    run = LegsRun(SIMULATED[name], terms, engines=options.engines, prompts=prompts, transfers_slower=slower)
    plan = arrivals(CUDA.mixes()[mix], options.rate * options.engines / 2, options.seconds, options.seed + number)
    found = figures(run.run(plan), options.seconds, CUDA)
    return {key: found[key] for key in FIGURES} | {"share_of_two_legs": run.legs["two"] / len(run.chosen)}


def over(own: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Median of the ratios by run, and the standard error of their mean."""
    ratios = [one / other for one, other in zip(own, base, strict=True) if other]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return (statistics.median(ratios), spread) if ratios else (0.0, 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(SIMULATED), default=list(SIMULATED))
    parser.add_argument("--mixes", nargs="+", choices=list(CUDA.mixes()), default=list(CUDA.mixes()))
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--runs", type=int, default=8, help="of each system, in turns")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--rate", type=float, default=1.0, help="times the rates of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--uncached-tokens-min", type=int, default=CUDA.uncached_tokens_min)
    parser.add_argument("--token-ms-max", type=float)
    parser.add_argument("--hand-over", choices=["store", "connector"], default="store")
    parser.add_argument("--transfers-slower", type=float, default=1.0, help="times, than the gateway expects")
    parser.add_argument("--output", type=Path, default=Path("build/bench/disaggregation-simulated.json"))
    options = parser.parse_args(arguments)
    written: dict[str, float] = {"seconds": options.seconds, "runs": options.runs, "engines": options.engines}
    for mix in options.mixes:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.systems}
        for number in range(options.runs):
            for name in options.systems:
                runs[name].append(measured(options, name, mix, number))
        for name, each in runs.items():
            cells = []
            for key in (*FIGURES, "share_of_two_legs"):
                values = [run[key] for run in each]
                written[f"{name}_{mix}_{key}"] = round(statistics.fmean(values), 5)
                cells.append(f"{key} {statistics.fmean(values):.4f}")
                if name != "plain" and "plain" in runs and key in FIGURES:
                    ratio, spread = over(values, [run[key] for run in runs["plain"]])
                    written[f"{name}_{mix}_{key}_over_plain"] = round(ratio, 4)
                    written[f"{name}_{mix}_{key}_over_plain_standard_error"] = round(spread, 4)
                    cells[-1] += f" ({ratio:.3f} +- {spread:.3f})"
            print(f"{mix:14} {name:12} {', '.join(cells)}", flush=True)
    write_report(written, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
