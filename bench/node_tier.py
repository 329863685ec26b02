"""One CPU tier for the engines of a machine, beside private ones: first tokens, memory, hit ratio.

    python bench/node_tier.py [--parts neighbour restart trace] [--engines 3] [--rounds 5] [--cuda] [--cpu-time]

neighbour  Engines take turns. In each round every engine computes a prompt of its own, and then, behind a reset of its
           device's prefix cache, asks for it (`own`) and for the one of the engine before it (`neighbour`), in turns.
           Both are loads from the CPU tier. Then all engines ask for one prompt that the first of them has computed,
           and the rows of the tier are counted: those that the prompt added, and those that it needs.
restart    An engine computes prompts and is killed with SIGKILL with all its processes. Another one is started on the
           same rows, and asks in turns for what the killed one had computed (`restarted`) and for what it has computed
           itself (`own`). Rows that stay claimed are counted a few steps later, and page faults of each question: a
           process that takes them in its first loads of rows shows more of them for `restarted`.
trace      Agents' sessions of bench/retention.py in virtual time, on the connector's own rows and index: one tier of B
           bytes for N engines, and N private ones of B/N. A router sends each session to one engine (`pinned`), to
           the next one at each request (`spread`), or to another one after each quarter of the engines is replaced by
           an empty one (`rolling`).

An engine is vLLM's offline engine. Without --cuda: a small model in float32, all on the same cores. With --cuda:
the model of bench/gpu.py, one device for each engine, the rows in /dev/shm. First tokens are medians over the rounds;
a ratio is the median of the rounds' ratios with a 95 % bootstrap interval. Goal: at most 1.05.

Prints a table and adds to build/bench/node_tier.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu
from engine_turns import Turn, answer_rounds
from memory_folder import MEMORY, own_name, remove_left
from paired_rounds import paired_ratio

from spillway_connector.plan.node_index import READY, WRITING, NodeIndex

PARTS = ("neighbour", "restart", "trace")
GOAL_RATIO = 1.05
FOLDER = Path("build/bench/node_tier").absolute()
OUTPUT = Path("build/bench/node_tier.json")
SMALL_MODEL = {  # 32 KiB of KV for each token in float32
    **gpu.MODEL,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU_LENGTHS, CUDA_LENGTHS = (512, 2048), (8192, 32_000)
CPU_TIER_BYTES, CUDA_TIER_BYTES = 1 << 30, 24 << 30
TRACE_ENGINES = (2, 4, 8)
TRACE_SESSIONS = 24
ROUTERS = ("pinned", "spread", "rolling")


# -- an engine's process


def transfer_config(region: Path, tier_bytes: int) -> dict[str, Any]:
    """vLLM's kv_transfer_config of an engine with the CPU tier of its node."""
    tier = {"bytes": tier_bytes, "path": str(region), "fallback": "refuse"}
    return {
        "kv_connector": "SpillwayConnector",
        "kv_connector_module_path": "spillway_connector.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "SpillwayOffloadingSpec",
            "spec_module_path": "spillway_connector.engine.spec",
            "cpu_bytes_to_use": tier_bytes,
            "node_tier": tier,
        },
    }


