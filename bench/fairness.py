"""An interactive user beside a flood of calls: of another tenant, and of another program of the same one. Virtual time.

    python bench/fairness.py [--seconds 300] [--places 2 4 8 16 1024] [--step-tokens 8192]
                             [--output build/bench/fairness.json]

The gateway's own admission orders the requests in front of one simulated engine (services/simulator, the preset of one
H200 with Qwen3-14B). The user asks 2,000 tokens, reads the answer of 64 and asks again a second later. The flood is 50
programs in a closed loop, 1,000 to 7,000 tokens and 64 to 448 of answer each; no prompt is asked twice. --places:
requests that the gateway sends to the engine at a time (admission.requestsPerEngineMax); --step-tokens: that the engine
computes in one step (vLLM's --max-num-batched-tokens). Nothing here measures a device.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

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
    now: float = 0.0
    sleeping: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    first: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    last: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.engine = SimulatedEngine(
            "engine-0", replace(SHAPE, max_batched_tokens=self.step_tokens), PRESETS["h200-qwen3-14b-nvme"]
        )
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
        self.engine.submit(EngineRequest(name, prompt, array("I", range(answer))), self.now)
        await first
        seconds = self.now - began
        await last
        self.queue.leave(tenant, session)
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


async def first_tokens(places: int, step_tokens: int, flood: tuple[str, int] | None, seconds: float) -> list[float]:
    """Seconds to each first token of the user, who is session 0 of tenant a. flood: its tenant and its session."""
    served = Served(AdmissionConfig(requests_per_engine_max=places, normal_wait_seconds=1e6), step_tokens)
    found: list[float] = []

    async def user() -> None:
        while True:
            found.append(await served.ask("a", 0, USER_TOKENS, USER_ANSWER))
            await served.sleep(PAUSE_SECONDS)

    async def program(number: int, tenant: str, session: int) -> None:
        rng = random.Random(number)
        while True:
            await served.ask(tenant, session, rng.randint(*FLOOD_TOKENS), rng.randint(*FLOOD_ANSWER))

    tasks = [asyncio.ensure_future(user())]
    tasks += [asyncio.ensure_future(program(number, *flood)) for number in range(FLOOD if flood is not None else 0)]
    await served.run(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--places", type=int, nargs="+", default=[2, 4, 8, 16, 1024])
    parser.add_argument("--step-tokens", type=int, default=SHAPE.max_batched_tokens)
    parser.add_argument("--output", type=Path, default=Path("build/bench/fairness.json"))
    options = parser.parse_args()
    report: dict[str, float] = {}
    print(f"{'places':>8} {'flood of':>16} {'requests':>8} {'p50 s':>8} {'p90 s':>8} {'p90 to alone':>12}")
    for places in options.places:
        alone = 0.0
        for name, flood in (("no flood", None), ("another tenant", ("b", 1)), ("another program", ("a", 1))):
            found = asyncio.run(first_tokens(places, options.step_tokens, flood, options.seconds))
            alone = alone or p90(found)
            shown = f"{statistics.median(found):8.3f} {p90(found):8.3f} {p90(found) / alone:12.2f}"
            print(f"{places:8} {name:>16} {len(found):8} {shown}")
            key = f"{places}_places_{name.replace(' ', '_')}_first_token"
            report |= {f"{key}_p50_seconds": statistics.median(found), f"{key}_p90_seconds": p90(found)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
