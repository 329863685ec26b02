"""An interactive user beside a flood of calls on one CUDA device, with fair_steps off and on.

    python bench/gpu_fair_steps.py [--rounds 2] [--seconds 20] [--flood 50] [--cases CASE ...] [--eager] [--small]
                                   [--engines ENGINE ...] [--vary CONSTANTS ...] [--output FILE]

Engines of a Qwen3-14B-shaped model with dummy weights, bfloat16, share the memory of one device and take turns, so
that one of them computes while the others idle. The load is that of bench/fairness.py, on a real engine: the user asks
2,000 tokens, reads an answer of 64 and asks again a second later; the flood is --flood programs in a closed loop, 1,000
to 7,000 tokens and 64 to 448 of answer each. No prompt is asked twice. The cases of a round:

    no flood          the user alone
    another tenant    the flood has a cache salt of its own
    another session   the flood has the user's salt and another session
    flood alone       without the user

--engines: `off`, `on`, or either with `_sync` behind it: without vLLM's asynchronous scheduling, in which the next step
is planned while one is under way. --vary: each case is measured once for each word, with these constants of
plan/step_shares.py in the engine: `STEP_TIMES=1.1,LEAST_TOKENS=32`, or `-` for the rule as it is. The report has the
parts of the user's first token: until the engine has the request, until a step with it is planned, until the steps
that were under way are done, its own step, until the user has the token.

The flood runs for --settle seconds before what begins counts. First tokens are medians and 90th percentiles over
all rounds; the goal is 1.2 times alone at the 90th percentile. Prints a table and writes it; logs and the stamps of
each case (step_stamps.py) are in a folder beside the output.
--small: a tiny model on any platform, to check that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gpu
from engine_turns import answer_rounds, engines_in_turn
from fairness import FLOOD_ANSWER, FLOOD_TOKENS, PAUSE_SECONDS, USER_ANSWER, USER_TOKENS, p90
from paired_rounds import ordered

from spillway_connector.plan import step_shares
from spillway_settings.wire import SESSION_ID, SESSION_MEMBER

ENGINES = ("off", "on", "off_sync", "on_sync")
AS_IT_IS = "-"
GOAL_TIMES_ALONE = 1.2
MEMORY_SHARE = 0.46  # of the device for each engine: 29.5 GB of weights and 29.4 of KV blocks
DEVICE_BLOCKS = 1_400
OUTPUT = Path("build/bench/gpu_fair_steps.json")


class Party(NamedTuple):
    """A party that asks: a tenant, by its cache salt, and its session."""

    tenant: str
    session: str


USER = Party("a", "user")
CASES: dict[str, tuple[Party | None, bool]] = {  # whose flood; whether the user asks beside it
    "no_flood": (None, True),
    "another_tenant": (Party("b", "program"), True),
    "another_session": (Party("a", "program"), True),
    "flood_alone": (Party("b", "program"), False),
}


@dataclass
class Seen:
    """The figures of a case in one round."""

    first_token_seconds: list[float] = field(default_factory=list)  # the user's
    flood_answers: int = 0
    parts: dict[str, float] = field(default_factory=dict)  # of the user's first tokens, milliseconds


class Served:
    """vLLM's asynchronous engine and the load."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        import step_stamps  # noqa: PLC0415 - the process that starts the engines needs no vLLM

        self._stamps = step_stamps
        fair_steps, _, sync = given.serve.partition("_")
        self._folder = folder_of(given)
        model = gpu.SMALL_MODEL if given.small else gpu.MODEL
        self._vocabulary, self._times = int(model["vocab_size"]), 0.02 if given.small else 1.0
        transfer = gpu.transfer_config("spillway-cpu", self._folder)
        assert transfer is not None
        transfer["kv_connector_extra_config"]["fair_steps"] = fair_steps
        others: dict[str, Any] = {"max_num_seqs": 256, "enforce_eager": given.eager or given.small}
        others["async_scheduling"] = not sync
        others["scheduler_cls"] = "step_stamps.Stamped" if sync else "step_stamps.StampedAsync"
        if given.small:
            transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 64 << 20
            others |= {"dtype": "float32", "max_model_len": 4096, "num_gpu_blocks_override": 200}
            others |= {"max_num_batched_tokens": 4096}
        else:
            others |= {"gpu_memory_utilization": MEMORY_SHARE, "num_gpu_blocks_override": DEVICE_BLOCKS}
        self._settings = gpu.engine_settings(self._folder, model, transfer) | others
        self._numbers = itertools.count()

    def start(self) -> None:
        """Called on the event loop that the engine's tasks shall run on."""
        from vllm import SamplingParams  # noqa: PLC0415 - the process that starts the engines needs none
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        self._sampling = SamplingParams
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings))

    async def ask(
        self,
        party: Party,
        tokens: int,
        answer: int,
        asked: dict[str, tuple[float, float]] | None = None,
        orders: str = "",
    ) -> float:
        """Seconds to the first token; returns when the answer has ended. asked: gets the times, by the name.
        orders: to step_stamps.py."""
        name = f"{orders or self._given.serve} {next(self._numbers)}"
        tokens = max(1, int(tokens * self._times))
        prompt = [token % self._vocabulary for token in gpu.make_prompt(name, tokens)]
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=max(1, int(answer * self._times)),
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {SESSION_MEMBER: {SESSION_ID: party.session}}},
        )
        began, first = time.monotonic(), 0.0
        given = {"prompt_token_ids": prompt, "cache_salt": party.tenant}
        async for _ in self._engine.generate(given, sampling, name):
            first = first or time.monotonic()
        if asked is not None:
            asked[name] = began, first
        return first - began

    async def case(self, line: str) -> Seen:
        """line: a case and constants."""
        name, constants = line.split()
        flood, with_user = CASES[name]
        seen, counts, asked = Seen(), False, dict[str, tuple[float, float]]()
        stamps = self._folder / f"{self._given.serve}_{name}_{constants}.csv"
        orders = "" if constants == AS_IT_IS else constants.replace(",", " ")
        await self.ask(USER, 1, 1, orders=f"{self._stamps.MARK}LATELY_SECONDS=0")  # forgets the parties of other cases
        lately = f"LATELY_SECONDS={step_shares.LATELY_SECONDS}"
        await self.ask(USER, 1, 1, orders=f"{self._stamps.MARK}{lately} {orders} file={stamps}")

        async def user() -> None:
            while True:
                began_while_counting = counts  # else it met the flood's beginning
                found: dict[str, tuple[float, float]] = {}
                first = await self.ask(USER, USER_TOKENS, USER_ANSWER, found)
                if counts and began_while_counting:
                    seen.first_token_seconds.append(first)
                    asked.update(found)
                await asyncio.sleep(PAUSE_SECONDS * self._times)

        async def program(party: Party, number: int) -> None:
            chance = random.Random(f"{name} {number}")
            while True:
                await self.ask(party, chance.randint(*FLOOD_TOKENS), chance.randint(*FLOOD_ANSWER))
                seen.flood_answers += counts

        tasks = [asyncio.create_task(program(flood, number)) for number in range(self._given.flood)] if flood else []
        tasks += [asyncio.create_task(user())] if with_user else []
        await asyncio.sleep(self._given.settle if flood else 0.0)
        counts = True
        await asyncio.sleep(self._given.seconds)
        counts = False
        failed = [task for task in tasks if task.done()]  # none ends by itself
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()
        await asyncio.sleep(1.0)  # until the engine has dropped what was cancelled
        defaults = " ".join(f"{each}={getattr(step_shares, each)}" for each in _constants(constants))
        await self.ask(USER, 1, 1, orders=f"{self._stamps.MARK}{defaults} file=")
        seen.parts = self._stamps.medians(self._stamps.read(stamps), asked)
        return seen


