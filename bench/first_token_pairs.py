"""First token by Spillway's scheduler half against vLLM's own tiering with Spillway's tiers, in turns.

    python bench/first_token_pairs.py [--vllm 0.32] [--sources cpu nvme redis] [--rounds 40] [--stamps]

Both engines of a source are kept, and each of a few prompts is asked of both, one right after the other; which is
first changes with every two rounds. The processes of the engine that is not asked are stopped meanwhile: for a second
after a step vLLM's worker spins on its queue (`SpinCondition`), which takes a core from the threads of the other
engine's forward pass, and these wait for each other some thousand times. The device holds one prompt. The CPU tier
holds all of them (`cpu`), or one and a half (`nvme`, `redis`: a request may take three quarters of it), so each request
loads its whole prompt. A disturbance of the machine affects both requests of a pair; the ratio is the median over
pairs, with its 95 % interval. Every answer has to be a full hit with the token of the device hit.

The forward pass of the prompt's end is vLLM's and the same on both sides, and most of the time on a CPU. Processes
stamp it (first_token_stamps.py), and a second ratio is that of the time without it. --stamps prints all stamps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench_report import write_report
from first_token import (
    BLOCK_TOKENS,
    TAIL_TOKENS,
    Engines,
    ask,
    full_hit,
    make_prompt,
    port_of,
    settings_for,
    stored_counter,
    wait_stored,
)
from first_token_stamps import Trace, render, stamping, stamps_of
from paired_rounds import interval_text, ordered, paired_ratio
from stock_engines import stock_stack

from spillway_stack.local_stack import LocalStack
from spillway_stack.processes import descendants

ARMS = {"connector": False, "own tiering": True}  # whether it is vLLM's
SOURCES = ("cpu", "nvme", "redis")
PROMPTS = 4
OUTPUT = Path("build/bench/first_token_pairs.json")


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    stack: LocalStack
    model: str
    processes: list[int] = field(init=False)  # of the engine

    def __post_init__(self) -> None:
        (engine,) = (each.identity for each in self.stack.status() if each.name == "engine-0")
        assert engine is not None
        object.__setattr__(self, "processes", descendants(engine.pid))

    @property
    def port(self) -> int:
        return port_of(self.stack, 0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process, number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="First token by two scheduler halves, in turns.")
    parser.add_argument("--vllm", default="0.32")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--stamps", action="store_true", help="print what the processes did")
    given = parser.parse_args(arguments)
    report: dict[str, float] = {"prompt_tokens": given.tokens, "rounds": given.rounds}
    for source in given.sources:
        traces = measure(given.vllm, source, given.tokens, given.rounds)
        for what, measured in MEASURED.items():
            seconds = {arm: [measured(trace) for trace in of_arm] for arm, of_arm in traces.items()}
            ours, stock = seconds.values()
            ratio = paired_ratio(ours, stock, random.Random(0))
            key = f"{source}_{what.replace(' ', '_')}_connector_over_own_tiering_ratio"
            report |= ratio.figures(key, 3)
            for arm, values in seconds.items():
                report[f"{source}_{what}_{arm}_seconds".replace(" ", "_")] = round(statistics.median(values), 4)
                spread = f"{statistics.median(values):.4f} s ({min(values):.4f} to {max(values):.4f})"
                print(f"{source}, {what}, {arm}: {spread}")
            print(f"{source}, {what}: {interval_text(report, key)}", flush=True)
        if given.stamps:
            for arm, of_arm in traces.items():
                print(f"{source}, {arm}\n{render(of_arm)}", flush=True)
    write_report(report, OUTPUT)
    return 0


def first_token_seconds(trace: Trace) -> float:
    return trace.first_token_ms / 1e3


def without_forward_seconds(trace: Trace) -> float:
    forward = [stamp.ended - stamp.begun for stamp in trace.stamps if stamp.name == "forward"]
    assert forward, "the worker stamped no forward pass"
    return first_token_seconds(trace) - sum(forward)


MEASURED = {"first token": first_token_seconds, "without forward": without_forward_seconds}


def measure(vllm: str, source: str, tokens: int, rounds: int) -> dict[str, list[Trace]]:
    """The requests of each arm, in the order of the rounds."""
    blocks = tokens // BLOCK_TOKENS
    prompts = [make_prompt(f"pairs {source} {number}", tokens + TAIL_TOKENS) for number in range(PROMPTS)]
    tier = "nvme" if source == "cpu" else source
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as name, ExitStack() as opened:
        file = opened.enter_context(stamping(Path(name) / "stamps"))
        arms = []
        for arm, stock in ARMS.items():
            folder = Path(name) / arm.replace(" ", "-")
            folder.mkdir()
            settings = settings_for(Engines(vllm, stock), tier, blocks, PROMPTS, folder)
            settings = replace(settings, engines=1)
            if source != "cpu":
                settings = replace(settings, num_cpu_blocks=blocks * 3 // 2)
            if stock:
                started = stock_stack(settings, folder, tier)
                arms.append(Arm(arm, opened.enter_context(started.stack), started.model))
            else:
                stack = opened.enter_context(LocalStack(settings, folder))
                arms.append(Arm(arm, stack, stack.model.served_name))
            for number, prompt in enumerate(prompts):
                ask(arms[-1].port, arms[-1].model, prompt, 1)
                if source != "cpu":
                    wait_stored(stored_counter(tier, arms[-1].stack), blocks * (number + 1))
        by_name = {arm.name: arm for arm in arms}
        known: dict[tuple[str, int], tuple[int, ...]] = {}
        traces: dict[str, list[Trace]] = {arm: [] for arm in ARMS}
        for number in range(-PROMPTS, rounds):  # the first ones learn the answers
            place = number % PROMPTS
            for arm_name in ordered(list(ARMS), max(number, 0)):
                arm, begun = by_name[arm_name], file.stat().st_size
                (other,) = (each for each in arms if each is not arm)
                with other.stopped():
                    sent_at = time.monotonic()
                    answer = ask(arm.port, arm.model, prompts[place], 1)
                    if number < 0:
                        known[arm_name, place] = ask(arm.port, arm.model, prompts[place], 1).tokens
                full_hit(f"{source}, {arm_name}", answer, tokens, known[arm_name, place])
                if number >= 0:
                    stamps = stamps_of(file, begun)
                    traces[arm_name].append(Trace(sent_at, answer.first_token_seconds * 1e3, stamps, {}))
        return traces


if __name__ == "__main__":
    sys.exit(main())
