"""An interactive user beside a flood of calls: of another tenant, and of another program of the same one. Virtual time.

    python bench/fairness.py [--seconds 300] [--places 2 4 8 16 1024] [--step-tokens 8192] [--fair-steps off on]
                             [--output build/bench/fairness.json]

The gateway's own admission orders the requests in front of one simulated engine (services/simulator, the preset of one
H200 with Qwen3-14B). The user asks 2,000 tokens, reads the answer of 64 and asks again a second later. The flood is 50
programs in a closed loop, 1,000 to 7,000 tokens and 64 to 448 of answer each; no prompt is asked twice. Each case also
counts the answers of the flood; "flood alone" is without the user, "50 users alone" has a session for each program.
--places: requests that the gateway sends to the
engine at a time (admission.requestsPerEngineMax); --step-tokens: that the engine computes in one step (vLLM's
--max-num-batched-tokens); --fair-steps: on: the connector's own rule says whose prompts a step computes
(offload.fairSteps). Nothing here measures a device.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench_report import write_report
from system.fair_engine import FairEngine

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.config.settings import AdmissionConfig
from spillway_simulator.model.engine import EngineShape, SimulatedEngine
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.request import EngineRequest

FLOOD = 50
USER_TOKENS, USER_ANSWER, PAUSE_SECONDS = 2_000, 64, 1.0
FLOOD_TOKENS, FLOOD_ANSWER = (1_000, 7_000), (64, 448)
SHAPE = EngineShape(
    block_tokens=128,
    device_blocks=4_800,
    cpu_blocks=0,
    max_running=256,
    max_batched_tokens=8_192,
    max_model_tokens=32_768,
    announce_shared=False,
)
_TURNS_OF_THE_LOOP = 8  # until every task that may go on waits again


@dataclass
class Served:
    """One engine behind the gateway's queue, on a clock of its own."""

    admission: AdmissionConfig
    step_tokens: int
    fair_steps: bool
    now: float = 0.0
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # that have ended, by tenant and session
    sleeping: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    first: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    last: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        engine = FairEngine if self.fair_steps else SimulatedEngine
        shape = replace(SHAPE, max_batched_tokens=self.step_tokens)
        self.engine = engine("engine-0", shape, PRESETS["h200-qwen3-14b-nvme"])
        places = self.admission.requests_per_engine_max
        self.queue = Admission(self.admission, lambda: places, clock=lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self.sleeping, (self.now + seconds, next(self.numbers), future))
        await future

    async def ask(self, tenant: str, session: int, tokens: int, answer: int) -> float:
        """Seconds to the first token; returns when the answer has ended."""
        began, number = self.now, next(self.numbers)
        await self.queue.enter(tenant, Priority.NORMAL, session=session)
        self.queue.turns.charge(tenant, session, tokens)
        name, loop = str(number), asyncio.get_running_loop()
        first, last = self.first[name], self.last[name] = loop.create_future(), loop.create_future()
        prompt = array("I", range(number * 10_000, number * 10_000 + tokens))
        salt = f"{tenant}/{session}"
        self.engine.submit(EngineRequest(name, prompt, array("I", range(answer)), salt), self.now)
        await first
        seconds = self.now - began
        await last
        self.queue.leave(tenant, session)
        self.answers[tenant, session] += 1
        return seconds

    async def run(self, seconds: float) -> None:
        while True:
            for _ in range(_TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            times = [
                at for at in (self.sleeping[0][0] if self.sleeping else None, self.engine.next_time) if at is not None
            ]
            self.now = min(times)
            if self.now > seconds:
                return
            while self.sleeping and self.sleeping[0][0] <= self.now:
                heapq.heappop(self.sleeping)[2].set_result(None)
            for progress in self.engine.advance(self.now):
                if progress.first:
                    self.first.pop(progress.request_id).set_result(None)
                if progress.finished:
                    self.last.pop(progress.request_id).set_result(None)


async def served(
    places: int,
    step_tokens: int,
    flood: tuple[str, int | None] | None,
    seconds: float,
    *,
    fair_steps: bool,
    with_user: bool,
) -> tuple[list[float], float]:
    """Seconds to each first token of the user, who is session 0 of tenant a, and answers of the flood per second.
    flood: its tenant and its session; None: each of its programs is a session."""
    admission = AdmissionConfig(requests_per_engine_max=places, normal_wait_seconds=1e6)
    engine = Served(admission, step_tokens, fair_steps)
    found: list[float] = []

    async def user() -> None:
        while True:
            found.append(await engine.ask("a", 0, USER_TOKENS, USER_ANSWER))
            await engine.sleep(PAUSE_SECONDS)

    async def program(number: int, tenant: str, session: int | None) -> None:
        rng = random.Random(number)
        while True:
            await engine.ask(
                tenant, number if session is None else session, rng.randint(*FLOOD_TOKENS), rng.randint(*FLOOD_ANSWER)
            )

    tasks = [asyncio.ensure_future(user())] if with_user else []
    tasks += [asyncio.ensure_future(program(number, *flood)) for number in range(FLOOD if flood is not None else 0)]
    await engine.run(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    answers = sum(count for whose, count in engine.answers.items() if whose != ("a", 0))
    return found, answers / seconds


def p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--places", type=int, nargs="+", default=[2, 4, 8, 16, 1024])
    parser.add_argument("--step-tokens", type=int, default=SHAPE.max_batched_tokens)
    parser.add_argument("--fair-steps", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--output", type=Path, default=Path("build/bench/fairness.json"))
    options = parser.parse_args()
    report: dict[str, float] = {}
    cases: tuple[tuple[str, tuple[str, int | None] | None, bool], ...] = (
        ("no flood", None, True),
        ("another tenant", ("b", 1), True),
        ("another program", ("a", 1), True),
        ("flood alone", ("b", 1), False),
        ("50 users alone", ("b", None), False),
    )
    print(
        f"{'places':>8} {'fair':>5} {'flood of':>16} {'requests':>8} {'p50 s':>8} {'p90 s':>8} {'to alone':>9} flood/s"
    )
    for places, fair in itertools.product(options.places, options.fair_steps):
        alone = 0.0
        for name, flood, with_user in cases:
            found, answers = asyncio.run(
                served(
                    places, options.step_tokens, flood, options.seconds, fair_steps=fair == "on", with_user=with_user
                )
            )
            case = f"{places}_places_fair_steps_{fair}_{name.replace(' ', '_')}"
            report[f"{case}_flood_answers_per_second"] = answers
            shown = ""
            if with_user:
                alone = alone or p90(found)
                shown = f"{statistics.median(found):8.3f} {p90(found):8.3f} {p90(found) / alone:9.2f}"
                report[f"{case}_first_token_p50_seconds"] = statistics.median(found)
                report[f"{case}_first_token_p90_seconds"] = p90(found)
            print(f"{places:8} {fair:>5} {name:>16} {len(found):8} {shown:26} {answers:7.2f}", flush=True)
    write_report(report, options.output)


if __name__ == "__main__":
    main()
