"""Bursts on one CUDA device: requests that share a prefix, all at once, by offload.

    python bench/gpu_burst.py [--requests 50] [--shared 10240] [--own 200] [--answer 64] [--rounds 5] [--graphs]

Engines of a Qwen3-14B-shaped model with dummy weights, bfloat16, blocks of 128 tokens, as in bench/gpu.py, share the
memory of one device and take turns, so that one of them computes while the others idle. Every request is the shared
prefix and an own end; a round has a new prefix:

    cold       the prefix is new
    device     the same prefix, other ends, three times: it lies in the device's KV cache
    one load   behind a reset of the device's prefix cache, one request alone (without a connector: one prefill)
    evicted    behind another reset, the burst again

Times are from the first submission: the 90th percentile of the requests' first tokens, and the end of the last answer.
Medians over the rounds behind a warm-up round; ratios within rounds, with a 95 % bootstrap interval. Goals: `device` at
least as fast as without offload, and the first tokens (p90) of `evicted` within 1.3 times one load. Prints a table,
writes build/bench/gpu_burst.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu
from bench_report import BenchError
from engine_turns import answer_rounds, engines_in_turn
from paired_rounds import interval_text, ordered, paired_ratio

CONFIGURATIONS = ("none", "upstream-cpu", "spillway-cpu")
DEVICE_TIMES = 3  # of each round, whose figure is their median: what the ratio is made of
MEMORY_SHARE = 0.32  # of the device for each engine: 29.5 GB of weights, 13.4 of KV blocks
FOLDER = Path("build/bench/gpu_burst").absolute()
OUTPUT = Path("build/bench/gpu_burst.json")


def burst(name: str, given: argparse.Namespace, requests: int) -> list[list[int]]:
    """Prompts; the prefix follows from the name's first word."""
    prefix = gpu.make_prompt(name.split(maxsplit=1)[0], given.shared)
    return [prefix + gpu.make_prompt(f"{name} {number}", given.own) for number in range(requests)]


def serve(configuration: str, given: argparse.Namespace) -> None:
    """Runs in a separate process: one round for each line of the input, answered with seconds by row."""
    os.environ.update(gpu.ENVIRONMENT)
    settings = {"max_num_seqs": given.requests, "enforce_eager": not given.graphs}
    engine = gpu.Engine(configuration, FOLDER, gpu_memory_utilization=MEMORY_SHARE, **settings)
    whole = given.shared // gpu.BLOCK_TOKENS * gpu.BLOCK_TOKENS

    def ask(name: str, requests: int, cached_least: int = 0) -> dict[str, float]:
        first, total, cached = engine.ask_timed(burst(name, given, requests), given.answer)
        if configuration != "none" and cached < cached_least:
            raise BenchError(f"{name}: {cached} tokens were cached, {cached_least} expected")
        engine.settle()
        last_of_90 = sorted(first)[math.ceil(0.9 * len(first)) - 1]
        return {"first_p90_s": last_of_90, "total_s": total, "cached_tokens": cached}

    def one_round(prefix: str) -> str:
        rows = {"cold": ask(f"{prefix} cold", given.requests)}
        times = [ask(f"{prefix} device {n}", given.requests, whole * given.requests) for n in range(DEVICE_TIMES)]
        rows["device"] = {figure: statistics.median(one[figure] for one in times) for figure in times[0]}
        for row, requests in (("one_load", 1), ("evicted", given.requests)):
            engine.reset_device_cache()
            rows[row] = ask(f"{prefix} {row}", requests, whole * requests)
        return json.dumps(
            {f"{row}_{figure}": value for row, figures in rows.items() for figure, value in figures.items()}
        )

    answer_rounds(one_round)


def measure(given: argparse.Namespace, own_arguments: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Seconds by row, of each round of each configuration."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in given.configurations}
    commands = {name: [__file__, *own_arguments, "--serve", name] for name in given.configurations}
    with engines_in_turn(commands, FOLDER) as engines:
        for name, engine in engines.items():
            engine.round(f"{name}-warm-up")
        for number in range(given.rounds):
            for name in ordered(given.configurations, number):
                rounds[name].append(json.loads(engines[name].round(f"{name}-{number}")))
            device = (f"{name} {rounds[name][-1]['device_total_s']:.3f}" for name in rounds)
            print(f"round {number + 1}: on the device {', '.join(device)} s", flush=True)
    return rounds


def make_report(rounds: dict[str, list[dict[str, float]]], given: argparse.Namespace) -> dict[str, float | int]:
    report: dict[str, float | int] = {
        "requests_count": given.requests,
        "shared_tokens": given.shared,
        "own_tokens": given.own,
        "answer_tokens": given.answer,
        "rounds_count": given.rounds,
        "cuda_graphs": int(given.graphs),
    }
    chance = random.Random(0)
    for configuration, measured in rounds.items():
        for row in measured[0]:
            report[f"{configuration}_{row}"] = round(statistics.median(one[row] for one in measured), 4)
        if configuration == "none" or "none" not in rounds:
            continue
        speeds = ([1 / one["device_total_s"] for one in rounds[name]] for name in (configuration, "none"))
        ratio = paired_ratio(*speeds, chance)
        report |= ratio.figures(f"{configuration}_device_speed_ratio")
    return report


def render(report: dict[str, float | int], configurations: Sequence[str]) -> str:
    rows = [("first token, p90, s", "first_p90_s"), ("last answer, s", "total_s")]
    cells = ("cold", "device", "one_load", "evicted")
    lines = ["| | | cold | device | one load | evicted |", "| --- | --- | --- | --- | --- | --- |"]
    for configuration in configurations:
        for label, unit in rows:
            values = " | ".join(str(report[f"{configuration}_{cell}_{unit}"]) for cell in cells)
            lines.append(f"| {configuration} | {label} | {values} |")
    for configuration in configurations:
        first, one = (report[f"{configuration}_{row}_first_p90_s"] for row in ("evicted", "one_load"))
        line = f"{configuration}: first tokens of the evicted burst {first / one:.2f} times one load"
        if (ratio := f"{configuration}_device_speed_ratio") in report:
            line += f"; on the device {interval_text(report, ratio)} times the speed of no connector"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bursts with a shared prefix on one CUDA device, by offload.")
    parser.add_argument("--requests", type=int, default=50, help="of a burst (default 50)")
    parser.add_argument("--shared", type=int, default=10_240, help="tokens that the prompts share (default 10240)")
    parser.add_argument("--own", type=int, default=200, help="tokens of each prompt's own end (default 200)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=CONFIGURATIONS)
    parser.add_argument("--serve", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.serve:
        serve(given.serve, given)
        return 0
    rounds = measure(given, sys.argv[1:] if arguments is None else arguments)
    report = make_report(rounds, given)
    print(render(report, given.configurations))
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
