"""Bursts on one CUDA device: requests that share a prefix, all at once, by offload.

    python bench/gpu_burst.py [--requests 50] [--shared 10240] [--own 200] [--answer 64] [--rounds 5] [--graphs]

A Qwen3-14B-shaped model with dummy weights, bfloat16, blocks of 128 tokens, vLLM's engine as in bench/gpu.py. Every
request is the shared prefix and an own end. Each configuration runs in a process of its own; a round has a new prefix:

    cold       nobody has seen the prefix
    device     the same prefix, other ends: it lies in the device's KV cache
    one load   behind a reset of the device's prefix cache, one request alone (without a connector: one prefill)
    evicted    behind another reset, the burst again

Times are from the first submission: the 90th percentile of the requests' first tokens, and the end of the last answer.
Medians over the rounds behind a warm-up round. Goals: `device` at least as fast as without offload, and the first
tokens (p90) of `evicted` within 1.3 times one load. Prints a table, writes build/bench/gpu_burst.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu

CONFIGURATIONS = ("none", "upstream-cpu", "spillway-cpu")
FOLDER = Path("build/bench/gpu_burst").absolute()
OUTPUT = Path("build/bench/gpu_burst.json")


def burst(name: str, given: argparse.Namespace, requests: int) -> list[list[int]]:
    """Prompts; the prefix follows from the name's first word."""
    prefix = gpu.make_prompt(name.split(maxsplit=1)[0], given.shared)
    return [prefix + gpu.make_prompt(f"{name} {number}", given.own) for number in range(requests)]


def measure(configuration: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, the first one a warm-up."""
    os.environ.update(gpu.ENVIRONMENT)
    engine = gpu.Engine(configuration, FOLDER, max_num_seqs=given.requests, enforce_eager=not given.graphs)
    figures: dict[str, list[float]] = defaultdict(list)

    def ask(row: str, prompts: Sequence[list[int]], cached_least: int = 0) -> None:
        first, total, cached = engine.ask_timed(prompts, given.answer)
        if configuration != "none" and cached < cached_least:
            raise gpu.BenchError(f"{row}: {cached} tokens were cached, {cached_least} expected")
        figures[f"{row}_first_p90_s"].append(sorted(first)[math.ceil(0.9 * len(first)) - 1])
        figures[f"{row}_total_s"].append(total)
        figures[f"{row}_cached_tokens"].append(cached)

    whole = given.shared // gpu.BLOCK_TOKENS * gpu.BLOCK_TOKENS
    for number in range(given.rounds + 1):
        prefix = f"{configuration}-{number}"
        ask("cold", burst(f"{prefix} cold", given, given.requests))
        engine.settle()
        ask("device", burst(f"{prefix} device", given, given.requests), whole * given.requests)
        for row, requests in (("one_load", 1), ("evicted", given.requests)):
            engine.settle()
            engine.reset_device_cache()
            ask(row, burst(f"{prefix} {row}", given, requests), whole * requests)
        engine.settle()
        print(f"{configuration}: round {number} done", flush=True)
    return figures


def make_report(parts: dict[str, dict[str, list[float]]], given: argparse.Namespace) -> dict[str, float | int]:
    report: dict[str, float | int] = {
        "requests_count": given.requests,
        "shared_tokens": given.shared,
        "own_tokens": given.own,
        "answer_tokens": given.answer,
        "rounds_count": given.rounds,
        "cuda_graphs": int(given.graphs),
    }
    for configuration, figures in parts.items():
        for row, values in figures.items():
            report[f"{configuration}_{row}"] = round(statistics.median(values[1:]), 4)
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
        if configuration != "none" and "none" in configurations:
            line += f"; on the device {report['none_device_total_s'] / report[f'{configuration}_device_total_s']:.3f}"
            line += " times the speed of no connector"
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
    parser.add_argument("--one", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if given.one:
        (FOLDER / f"{given.one}.json").write_text(json.dumps(measure(given.one, given)))
        return 0
    parts: dict[str, Any] = {}
    for configuration in given.configurations:
        started = time.perf_counter()
        subprocess.run([sys.executable, __file__, *(arguments or sys.argv[1:]), "--one", configuration], check=True)
        parts[configuration] = json.loads((FOLDER / f"{configuration}.json").read_text())
        print(f"{configuration}: {time.perf_counter() - started:.0f} s", flush=True)
    report = make_report(parts, given)
    print(render(report, given.configurations))
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
