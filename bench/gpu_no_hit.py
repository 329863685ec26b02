"""Cost of offload on a CUDA device without cache hits: throughput of unseen prompts.

    python bench/gpu_no_hit.py [--rounds 12] [--prompts 64] [--tokens 2048] [--configurations none spillway-cpu ...]

Engines of a Qwen3-8B-shaped model with dummy weights share the memory of one device and take
turns, so that one of them computes while the others idle: without a connector, with upstream's CPU tier, with
Spillway's, and with Spillway's NVMe tier below it. A round gives an engine `--prompts` new prompts at once, of which 16
run, and 16 tokens are answered to each. Pending writes of a round finish before the next engine's turn.

    none, upstream-cpu, spillway-cpu, spillway-nvme     the engines

The goal is a ratio of at least 0.98 to the engine without a connector. Ratios are medians over rounds with a 95 %
bootstrap interval: `kept` when the whole interval is there, `missed` when none of it is (exit status 1), else
`undecided`. Prints a table, writes build/bench/gpu_no_hit.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu
from bench_report import BenchError, run
from engine_turns import answer_rounds, engines_in_turn
from paired_rounds import GOAL_RATIO, ROUNDS_LEAST, interval_text, ordered, paired_ratio, promise_of

CONFIGURATIONS = ("none", "upstream-cpu", "spillway-cpu", "spillway-nvme")
MODEL = gpu.MODEL | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
DEVICE_BLOCKS = 352  # 6.6 GB: the 16 prompts that run, and few that have run
MEMORY_SHARE = 0.21  # of the device for each engine
ANSWER_TOKENS = 1
FOLDER = Path("build/bench/gpu_no_hit")
OUTPUT = Path("build/bench/gpu_no_hit.json")


def serve(name: str, folder: Path, prompts: int, tokens: int) -> None:
    """Runs in a separate process: one round for each line of the input."""
    os.environ.update(gpu.ENVIRONMENT)
    engine = gpu.Engine(
        name,
        folder,
        MODEL,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        gpu_memory_utilization=MEMORY_SHARE,
        **({"kv_transfer_config": config} if (config := transfer_config(name, folder)) else {}),
    )
    stored = gpu.stable_folder(folder / "nvme") if name == "spillway-nvme" else lambda: True

    def one_round(line: str) -> str:
        batch = [gpu.make_prompt(f"{line} {at}", tokens) for at in range(prompts)]
        seconds, cached = engine.ask_all(batch, ANSWER_TOKENS)
        if cached:
            raise BenchError(f"{cached} tokens of unseen prompts were found in a cache")
        engine.settle(stored)
        return str(seconds)

    answer_rounds(one_round)


def transfer_config(name: str, folder: Path) -> dict[str, Any] | None:
    """Return the configuration of bench/gpu.py, but leave the NVMe tier its default limits: here it may shed stores."""
    config = gpu.transfer_config("spillway-cpu" if name == "spillway-nvme" else name, folder)
    if name == "spillway-nvme" and config is not None:
        tier = {"type": "nvme", "path": str(folder / "nvme"), "max_bytes": gpu.NVME_BYTES}
        config["kv_connector_extra_config"]["secondary_tiers"] = [tier]
    return config


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each configuration's rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in given.configurations}
    sizes = ["--prompts", str(given.prompts), "--tokens", str(given.tokens)]
    commands = {name: [__file__, "--serve", name, *sizes] for name in given.configurations}
    with engines_in_turn(commands, FOLDER) as engines:
        for name, engine in engines.items():
            engine.round(f"{name} warm-up")
        for number in range(max(given.rounds, ROUNDS_LEAST)):
            for name in ordered(given.configurations, number):
                seconds[name].append(float(engines[name].round(f"{name} {number}")))
            print(
                f"round {number + 1}: " + ", ".join(f"{name} {seconds[name][-1]:.3f}" for name in seconds) + " s",
                flush=True,
            )
    return seconds


def make_report(seconds: dict[str, list[float]], given: argparse.Namespace) -> dict[str, float | int | str]:
    chance = random.Random(0)
    tokens = given.prompts * given.tokens
    report: dict[str, float | int | str] = {
        "rounds_count": len(next(iter(seconds.values()))),
        "prompt_tokens": given.tokens,
        "prompts_count": given.prompts,
    }
    speeds = {name: [tokens / value for value in values] for name, values in seconds.items()}
    for name, values in speeds.items():
        report[f"{name}_prompt_tokens_per_second"] = round(statistics.median(values))
        if name != "none" and "none" in speeds:
            ratio = paired_ratio(values, speeds["none"], chance)
            report |= ratio.figures(f"{name}_throughput_ratio")
            report[f"{name}_promise"] = promise_of(ratio)
    return report


def render(report: dict[str, float | int | str]) -> str:
    lines = [
        f"{report['prompts_count']} prompts of {report['prompt_tokens']} unseen tokens, medians of "
        f"{report['rounds_count']} rounds",
        "",
        f"{'engine':16}{'tokens/s':>10}{'ratio to none (95 %)':>28}  at least {GOAL_RATIO:g}",
    ]
    for name in CONFIGURATIONS:
        if f"{name}_prompt_tokens_per_second" not in report:
            continue
        cell = interval_text(report, f"{name}_throughput_ratio")
        speed = report[f"{name}_prompt_tokens_per_second"]
        lines.append(f"{name:16}{speed:>10}{cell:>28}  {report.get(f'{name}_promise', '')}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Throughput of unseen prompts on a CUDA device, by offload.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=64, help="per engine and round (default 64)")
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt (default 2048)")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--serve", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, (FOLDER / given.serve).absolute(), given.prompts, given.tokens)
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        report = make_report(measure(given), given)
    finally:
        for name in CONFIGURATIONS:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
    print(f"\n{render(report)}")
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if "missed" in report.values() else 0


if __name__ == "__main__":
    run(main)