def _constants(words: str) -> list[str]:
    return [] if words == AS_IT_IS else [each.partition("=")[0] for each in words.split(",")]


def folder_of(given: argparse.Namespace) -> Path:
    return Path(given.output).with_suffix("").absolute()


def serve(given: argparse.Namespace) -> None:
    """Runs in a separate process: one case for each line of the input."""
    os.environ.update(gpu.ENVIRONMENT, **({"VLLM_CPU_KVCACHE_SPACE": "1"} if given.small else {}))
    served = Served(given)
    with asyncio.Runner() as runner:

        async def start() -> None:
            served.start()
            await asyncio.gather(*(served.ask(USER, tokens, 8) for tokens in (200, 2_000, 7_000)))

        runner.run(start())
        answer_rounds(lambda line: json.dumps(vars(runner.run(served.case(line)))))


def measure(given: argparse.Namespace, own_arguments: Sequence[str]) -> dict[str, dict[str, list[Seen]]]:
    """Return the figures of all rounds, by engine and by case with its constants. A case that the constants do not
    affect is measured with the first ones alone."""
    rounds: dict[str, dict[str, list[Seen]]] = {engine: {} for engine in given.engines}
    commands = {engine: [__file__, *own_arguments, "--serve", engine] for engine in given.engines}
    with engines_in_turn(commands, folder_of(given)) as engines:
        for number in range(given.rounds):
            for case, constants in itertools.product(given.cases, given.vary):
                for engine in ordered(given.engines, number):
                    alone = CASES[case][0] is None or engine.startswith("off")
                    if alone and constants != given.vary[0]:
                        continue
                    seen = Seen(**json.loads(engines[engine].round(f"{case} {constants}")))
                    rounds[engine].setdefault(f"{case} {constants}", []).append(seen)
                    first = f"first token {statistics.median(seen.first_token_seconds or [0]):.3f} s"
                    print(
                        f"{number + 1}: {case} {constants}, {engine}: {first}, {seen.flood_answers} answers of the "
                        f"flood; {seen.parts}",
                        flush=True,
                    )
    return rounds


