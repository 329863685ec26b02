"""Conversations of several turns on one engine: time to the first token and per further token, by offload.

    python bench/multi_turn.py [--phase none|upstream|spillway-batch|spillway-loop|spillway-prompts|report]
                               [--clients 8 16]
                               [--cpu-blocks 1000] [--small] [--device-cache]

The shape of vllm-ascend's reports of #7819 and #10575: 8 clients with 24 conversations and 16 with 48, a client takes
the next conversation when it has finished one, device prefix cache off, room for 1,000 blocks of 128 tokens in the CPU
tier, a Qwen3-14B-shaped model with dummy weights in bf16 on one CUDA device, vLLM's engine (AsyncLLM, no HTTP server,
no CUDA graphs). A conversation begins with 512 tokens shared by all and 1,500 to 5,500 private ones; each of its six
turns adds the answer (48 tokens) and 96 to 160 new tokens.

    none            no connector: every turn computes its whole history
    upstream        vLLM's OffloadingConnector
    spillway-batch  Spillway, batch_memcpy: auto
    spillway-loop   Spillway, batch_memcpy: off: one copy call a piece
    spillway-prompts  Spillway, generated_tokens: off: an answer is computed again by the next turn, as with upstream

Each phase runs in a separate process and writes build/bench/multi_turn/<phase>.json; `report` merges them into
build/bench/multi_turn.json and prints the table. --small: a small model and few conversations on any platform, to
check that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu
from bench_report import write_report

from spillway_connector.transfer_config import transfer_config as spillway
from spillway_engine.ascend_acceptance.conversations import REPORTED, SMALL, Conversations, Shape, Turn, figures

PARTS = Path("build/bench/multi_turn")
OUTPUT = Path("build/bench/multi_turn.json")
PHASES = ("none", "upstream", "spillway-batch", "spillway-loop", "spillway-prompts")
GPU_BLOCK_BYTES = 20_971_520  # of the model's KV, all layers, 128 tokens, bf16
TURN_SECONDS_MAX = 120.0


SMALL_BLOCK_TOKENS = 32
SMALL_MODEL = {**gpu.SMALL_MODEL, "max_position_embeddings": 2048}


def transfer_config(phase: str, small: bool, cpu_blocks: int) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config; both sides have the same CPU bytes and chunks of one block."""
    if phase == "none":
        return None
    room = {"num_cpu_blocks": 200} if small else {"cpu_bytes_to_use": cpu_blocks * GPU_BLOCK_BYTES}
    if phase == "upstream":
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": room}
    batch_memcpy = "off" if phase == "spillway-loop" else "auto"
    generated_tokens = "off" if phase == "spillway-prompts" else "on"
    return spillway(room | {"batch_memcpy": batch_memcpy, "generated_tokens": generated_tokens})


