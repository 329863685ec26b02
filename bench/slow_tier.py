"""Time to the first token of a long prompt whose KV is in a shared tier that is slower than computing.

    python bench/slow_tier.py [--cuda] [--runs 5] [--tokens N] [--bytes-per-second N]

Without --cuda: SmolLM2-135M's shape, 4,096 tokens, float32 on this machine's CPU; the tier gives 0.6 of the rate at
which prompts are computed, or --bytes-per-second. With it: Qwen3-14B's shape, 32,000 tokens, bfloat16 on one CUDA
device; 1.6 GB/s. Dummy weights, blocks of 128 tokens, vLLM's offline engine, one request at a time, loads slowed down
in the tier (stores are not). Each way runs in a process of its own:

    compute      without a connector: the prompt is computed
    fs           upstream's file-system tier: all of it is loaded (on a CPU under Spillway's connector, as upstream's
                 worker refuses CPUs)
    load         Spillway's NVMe tier, where the engine counts as so slow that it always loads
    decide       the same as it decides: what it has measured to be slower to load is computed
    meet         the same with compute_while_loading: on

All prompts are computed and stored until the CPU tier has dropped the first; then each is asked again, with the
device's prefix cache reset. Medians over --runs prompts behind a warm-up prompt, which measures the tier. `decide` and
`meet` are then asked prompts that are not stored. A `meet` that has not loaded a tenth of its prompt, or loaded all
of it, fails the run. Prints a table, writes build/bench/slow_tier.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu
from bench_report import BenchError, spread_of

from spillway_connector.transfer_config import transfer_config as spillway

WAYS = ("compute", "fs", "load", "decide", "meet")
NEW_PROMPTS = ("decide", "meet")
FOLDER = Path("build/bench/slow_tier").absolute()
OUTPUT = Path("build/bench/slow_tier.json")
CPU_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CPU_BLOCK_BYTES = 2 * 30 * 3 * 64 * 4 * gpu.BLOCK_TOKENS
CUDA_BLOCK_BYTES = 2 * 40 * 8 * 128 * 2 * gpu.BLOCK_TOKENS
CPU_STEP_TOKENS = 2048
CPU_SHARE = 0.6  # of the rate of computing, where no rate is given
CUDA_BYTES_PER_SECOND = 1.6e9
TAIL_TOKENS = 37  # beyond the last whole block; always computed


def transfer_config(way: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config. The CPU tier holds one and three quarters of a prompt."""
    if way == "compute":
        return None
    blocks = given.tokens // gpu.BLOCK_TOKENS
    extra: dict[str, Any] = {"spec_module_path": "slow_specs"}
    if way == "fs" and given.cuda:
        extra |= {
            "spec_name": "UpstreamSpec",
            "cpu_bytes_to_use": blocks * 7 // 4 * CUDA_BLOCK_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(FOLDER / "fs")}],
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    tier: dict[str, Any] = {"type": "nvme", "path": str(FOLDER / way), "max_bytes": gpu.NVME_BYTES}
    tier |= {"io_threads": gpu.IO_THREADS, "lookup_timeout_seconds": 2.0, "load_timeout_seconds": 60.0}
    tier |= {"store_timeout_seconds": 60.0, "store_queue_bytes_max": 8 << 30, "store_queue_seconds_max": 60.0}
    if way == "fs":
        tier = {"type": "fs", "root_dir": str(FOLDER / "fs")}
    extra |= {
        "num_cpu_blocks": blocks * 7 // 4,
        "promotion_in_flight_fraction": 0.6,
        "request_wait_seconds": 60.0,
        "compute_while_loading": "on" if way == "meet" else "off",
        "secondary_tiers": [tier],
    }
    if way in ("fs", "load"):
        extra["prefill_tokens_per_second"] = 1.0
    return spillway(extra)


def open_engine(way: str, given: argparse.Namespace) -> gpu.Engine:
    blocks = given.tokens // gpu.BLOCK_TOKENS
    settings: dict[str, Any] = {
        "max_model_len": given.tokens + 2 * gpu.BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks + blocks // 4 + 8,
        "kv_transfer_config": transfer_config(way, given),
    }
    if given.cuda:
        return gpu.Engine("none", FOLDER, **settings)
    settings["max_num_batched_tokens"] = CPU_STEP_TOKENS
    return gpu.Engine("none", FOLDER, CPU_MODEL, dtype="float32", **settings)


def measure(way: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each prompt, the warm-up's first, and what was cached of it."""
    found: dict[str, list[float]] = defaultdict(list)
    engine = open_engine(way, given)
    tokens = given.tokens + TAIL_TOKENS
    prompts = [gpu.make_prompt(f"slow {number}", tokens) for number in range(given.runs + 1)]
    prompts = [[token % 49_000 for token in prompt] for prompt in prompts]
    first_answers = []
    for prompt in prompts:
        seconds, _, answer = engine.ask(prompt)
        found["first_asked_seconds"].append(seconds)
        first_answers.append(answer)
        if way != "compute":
            engine.settle(gpu.stable_folder(FOLDER / way))
    if way == "compute":
        return found
    differing = 0
    for prompt, first in zip(prompts, first_answers, strict=True):
        engine.reset_device_cache()
        gpu.drop_page_cache()
        seconds, cached, answer = engine.ask(prompt)
        print(f"{way}: {cached} of {tokens} tokens loaded, {seconds:.3f} s", flush=True)
        found["asked_again_seconds"].append(seconds)
        found["loaded_tokens"].append(cached)
        differing += answer != first
        engine.settle()
    found["answers_differing"] = [differing]
    for number in range(given.runs if way in NEW_PROMPTS else 0):
        engine.reset_device_cache()
        prompt = gpu.make_prompt(f"new {number}", tokens)
        found["new_prompt_seconds"].append(engine.ask([token % 49_000 for token in prompt])[0])
        engine.settle()
    if way == "meet" and not all(0.1 < cached / tokens < 0.95 for cached in found["loaded_tokens"][1:]):
        raise BenchError(f"meet: {found['loaded_tokens']} tokens were loaded: not every prompt met its load")
    return found


def run(way: str, given: argparse.Namespace) -> None:
    os.environ.update(gpu.ENVIRONMENT, **({} if given.cuda else {"VLLM_CPU_KVCACHE_SPACE": "1"}))
    measured = measure(way, given)
    shutil.rmtree(FOLDER / way, ignore_errors=True)
    (FOLDER / f"{way}.json").write_text(json.dumps(measured) + "\n")


def report_of(parts: dict[str, dict[str, list[float]]], given: argparse.Namespace) -> dict[str, float | int | str]:
    report: dict[str, float | int | str] = {
        "prompt_tokens": given.tokens + TAIL_TOKENS,
        "runs_per_figure": given.runs,
        "tier_bytes_per_second": round(given.bytes_per_second),
    }
    compute = statistics.median(parts["compute"]["first_asked_seconds"][1:])
    for way, part in parts.items():
        seconds = part["asked_again_seconds" if way != "compute" else "first_asked_seconds"][1:]
        report |= spread_of(way, seconds)
        report[f"{way}_of_compute_ratio"] = round(statistics.median(seconds) / compute, 3)
        if way != "compute":
            report[f"{way}_loaded_tokens"] = round(statistics.median(part["loaded_tokens"][1:]))
            report[f"{way}_answers_differing"] = round(part["answers_differing"][0])
        if way in NEW_PROMPTS:
            report |= spread_of(f"{way}_new_prompt", part["new_prompt_seconds"])
    return report


def render(report: dict[str, float | int | str], ways: Sequence[str]) -> str:
    lines = [
        f"first token of {report['prompt_tokens']} tokens, tier of {float(report['tier_bytes_per_second']) / 1e9:.3f} "
        f"GB/s, medians of {report['runs_per_figure']}",
        f"{'':10}{'median':>10}{'fastest':>10}{'slowest':>10}{'of compute':>12}{'loaded tokens':>15}",
    ]
    for way in ways:
        times = "".join(f"{float(report[f'{way}{kind}_seconds']):>8.3f} s" for kind in ("", "_fastest", "_slowest"))
        loaded = report.get(f"{way}_loaded_tokens", "")
        lines.append(f"{way:10}{times}{float(report[f'{way}_of_compute_ratio']):>11.2f}x{loaded:>15}")
    lines.append("prompts that no engine has stored")
    for way in (way for way in ways if way in NEW_PROMPTS):
        kinds = ("", "_fastest", "_slowest")
        lines.append(
            f"{way:10}" + "".join(f"{float(report[f'{way}_new_prompt{kind}_seconds']):>8.3f} s" for kind in kinds)
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="First tokens with a shared tier that is slower than computing.")
    parser.add_argument("--cuda", action="store_true", help="on one CUDA device, with Qwen3-14B's shape")
    parser.add_argument("--runs", type=int, default=5, help="prompts per figure (default 5)")
    parser.add_argument("--tokens", type=int, default=0, help="whole blocks; default 4096, with --cuda 32000")
    parser.add_argument("--bytes-per-second", type=float, default=0.0, help="of the tier")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.tokens = given.tokens or (32_000 if given.cuda else 4096)
    if given.way:
        run(given.way, given)
        return 0
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    parts: dict[str, dict[str, list[float]]] = {}
    for way in ("compute", *(way for way in given.ways if way != "compute")):
        environment = {**os.environ, "BENCH_TIER_BYTES_PER_SECOND": str(given.bytes_per_second)}
        command = [sys.executable, __file__, "--way", way, "--runs", str(given.runs), "--tokens", str(given.tokens)]
        subprocess.run([*command, *["--cuda"] * given.cuda], env=environment, check=True)
        parts[way] = json.loads((FOLDER / f"{way}.json").read_text())
        if not given.bytes_per_second:
            given.bytes_per_second = CUDA_BYTES_PER_SECOND
            if not given.cuda:
                seconds = statistics.median(parts["compute"]["first_asked_seconds"][1:])
                given.bytes_per_second = CPU_SHARE * given.tokens / gpu.BLOCK_TOKENS * CPU_BLOCK_BYTES / seconds
    report = report_of(parts, given)
    print(render(report, list(parts)))
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
