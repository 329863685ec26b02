"""Engines with vLLM's own tiering, one after the other: `python -m stock_tiers.engine_run FOLDER CASE,...`.

Six prompts in rotation, twice, over a device cache and a CPU tier that hold fewer, so that the second time a prompt's
blocks come from the secondary tier. Scheduler half, manager and tier factory are vLLM's, the worker is cpu_spec.py's.
Prints `RUN {json}` for each case: tokens, log-probabilities, cached tokens and seconds of each answer.

    none           no connector: the reference answers
    fs             vLLM's own file tier
    nvme, redis    Spillway's tiers by their short names
    nvme-class     the same by class name and module_path
    nvme-restart   again on the files of `nvme`: every prompt is loaded, the first time it is asked
    nvme-damaged   before the second round one byte of every second file is changed
    redis-killed   in the middle of the second round the server is killed
    one-by-one     Spillway's tier and vLLM's canonical_layout: blocks that one rank stores and loads
    two-by-two     the same of two ranks
    one-by-two, two-by-one
                   again on these files, with the other number of ranks

STOCK_MODEL=FOLDER takes a real model, with prompts of 1,500 tokens, instead of a tiny one.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_matrix.engine_run import ONE_THREAD, fork_ranks
from engine_matrix.greedy import greedy_answers
from engine_matrix.models import build, model
from valkey_servers import started_valkey

from stock_tiers.patience import PATIENT

PROMPTS, ANSWER_TOKENS = 6, 8
CASES = ("none", "fs", "nvme", "nvme-class", "nvme-restart", "nvme-damaged", "redis", "redis-killed")
CASES += ("one-by-one", "one-by-two", "two-by-two", "two-by-one")
RANKS = {"one": 1, "two": 2}


class Workload:
    """Sizes: the device holds three prompts, the CPU tier two."""

    def __init__(self, folder: Path) -> None:
        real = os.environ.get("STOCK_MODEL")
        self.model = Path(real) if real else build(model("llama"), folder)
        self.block_tokens = 128 if real else 32
        self.prompt_tokens = 1500 if real else 12 * self.block_tokens + 5
        blocks = self.prompt_tokens // self.block_tokens
        self.device_blocks = 40 if real else 3 * blocks + 4
        config = json.loads((self.model / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        layer_bytes = 2 * self.block_tokens * config["num_key_value_heads"] * head * 4
        self.cpu_bytes = 2 * blocks * -(-layer_bytes * config["num_hidden_layers"] // 4096) * 4096
        self.reusable_tokens = blocks * self.block_tokens
        numbers = range(3, min(config["vocab_size"], 40_000))
        self.prompts = [random.Random(prompt).choices(numbers, k=self.prompt_tokens) for prompt in range(PROMPTS)]


def secondary_tiers(case: str, folder: Path, server: Any) -> list[dict[str, Any]]:
    if case == "fs":
        return [{"type": "fs", "root_dir": str(folder / "fs")}]
    if case.startswith("redis"):
        return [{"type": "spillway-redis", "url": f"redis://127.0.0.1:{server.port}/0", **PATIENT}]
    place = "nvme" if case == "nvme-restart" else case.partition("-by-")[0]
    entry = {"type": "spillway-nvme", "path": str(folder / place), "mode": "files", "max_bytes": "2 GiB", **PATIENT}
    if case == "nvme-class":
        entry |= {"type": "SpillwayNvmeTier", "module_path": "spillway_connector.engine.stock.tiers", "mode": "slab"}
    return [entry]


def damage(folder: Path) -> int:
    """Change one byte in the middle of every second frame; how many."""
    frames = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 16_384)[::2]
    for frame in frames:
        with frame.open("r+b") as file:
            file.seek(frame.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0xFF]))
    return len(frames)


def run(case: str, folder: Path, work: Workload) -> dict[str, Any]:
    server = None
    if case.startswith("redis"):
        server = started_valkey()
    settings: dict[str, Any] = {
        "model": str(work.model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": work.block_tokens,
        "max_model_len": work.prompt_tokens + 64,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": work.device_blocks,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if case != "none":
        settings["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": work.cpu_bytes,
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "stock_tiers.cpu_spec",
                "secondary_tiers": secondary_tiers(case, folder, server),
                **({"canonical_layout": True} if "-by-" in case else {}),
            },
        }
    if RANKS.get(case.rpartition("-by-")[2]) == 2:
        settings |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    asked_at: list[float] = []
    damaged = 0

    def prompts(_block_tokens: int) -> Iterator[list[int]]:
        nonlocal damaged
        for asked in range(2 * PROMPTS):
            if asked == PROMPTS and case == "nvme-damaged":
                damaged = damage(folder / case)
            if asked == PROMPTS + 2 and case == "redis-killed":
                assert server is not None
                server.stop()
            asked_at.append(time.monotonic())
            yield work.prompts[asked % PROMPTS]
        asked_at.append(time.monotonic())

    try:
        answers = greedy_answers(settings, prompts, ANSWER_TOKENS)
    finally:
        if server is not None and server.is_running():
            server.stop()
    seconds = [round(after - before, 3) for before, after in itertools.pairwise(asked_at)]
    return {"case": case, "damaged": damaged, "reusable": work.reusable_tokens, "seconds": seconds, **answers}


def main() -> None:
    # One process, and a seed that every engine of this test has.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", PYTHONHASHSEED="0")
    if "STOCK_MODEL" not in os.environ:
        os.environ.update(ONE_THREAD)
        fork_ranks()
    folder, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    work = Workload(folder)
    for case in cases:
        print("RUN", json.dumps(run(case, folder, work)), flush=True)


if __name__ == "__main__":
    main()
