"""`python -m engine_lives.timed_agents [--sessions 8] [--seconds 40] [--seeds 3 4]`: late stores at a device's speed.

Agent sessions in a closed loop on vLLM's real scheduler in virtual time: each begins with common tokens and some of its
own, every turn extends the last one's prompt and answer, and behind the last turn another session takes its place. A
step takes as long as it would on the device, copies move as many bytes in it as the device's link does, and what lies
before `--warm-seconds` is not counted. Blocks stand for 128 tokens of Qwen3-8B on an H200, although they hold fewer.
Deterministic. Writes build/bench/late_stores.json, flat, with units in the keys.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_lives.engine import Engine

COMMON_BLOCKS, OWN_BLOCKS, TURN_BLOCKS = 31, 47, 9.625  # at the head, of a session, of each turn with its answer
TURNS, ANSWER_TOKENS, PAUSE_SECONDS = 12, 64, 1.0
STEP_BLOCKS = 64  # that one step computes at most
BLOCK_SECONDS, STEP_SECONDS, IDLE_STEP_SECONDS = 128 / 38_000, 0.009, 0.002
COPY_SECONDS = 0.00038  # a block, in either direction
OUTPUT = Path("build/bench/late_stores.json")


@dataclass
class Outcome:
    """Outcome of a run after its warm-up. Seconds are virtual."""

    first_tokens: list[float] = field(default_factory=list)  # seconds
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    stored_blocks: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    late_copies: int = 0
    lost_copies: int = 0

    @property
    def cached_percent(self) -> float:
        return 100 * self.cached_tokens / max(1, self.prompt_tokens)

    def figures(self) -> dict[str, float]:
        from engine_lives.engine import BLOCK_TOKENS

        first = sorted(self.first_tokens)
        return {
            "requests": len(first),
            "cached_percent": round(self.cached_percent, 1),
            "first_token_p50_seconds": round(statistics.median(first), 3),
            "first_token_p90_seconds": round(first[int(0.9 * len(first))], 3),
            "computed_blocks": self.computed_tokens // BLOCK_TOKENS,
            "stored_blocks": self.stored_blocks,
            "late_blocks": self.late_copies,
            "lost_blocks": self.lost_copies,
            "loads": self.loads,
            "loaded_blocks": self.loaded_blocks,
        }


@dataclass
class _Session:
    tokens: list[int] = field(default_factory=list)
    turns: int = 0


@dataclass
class _Running:
    session: int
    sent_at: float
    prompt_tokens: int
    request: Any  # vLLM's
    began: bool = False  # its first token was there


class Load:
    """The agents of one engine."""

    def __init__(self, engine: Engine, sessions: int, seed: int, warm_seconds: float) -> None:
        self.outcome = Outcome()
        self.now = 0.0
        self._engine, self._warm_seconds = engine, warm_seconds
        self._rng = random.Random(seed)
        self._common = self._tokens(COMMON_BLOCKS)
        self._sessions = [_Session(turns=TURNS) for _ in range(sessions)]
        # (when its next turn begins, session)
        self._turns = [(self._rng.random() * sessions, session) for session in range(sessions)]
        heapq.heapify(self._turns)
        self._running: dict[str, _Running] = {}
        self._names = 0
        engine.set_tier_clock(lambda: self.now)
        manager = engine._scheduler_half.manager
        count = manager.count_late_stores

        def count_late_stores(stored: int, lost: int) -> None:
            if self._counts:
                self.outcome.late_copies += stored
                self.outcome.lost_copies += lost
            count(stored, lost)

        manager.count_late_stores = count_late_stores

    @property
    def _counts(self) -> bool:
        return self.now >= self._warm_seconds

    def _tokens(self, blocks: float) -> list[int]:
        from engine_lives.engine import BLOCK_TOKENS

        return [self._rng.randrange(500) for _ in range(round(blocks * BLOCK_TOKENS))]

    def run(self, until: float) -> Outcome:
        from engine_lives.engine import _under_way

        engine = self._engine
        while self.now < until:
            while self._turns and self._turns[0][0] <= self.now:
                self._begin(heapq.heappop(self._turns)[1])
            if engine.scheduler.has_requests() or engine.scheduled or _under_way(engine._scheduler_half):
                self._step()
            else:
                self.now = self._turns[0][0]
        return self.outcome

    def _begin(self, number: int) -> None:
        from engine_lives.engine import BLOCK_TOKENS

        session = self._sessions[number]
        if session.turns == TURNS:
            self._sessions[number] = session = _Session(self._common + self._tokens(OWN_BLOCKS))
        session.tokens = session.tokens + self._tokens(TURN_BLOCKS - ANSWER_TOKENS / BLOCK_TOKENS)
        session.turns += 1
        name = f"r{self._names}"
        self._names += 1
        self._engine.submit(name, session.tokens, ANSWER_TOKENS)
        request = self._engine._requests[name]
        self._running[name] = _Running(number, self.now, len(session.tokens), request)

    def _step(self) -> None:
        from engine_lives.engine import BLOCK_TOKENS

        engine, outcome = self._engine, self.outcome
        engine.step(meanwhile=self._count_loads, steps_ahead=1)
        tokens = engine.last_step.values()
        prefilled = sum(count for count in tokens if count > 1) / BLOCK_TOKENS
        seconds = (STEP_SECONDS if tokens else IDLE_STEP_SECONDS) + prefilled * BLOCK_SECONDS
        self.now += seconds
        outcome.computed_tokens += sum(tokens) if self._counts else 0
        block_bytes = engine.block_bytes
        for direction, copier in engine.copiers.items():
            blocks = copier.advance_for(seconds, block_bytes / COPY_SECONDS) // block_bytes
            if direction.value == "store" and self._counts:
                outcome.stored_blocks += blocks
        for name, running in list(self._running.items()):
            self._look_at(name, running)

    def _count_loads(self) -> None:
        jobs = self._engine.scheduled[-1].kv_connector_metadata.load_jobs.values() if self._counts else ()
        for job in jobs:
            target: Any = job.dst_spec if hasattr(job, "dst_spec") else job.transfer_spec[1]
            self.outcome.loads += 1
            self.outcome.loaded_blocks += len(target.block_ids)

    def _look_at(self, name: str, running: _Running) -> None:
        outcome, request = self.outcome, running.request
        if not running.began and request.num_output_tokens:
            running.began = True
            if running.sent_at >= self._warm_seconds:
                outcome.first_tokens.append(self.now - running.sent_at)
                outcome.prompt_tokens += running.prompt_tokens
                outcome.cached_tokens += self._engine.figures.cached_tokens[name]
        if request.is_finished():
            del self._running[name]
            self._sessions[running.session].tokens = list(request.all_token_ids)
            heapq.heappush(self._turns, (self.now + self._rng.expovariate(1 / PAUSE_SECONDS), running.session))


def measure(
    storing: str, seed: int, *, sessions: int, device_blocks: int, cpu_rows: int, seconds: float, warm_seconds: float
) -> Outcome:
    from engine_lives.engine import BLOCK_TOKENS, Engine, Shape

    blocks_max = round(COMMON_BLOCKS + OWN_BLOCKS + TURNS * TURN_BLOCKS) + 1
    shape = Shape(
        (None,),
        device_blocks=device_blocks,
        cpu_rows=cpu_rows,
        storing=storing,
        asynchronous=True,
        tokens_max=blocks_max * BLOCK_TOKENS,
        step_tokens=STEP_BLOCKS * BLOCK_TOKENS,
        requests_max=64,
        checks_bytes=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(shape, Path(folder))
        outcome = Load(engine, sessions, seed, warm_seconds).run(warm_seconds + seconds)
        engine.drain()
        engine.require_nothing_left()
        engine.close()
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    parser = argparse.ArgumentParser(prog="engine_lives.timed_agents", description=(__doc__ or "").split(": ")[1])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--device-blocks", type=int, default=800)
    parser.add_argument("--cpu-rows", type=int, default=1364)
    parser.add_argument("--seconds", type=float, default=40.0, help="virtual, behind the warm-up")
    parser.add_argument("--warm-seconds", type=float, default=25.0, help="virtual; then both tiers are full")
    parser.add_argument("--storing", nargs="+", choices=("eager", "auto"), default=["eager", "auto"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4])
    given = parser.parse_args(arguments)
    names = ("sessions", "device_blocks", "cpu_rows", "seconds", "warm_seconds")
    load: Mapping[str, Any] = {name: getattr(given, name) for name in names}
    report: dict[str, float] = dict(load)
    for seed in given.seeds:
        for storing in given.storing:
            figures = measure(storing, seed, **load).figures()
            print(f"{storing}, seed {seed}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
            report |= {f"{storing}_seed_{seed}_{name}": value for name, value in figures.items()}
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
