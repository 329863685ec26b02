"""Cost of offload without cache hits: throughput of unseen prompts.

    python bench/no_hit.py [--seconds 360] [--prompts 8] [--concurrency 4] [--tokens 512]

Four engines run at once: without offload, with the CPU tier, and with NVMe or Redis below it, all with
default settings. `--configurations off vllm` compares vLLM's server by itself, without connector and middleware, with
an engine whose offload is off: they should not differ. Only one engine is asked at a time; the others idle. Each round
asks every engine `--prompts` new prompts by `--concurrency` clients and then waits until its tiers have written
everything, so that no engine pays for the pending work of another. The order of engines changes from round to round.
Throughputs are compared within a round, so that disturbances of the machine cancel out; figures are medians over
rounds, with a 95 % bootstrap interval of the ratio. Rounds are short and repeat until `--seconds` are over. The
second figure is the engine's CPU time per prompt, background writing included, which is less sensitive to other work
on the machine.

Goal: a ratio of at least 0.98. `kept` when the whole interval is there, `missed` when none of it is (exit status
1), else `undecided`. Prints a table, writes build/bench/no_hit.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench_report import BenchError, run, write_report
from first_token import BLOCK_TOKENS, TAIL_TOKENS, ask, free_port, make_prompt, processor, stored_counter
from metrics_page import reading, total
from paired_rounds import GOAL_RATIO, ROUNDS_LEAST, interval_text, ordered, paired_ratio, promise_of
from stock_engines import stock_stack

from spillway_stack.bundled_model import choose_model
from spillway_stack.local_stack import LocalStack
from spillway_stack.processes import PROC, descendants
from spillway_stack.settings import StackSettings

CONFIGURATIONS = ("off", "cpu", "nvme", "redis")
VLLM_ALONE = "vllm"
SHARED_TIERS = ("nvme", "redis")
SETTLE_SECONDS = 30.0
SETTLE_POLL_SECONDS = 0.2
QUIET_POLLS = 3  # unchanged readings in a row that mean that no writes are pending
OUTPUT = Path("build/bench/no_hit.json")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. model: the served name."""

    stack: LocalStack
    model: str


@dataclass
class Rounds:
    """One entry per round."""

    prompts_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_prompt: list[float] = field(default_factory=list)
    written_bytes: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    blocks = given.tokens // BLOCK_TOKENS
    rounds = {name: Rounds() for name in given.configurations}
    with ExitStack() as stacks:
        running: dict[str, Engine] = {}
        stored: dict[str, Callable[[], int]] = {}
        for name in given.configurations:
            folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix=f"spillway-no-hit-{name}-")))
            running[name] = engine_for(name, blocks, given.concurrency, folder)
            stack = stacks.enter_context(running[name].stack)
            stored[name] = stored_counter(name, stack) if name in SHARED_TIERS else lambda: 0
            print(f"{name}: the engine is up", flush=True)
        numbers = itertools.count()
        tokens = blocks * BLOCK_TOKENS + TAIL_TOKENS
        for name in given.configurations:  # warm-up
            run_round(running[name], stored[name], numbers, tokens, given)
        deadline = time.monotonic() + given.seconds
        for number in itertools.count():
            if number >= ROUNDS_LEAST and time.monotonic() > deadline:
                break
            for name in ordered(given.configurations, number):
                measured = run_round(running[name], stored[name], numbers, tokens, given)
                for kept, value in zip(_lists(rounds[name]), measured, strict=True):
                    kept.append(value)
            speeds = ", ".join(f"{name} {rounds[name].prompts_per_second[-1]:.3f}" for name in rounds)
            print(f"round {number + 1}: {speeds} prompts/s", flush=True)
    report = make_report(rounds, given.tokens, given.concurrency, random.Random(0))
    write_report(report, OUTPUT)
    print(f"\n{render(report, list(rounds))}\n\n{OUTPUT}")
    return 1 if any(value == "missed" for key, value in report.items() if key.endswith("_promise")) else 0


def engine_for(name: str, blocks: int, concurrency: int, folder: Path) -> Engine:
    """Device memory for the running requests and little more, so that blocks are evicted as under load."""
    settings = StackSettings(
        port=free_port(),
        engines=1,
        shared_tier=name if name in SHARED_TIERS else "none",
        offload=name not in ("off", VLLM_ALONE),
        num_cpu_blocks=8 * blocks,
        device_blocks=(blocks + 2) * (concurrency + 2),
        max_length=(blocks + 2) * BLOCK_TOKENS,
        gateway=False,
    )
    if name == VLLM_ALONE:
        alone = stock_stack(settings, folder, None)
        return Engine(alone.stack, alone.model)
    return Engine(LocalStack(settings, folder), choose_model(settings.model, lambda line: None).served_name)