def engine_settings(phase: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    small = given.small
    config = transfer_config(phase, small, given.cpu_blocks)
    of_load = {"max_num_seqs": 32, "enable_prefix_caching": given.device_cache}
    if small:
        of_load |= {"dtype": "float32", "block_size": SMALL_BLOCK_TOKENS, "num_gpu_blocks_override": 200}
        of_load |= {"max_model_len": 1024, "max_num_batched_tokens": 1024}
        return gpu.engine_settings(folder / "small", SMALL_MODEL, config) | of_load
    of_load |= {"max_model_len": 16_384, "num_gpu_blocks_override": gpu.DEVICE_BLOCKS + 640}
    return gpu.engine_settings(folder, gpu.MODEL, config) | of_load


class Load:
    """One engine under `clients` conversations at a time."""

    def __init__(self, engine: Any, shape: Shape) -> None:
        self._engine = engine
        self._shape = shape
        self._asked = 0

    async def run(self, clients: int) -> tuple[list[Turn], float]:
        """(every turn, seconds of the whole load)"""
        conversations = Conversations(self._shape, clients)
        waiting = iter(zip(conversations.openings, conversations.additions, strict=True))
        turns: list[Turn] = []

        async def client() -> None:
            for opening, additions in waiting:
                prompt = list(opening)
                for number in range(self._shape.turns):
                    turn, answer = await asyncio.wait_for(self.ask(number, prompt), TURN_SECONDS_MAX)
                    turns.append(turn)
                    if number < len(additions):
                        prompt += answer + additions[number]

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return turns, time.perf_counter() - started

    async def ask(self, number: int, prompt: list[int]) -> tuple[Turn, list[int]]:
        from vllm import SamplingParams  # noqa: PLC0415 - the report needs no vLLM

        sampling = SamplingParams(temperature=0.0, max_tokens=self._shape.answer, ignore_eos=True, detokenize=False)
        self._asked += 1
        outputs: AsyncIterator[Any] = self._engine.generate(
            {"prompt_token_ids": list(prompt)}, sampling, f"turn-{self._asked}"
        )
        started = time.perf_counter()
        first = 0.0
        answer: list[int] = []
        cached = 0
        async for output in outputs:
            if not answer:
                first = time.perf_counter()
                cached = output.num_cached_tokens or 0
            answer = list(output.outputs[0].token_ids)
        ended = time.perf_counter()
        return (
            Turn(number, len(prompt), cached, first - started, (ended - first) / max(1, len(answer) - 1)),
            answer,
        )


async def measure(phase: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    shape = SMALL if given.small else REPORTED
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_settings(phase, folder, given)))
    report: dict[str, Any] = {}
    try:
        load = Load(engine, shape)
        await load.ask(0, Conversations(shape, 1).openings[0])  # warm-up
        for count in given.clients:
            turns, seconds = await load.run(count)
            report[str(count)] = {"seconds": seconds, "turns": [asdict(turn) for turn in turns]}
            print(f"{phase}: {count} clients, {len(turns)} turns in {seconds:.1f} s", flush=True)
    finally:
        engine.shutdown()
    return report


def make_report() -> dict[str, float]:
    """Milliseconds and shares, by phase and clients."""
    report: dict[str, float] = {}
    for phase in PHASES:
        part = PARTS / f"{phase}.json"
        if not part.exists():
            continue
        for clients, measured in json.loads(part.read_text()).items():
            turns = [Turn(**turn) for turn in measured["turns"]]
            for name, value in figures(turns, measured["seconds"]).items():
                report[f"{phase}_{clients}_clients_{name}"] = value
    return report


def render(report: dict[str, float]) -> str:
    shown = ("ttft_mean_ms", "ttft_median_ms", "ttft_p90_ms", "tpot_mean_ms", "turns_per_second", "cached_share")
    loads = sorted({int(key.split("_clients")[0].rpartition("_")[2]) for key in report})
    lines = ["| clients | offload | " + " | ".join(shown) + " |", "| --- | --- |" + " --- |" * len(shown)]
    for clients in loads:
        for phase in PHASES:
            if f"{phase}_{clients}_clients_{shown[0]}" in report:
                cells = [f"{report[f'{phase}_{clients}_clients_{figure}']:g}" for figure in shown]
                lines.append(f"| {clients} | {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Multi-turn conversations on one engine, by offload.")
    parser.add_argument("--phase", choices=(*PHASES, "report"))
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--folder", type=Path, default=PARTS / "work", help="for the model's configuration")
    parser.add_argument("--cpu-blocks", type=int, default=1000, help="room in the CPU tier (default 1000)")
    parser.add_argument("--device-cache", action="store_true", help="leave the device's prefix cache on")
    parser.add_argument("--small", action="store_true", help="a small model and load, to check that it runs")
    given = parser.parse_args(arguments)
    if given.phase is None:
        for phase in PHASES:
            rest = sys.argv[1:] if arguments is None else list(arguments)
            subprocess.run([sys.executable, __file__, "--phase", phase, *rest], check=True)
    elif given.phase != "report":
        os.environ.update(gpu.ENVIRONMENT)
        folder = given.folder.absolute()
        measured = asyncio.run(measure(given.phase, folder, given))
        PARTS.mkdir(parents=True, exist_ok=True)
        (PARTS / f"{given.phase}.json").write_text(json.dumps(measured) + "\n")
        return 0
    report = make_report()
    print(render(report))
    write_report(report, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