def serve(given: argparse.Namespace) -> None:
    """One line of the input for each prompt: {"prompt": name, "tokens": N, "reset": whether the device forgets}."""
    os.environ.update(gpu.ENVIRONMENT)
    settings: dict[str, Any] = {"kv_transfer_config": transfer_config(given.region, given.tier_bytes)}
    if not given.cuda:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1")
        settings |= {"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 4096}
        settings |= {"max_num_batched_tokens": 2048, "max_num_seqs": 4}
    model = gpu.MODEL if given.cuda else SMALL_MODEL
    engine = gpu.Engine("none", given.folder, model, **settings)  # one folder: dummy weights are known by it

    def answer(line: str) -> str:
        asked = json.loads(line)
        prompt = [token % model["vocab_size"] for token in gpu.make_prompt(asked["prompt"], asked["tokens"])]
        if asked["reset"]:
            engine.reset_device_cache()
        began, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds, cached, tokens = engine.ask(prompt)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        if given.cpu_time:
            seconds = time.process_time() - began
        engine.settle()
        return json.dumps({"seconds": seconds, "cached": cached, "answer": tokens, "faults": faults})

    answer_rounds(answer)


# -- parts with engines


class Engines:
    """Engines of one region, started and killed by number."""

    def __init__(self, given: argparse.Namespace, stack: ExitStack) -> None:
        self._given = given
        self._stack = stack
        self.region = Path(given.region)
        remove_left()
        shutil.rmtree(self.region, ignore_errors=True)
        stack.callback(shutil.rmtree, self.region, ignore_errors=True)
        self._turns: dict[int, Turn] = {}
        self._answers: dict[tuple[str, int], list[int]] = {}  # by prompt
        self.answers_differing = 0
        self.faults: dict[str, list[int]] = defaultdict(list)  # by row of the table, of the process that vLLM runs in

    def start(self, numbers: Sequence[int]) -> float:
        """Returns the seconds until all of them are ready. Each CUDA device starts beside the others."""
        given, began = self._given, time.monotonic()
        for number in numbers:
            name = f"engine-{number}"
            command = [__file__, "--serve", name, "--region", str(self.region), "--folder", str(given.folder)]
            command += ["--tier-bytes", str(given.tier_bytes), *(["--cuda"] if given.cuda else [])]
            command += ["--cpu-time"] if given.cpu_time else []
            variables = {"CUDA_VISIBLE_DEVICES": str(number % given.engines)} if given.cuda else {}
            log = self._stack.enter_context((given.folder / f"{name}.log").open("a"))
            self._turns[number] = Turn(name, command, log, variables)
            self._stack.callback(self._turns[number].kill)
            if not given.cuda:
                self._turns[number].wait_ready()
        if given.cuda:
            for number in numbers:
                self._turns[number].wait_ready()
        return time.monotonic() - began

    def kill(self, number: int) -> None:
        self._turns.pop(number).kill()

    def ask(self, number: int, prompt: str, tokens: int, *, reset: bool = False) -> dict[str, Any]:
        line = json.dumps({"prompt": prompt, "tokens": tokens, "reset": reset})
        answer: dict[str, Any] = json.loads(self._turns[number].round(line))
        self.answers_differing += self._answers.setdefault((prompt, tokens), answer["answer"]) != answer["answer"]
        return answer

    def load(self, number: int, prompt: str, tokens: int, row: str) -> float:
        """Seconds to the first token of what the tier holds."""
        answer = self.ask(number, prompt, tokens, reset=True)
        gpu.require_hit(f"{row} of engine {number}", tokens, answer["cached"])
        self.faults[f"{row}_{tokens}"].append(answer["faults"])
        return float(answer["seconds"])

    def rows(self) -> dict[int, int]:
        """The number of rows of the region by state, and the bytes of a row as that of state -1."""
        (folder,) = self.region.glob("rows-*")
        row_bytes = int(folder.name.removeprefix("rows-"))
        rows = (folder / "rows").stat().st_size // row_bytes
        with (folder / "index").open("rb") as file:
            words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            counted = NodeIndex(memoryview(words), rows).count()
        return {**counted, -1: row_bytes}


def measure_neighbour(given: argparse.Namespace) -> dict[str, float]:
    report: dict[str, float] = {"engines_count": given.engines, "rounds_count": given.rounds}
    seconds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        engines, numbers = Engines(given, stack), list(range(given.engines))
        print(f"{given.engines} engines are ready after {engines.start(numbers):.0f} s", flush=True)
        for tokens in given.lengths:
            for at in range(given.rounds + 1):  # the first one warms up
                row: dict[str, list[float]] = defaultdict(list)
                for number in numbers:
                    computed = engines.ask(number, f"{at} {number} {tokens}", tokens, reset=True)
                    if computed["cached"]:
                        raise gpu.BenchError(f"a new prompt had {computed['cached']} cached tokens")
                    row["computed"].append(computed["seconds"])
                for number in numbers:
                    asked = {"own": number, "neighbour": (number - 1) % given.engines}
                    for kind in sorted(asked, reverse=bool((at + number) % 2)):
                        row[kind].append(engines.load(number, f"{at} {asked[kind]} {tokens}", tokens, kind))
                for kind, values in row.items() if at else ():
                    seconds[f"{kind}_{tokens}"].append(statistics.mean(values))
        tokens = given.lengths[-1]
        before = engines.rows()
        engines.ask(0, "common", tokens)
        for number in numbers[1:]:
            engines.load(number, "common", tokens, "common")
        after = engines.rows()
        report["neighbour_answers_differing"] = engines.answers_differing
        report["common_prefix_tokens"] = tokens
        report["common_prefix_rows_added"] = after[READY] - before[READY]
        report["common_prefix_rows_needed"] = tokens // gpu.BLOCK_TOKENS
        report["common_prefix_bytes_resident"] = (after[READY] - before[READY]) * after[-1]
        report["common_prefix_bytes_of_private_tiers"] = given.engines * (tokens // gpu.BLOCK_TOKENS) * after[-1]
    return report | first_tokens(seconds, "neighbour", given.lengths)


def measure_restart(given: argparse.Namespace) -> dict[str, float]:
    report: dict[str, float] = {"restart_rounds_count": given.rounds}
    seconds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        engines = Engines(given, stack)
        print(f"an engine is ready after {engines.start([0]):.0f} s", flush=True)
        needed = 2 * (given.rounds + 1) * sum(tokens // gpu.BLOCK_TOKENS for tokens in given.lengths)
        if (held := sum(count for state, count in engines.rows().items() if state >= 0)) < needed:
            raise gpu.BenchError(f"the tier holds {held} chunks, and the prompts have {needed}: raise --tier-bytes")
        for tokens in given.lengths:
            for at in range(given.rounds + 1):
                engines.ask(0, f"before {at} {tokens}", tokens, reset=True)
        ready = engines.rows()[READY]
        engines.kill(0)
        report["restart_seconds"] = engines.start([1])
        print(f"killed; another one is ready after {report['restart_seconds']:.0f} s", flush=True)
        report["rows_found_share"] = engines.rows()[READY] / ready
        for tokens in given.lengths:
            for at in range(given.rounds + 1):
                row: dict[str, float] = {}
                engines.ask(1, f"after {at} {tokens}", tokens, reset=True)
                for kind, prompt in sorted({"own": "after", "restarted": "before"}.items(), reverse=bool(at % 2)):
                    row[kind] = engines.load(1, f"{prompt} {at} {tokens}", tokens, kind)
                for kind, value in row.items() if at else ():
                    seconds[f"{kind}_{tokens}"].append(value)
        report["restart_answers_differing"] = engines.answers_differing
        report |= {f"restart_{row}_page_faults": statistics.median(counted) for row, counted in engines.faults.items()}
        report["rows_claimed_at_the_end"] = engines.rows()[WRITING]
    return report | first_tokens(seconds, "restarted", given.lengths)


def first_tokens(seconds: dict[str, list[float]], kind: str, lengths: Sequence[int]) -> dict[str, float]:
    """Medians in milliseconds, and the ratios of `kind` to `own`."""
    chance = random.Random(0)
    own = "own" if kind == "neighbour" else f"own_{kind}"
    report: dict[str, float] = {}
    for name, values in seconds.items():
        row, _, tokens = name.partition("_")
        report[f"{own if row == 'own' else row}_{tokens}_tokens_ms"] = round(statistics.median(values) * 1e3, 2)
    for tokens in lengths:
        ratio = paired_ratio(seconds[f"{kind}_{tokens}"], seconds[f"own_{tokens}"], chance)
        for end, value in (("", ratio.median), ("_low", ratio.low), ("_high", ratio.high)):
            report[f"{kind}_{tokens}_tokens_ratio{end}"] = round(value, 4)
    return report


# -- the trace, in virtual time


def measure_trace(given: argparse.Namespace) -> dict[str, float]:
    # None of these is there on a machine that only has an engine's environment.
    from node_trace import hit_ratios  # noqa: PLC0415

    return hit_ratios(TRACE_ENGINES, ROUTERS, given.sessions)


# -- report


def render(report: dict[str, float], parts: Sequence[str], lengths: Sequence[int]) -> str:
    lines: list[str] = []
    for part, own in (("neighbour", "own"), ("restarted", "own_restarted")):
        if f"{part}_{lengths[0]}_tokens_ms" not in report:
            continue
        lines += [f"| tokens | own, ms | {part}, ms | ratio | 95 % |", "| --- | --- | --- | --- | --- |"]
        for tokens in lengths:
            ratio = f"{part}_{tokens}_tokens_ratio"
            verdict = "" if report[ratio] <= GOAL_RATIO else f" (above the goal of {GOAL_RATIO})"
            lines.append(
                f"| {tokens:,} | {report[f'{own}_{tokens}_tokens_ms']} | {report[f'{part}_{tokens}_tokens_ms']} | "
                f"{report[ratio]:.3f}{verdict} | {report[f'{ratio}_low']:.3f} to {report[f'{ratio}_high']:.3f} |"
            )
    if "trace" in parts:
        lines += ["| hit ratio | engines | private | node |", "| --- | --- | --- | --- |"]
        for router in ROUTERS:
            for count in TRACE_ENGINES:
                private, node = (report[f"trace_{router}_{count}_engines_{kind}_hit_ratio"] for kind in KINDS)
                lines.append(f"| {router} | {count} | {private:.3f} | {node:.3f} |")
    lines += [
        f"{key}: {value}"
        for key, value in report.items()
        if key.startswith(("common", "rows", "restart_s")) or key.endswith(("differing", "faults"))
    ]
    return "\n".join(lines)


KINDS = ("private", "node")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One CPU tier for the engines of a machine, beside private ones.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engines", type=int, default=3, help="of the part `neighbour` (default 3)")
    parser.add_argument("--rounds", type=int, default=5, help="behind one that warms up (default 5)")
    parser.add_argument("--lengths", type=int, nargs="+", help="of prompts, tokens")
    parser.add_argument("--cuda", action="store_true", help="one CUDA device for each engine")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of the engine, on a busy machine")
    parser.add_argument("--tier-bytes", type=int, help="of the tier of the node")
    parser.add_argument("--sessions", type=int, default=TRACE_SESSIONS, help="of the trace")
    parser.add_argument("--region", type=Path, default=MEMORY / own_name())
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the model and the logs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.lengths = given.lengths or (CUDA_LENGTHS if given.cuda else CPU_LENGTHS)
    given.tier_bytes = given.tier_bytes or (CUDA_TIER_BYTES if given.cuda else CPU_TIER_BYTES)
    given.folder = given.folder.absolute()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.serve:
        serve(given)
        return 0
    report: dict[str, float] = json.loads(given.output.read_text()) if given.output.exists() else {}
    report["load_average"] = os.getloadavg()[0]
    measures = {"neighbour": measure_neighbour, "restart": measure_restart, "trace": measure_trace}
    for part in given.parts:
        began = time.monotonic()
        report |= measures[part](given)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(report, indent=2) + "\n")
    print(render(report, given.parts, given.lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