def run_round(
    asked: Engine, stored: Callable[[], int], numbers: itertools.count[int], tokens: int, given: argparse.Namespace
) -> tuple[float, float, float]:
    """Prompts per second, processor seconds per prompt, bytes written to the shared tier."""
    prompts = [make_prompt(f"unseen {next(numbers)}", tokens) for _ in range(given.prompts)]
    stack, model = asked.stack, asked.model
    engine, port = stack.engines[0], stack.settings.engine_port(0)
    parent = stack.status()[[status.name for status in stack.status()].index(engine.name)].identity
    if parent is None:
        raise BenchError(f"{engine.name} is not running; see {stack.folder.logs}")
    written = written_bytes(engine.url)
    cpu = cpu_seconds(parent.pid)
    begun = time.perf_counter()
    with ThreadPoolExecutor(given.concurrency) as clients:
        answers = list(clients.map(lambda prompt: ask(port, model, prompt), prompts))
    seconds = time.perf_counter() - begun
    if any(answer.cached_tokens for answer in answers):
        raise BenchError("an unseen prompt was found in a cache")
    # Read from outside: an engine's counters do not advance while it idles.
    settle(lambda: (stored(), written_bytes(engine.url)))
    return len(prompts) / seconds, (cpu_seconds(parent.pid) - cpu) / len(prompts), written_bytes(engine.url) - written


def settle(state: Callable[[], object]) -> None:
    """Wait until the readings are stable. Raises BenchError at the deadline."""
    deadline = time.monotonic() + SETTLE_SECONDS
    before, quiet = state(), 0
    while quiet < QUIET_POLLS:
        if time.monotonic() > deadline:
            raise BenchError(f"the tiers were still writing after {SETTLE_SECONDS:g} s")
        time.sleep(SETTLE_POLL_SECONDS)
        now = state()
        quiet = quiet + 1 if now == before else 0
        before = now


def written_bytes(url: str) -> float:
    return total(reading(url), "spillway_tier_written_bytes_total")


def cpu_seconds(parent: int) -> float:
    """User and system time of a process and its descendants."""
    ticks = 0
    for pid in descendants(parent):
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def make_report(
    rounds: dict[str, Rounds], tokens: int, concurrency: int, chance: random.Random
) -> dict[str, float | int | str]:
    report: dict[str, float | int | str] = {
        "processor": processor(),
        "processors_count": os.cpu_count() or 0,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "prompt_tokens": tokens,
        "concurrency_count": concurrency,
        "rounds_count": len(next(iter(rounds.values())).prompts_per_second),
    }
    for name, measured in rounds.items():
        report[f"{name}_prompts_per_second"] = round(statistics.median(measured.prompts_per_second), 4)
        report[f"{name}_cpu_seconds_per_prompt"] = round(statistics.median(measured.cpu_seconds_per_prompt), 4)
        report[f"{name}_written_to_shared_tier_bytes"] = int(sum(measured.written_bytes))
        if name == "off" or "off" not in rounds:
            continue
        base = rounds["off"]
        for figure, values, reference in (
            ("throughput", measured.prompts_per_second, base.prompts_per_second),
            ("cpu_seconds", measured.cpu_seconds_per_prompt, base.cpu_seconds_per_prompt),
        ):
            ratio = paired_ratio(values, reference, chance)
            report |= ratio.figures(f"{name}_{figure}_ratio")
            if figure == "throughput":
                report[f"{name}_promise"] = promise_of(ratio)
    return report


def render(report: dict[str, float | int | str], names: Sequence[str]) -> str:
    lines = [
        f"prompts of {report['prompt_tokens']} unseen tokens, {report['concurrency_count']} at once, medians of "
        f"{report['rounds_count']} rounds, {report['processor']}",
        "",
        f"{'offload':8}{'prompts/s':>11}{'ratio to off (95 %)':>28}{'CPU s/prompt':>14}{'ratio to off (95 %)':>28}"
        f"{'written':>11}  at least {GOAL_RATIO:g}",
    ]
    for name in names:
        cells = [interval_text(report, f"{name}_{figure}_ratio") for figure in ("throughput", "cpu_seconds")]
        lines.append(
            f"{name:8}{float(report[f'{name}_prompts_per_second']):>11.3f}{cells[0]:>28}"
            f"{float(report[f'{name}_cpu_seconds_per_prompt']):>14.3f}{cells[1]:>28}"
            f"{float(report[f'{name}_written_to_shared_tier_bytes']) / 1e6:>8.0f} MB"
            f"  {report.get(f'{name}_promise', '')}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _lists(rounds: Rounds) -> tuple[list[float], list[float], list[float]]:
    return rounds.prompts_per_second, rounds.cpu_seconds_per_prompt, rounds.written_bytes


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of unseen prompts, with and without offload.")
    parser.add_argument("--seconds", type=float, default=360.0, help="of measuring, without starting (default 360)")
    parser.add_argument("--prompts", type=int, default=8, help="per engine and round (default 8)")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt, in whole blocks (default 512)")
    parser.add_argument(
        "--configurations", nargs="+", choices=(*CONFIGURATIONS, VLLM_ALONE), default=list(CONFIGURATIONS)
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