def make_report(
    rounds: dict[str, dict[str, list[Seen]]], given: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    report: dict[str, dict[str, dict[str, float]]] = {engine: {} for engine in rounds}
    for engine, cases in rounds.items():
        alone = 0.0
        for case, seen in cases.items():
            found = [seconds for one in seen for seconds in one.first_token_seconds]
            figures = {"flood_answers_per_second": sum(one.flood_answers for one in seen) / given.seconds / len(seen)}
            if len(found) > 1:
                figures |= {"first_token_p50_seconds": statistics.median(found), "first_token_p90_seconds": p90(found)}
                figures |= {"requests_count": float(len(found))}
                alone = alone or figures["first_token_p90_seconds"]
                figures["first_token_p90_times_alone"] = figures["first_token_p90_seconds"] / alone
            for part in seen[0].parts:
                figures[part] = statistics.median(one.parts[part] for one in seen if part in one.parts)
            report[engine][case] = figures
    return report


def render(report: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        f"goal: {GOAL_TIMES_ALONE} times alone",
        f"{'case':48} {'engine':8}  requests    p50 s    p90 s  to alone  flood/s",
    ]
    for engine, cases in report.items():
        for case, figures in cases.items():
            names = ("first_token_p50_seconds", "first_token_p90_seconds", "first_token_p90_times_alone")
            cells = "".join(f"{figures[name]:9.3f}" if name in figures else " " * 9 for name in names)
            requests = int(figures.get("requests_count", 0))
            lines.append(f"{case:48} {engine:8} {requests:9}{cells} {figures['flood_answers_per_second']:8.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A user beside a flood on one CUDA device.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a case, that count (default 20)")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of a flood before that (default 4)")
    parser.add_argument("--flood", type=int, default=50, help="programs (default 50)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--eager", action="store_true", help="neither compiled nor with CUDA graphs")
    parser.add_argument("--small", action="store_true", help="a small model and load, to check that it runs")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES[:2]))
    parser.add_argument("--vary", nargs="+", default=[AS_IT_IS], help="constants of the rule, NAME=VALUE,NAME=VALUE")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    folder_of(given).mkdir(parents=True, exist_ok=True)
    if given.serve:
        serve(given)
        return 0
    report = make_report(measure(given, sys.argv[1:] if arguments is None else arguments), given)
    print(render(report))
    flat = {
        f"fair_steps_{engine}_{case.removesuffix(f' {AS_IT_IS}').replace(' ', '_')}_{figure}": round(value, 4)
        for engine, cases in report.items()
        for case, figures in cases.items()
        for figure, value in figures.items()
    }
    given.output.write_text(json.dumps(flat, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
