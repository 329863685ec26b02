"""Time to the first token of a long prompt, by where its KV comes from, on this machine and in one run.

    python bench/first_token.py [--runs 5] [--tokens 4096] [--tiers nvme redis s3 fs] [--vllm 0.23 0.32]
        [--busy-loops 2]

One pair of engines per vLLM and shared tier, one pair after the other. Engine A computes each prompt (recompute), asks
it again (device hit), and once more after the others have evicted it from the device (CPU tier). Engine B, which never
computed any of them, then asks each of them once: its first hit comes from the shared tier. `fs` is vLLM's own file-
system tier under the same connector and CPU tier, for comparison. A vLLM that has tiering of its own (0.30 and newer)
is measured with that too, without Spillway's connector: with `fs`, and with Spillway's NVMe and Redis tiers as its
secondary tiers.

s3 is measured on a path that takes a while (slow_path.py): so many milliseconds of round trip as its rows say, each
with prompts of its own, beside the time in which the same objects come through the same path, as many at once, without
an engine. Whether loading pays is for the engine to decide there, as it is everywhere but here. In the last rows the
path is so narrow that it does not: the first prompt after the change, those behind it, and the first one that a
restarted engine could load. Before each of these a prompt that no engine knows is computed, as a row of its own.

Each figure is the median over `--runs` prompts after a warm-up prompt. Every hit must cover all whole
blocks of its prompt and give the same tokens as the device hit, or the run fails. Prints a table, writes
build/bench/first_token.json (flat; units are in the keys; those of other engines than 0.23's begin with their vLLM).

--busy-loops: so many processes that only compute run beside the engines while these are asked, as on a node that others
use too; the report is then build/bench/first_token_busy.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import redis
from bench_report import BenchError, run, spread_of, write_report
from bucket_objects import objects_alone, objects_in
from slow_path import SlowPath, slow_path
from stock_engines import stock_stack

from spillway_connector.tiers.disk.files.inspect import FileInspector
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_stack.engine_environments import VLLM_HERE, VLLM_VERSIONS, environment_problems
from spillway_stack.local_stack import LocalStack
from spillway_stack.ports import is_free
from spillway_stack.settings import StackSettings

BLOCK_TOKENS = 128
TAIL_TOKENS = 37  # beyond the last whole block; always computed
ANSWER_TOKENS = 16
LONG_TOKENS, SHORT_TOKENS = 4096, 2048  # with and without AVX-512
DEVICE_SPARE_BLOCKS = 4  # the device holds one prompt, so each prompt evicts the one before
STORED_SECONDS = 120.0
# This measures the cost of a load, so the engine may not decline a slow one.
ALWAYS_LOAD = ("offload.prefillTokensPerSecond=1",)
MAY_RECOMPUTE = ("offload.sharedTier.loadTimeoutSeconds=20", "offload.requestWaitSeconds=20")
# Two slow cores run two engines and the store: it is not the speed of stores that is measured.
PATIENT = tuple(
    f"offload.sharedTier.{limit}"
    for limit in ("lookupTimeoutSeconds=2", "storeQueueSecondsMax=120", "storeTimeoutSeconds=120")
)
REQUEST_SECONDS = 600.0
TIERS = ("nvme", "redis", "s3", "fs")
SHARED_ROW = {"nvme": "nvme_tier", "redis": "redis_tier", "fs": "upstream_fs_tier"}
ROUND_TRIPS_MS = (1, 10, 50)
S3_ROW = {milliseconds: f"s3_tier_at_{milliseconds}_ms" for milliseconds in ROUND_TRIPS_MS}
# The first prompt that finds the path narrow, those after it, of which some probe it, and the first one that an engine
# could load after its start.
NARROW_ROWS = ("s3_tier_narrow_first", "s3_tier_narrow_later", "s3_tier_narrow_after_a_restart")
BESIDE_NARROW = "recompute_beside_the_narrow_path"
NARROW_SHARE = 0.4  # of the bandwidth at which loading takes as long as computing
RAW_ROW = "{row}_objects_alone"
ROWS = ("recompute", "device_hit", "cpu_tier", *SHARED_ROW.values(), *S3_ROW.values(), BESIDE_NARROW, *NARROW_ROWS)
OUTPUT = Path("build/bench/first_token.json")
OUTPUT_BUSY = Path("build/bench/first_token_busy.json")
BUSY_SECONDS = 900.0  # a busy loop ends by itself then, or when its parent has ended
BUSY_LOOP = """
import os, sys, time
until, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
while time.monotonic() < until and os.getppid() == parent:
    sum(range(100_000))
"""


@dataclass(frozen=True, slots=True)
class Engines:
    """A kind of engine that is measured."""

    vllm: str
    stock: bool = False  # vLLM's own tiering instead of Spillway's connector

    @property
    def title(self) -> str:
        return f"vLLM {self.vllm}, " + ("its own tiering" if self.stock else "Spillway's connector")

    @property
    def prefix(self) -> str:
        """The prefix of these engines' keys in the report."""
        if self == Engines(VLLM_HERE):
            return ""
        return f"vllm_{self.vllm.replace('.', '_')}_" + ("stock_" if self.stock else "")


@dataclass(frozen=True, slots=True)
class Answer:
    first_token_seconds: float
    tokens: tuple[int, ...]
    cached_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time to first token by tier.")
    parser.add_argument("--runs", type=int, default=5, help="prompts per figure (default 5)")
    parser.add_argument("--tokens", type=int, default=0, help="prompt length; default 4096, 2048 without AVX-512")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    parser.add_argument("--busy-loops", type=int, default=0, help="processes that compute beside (default 0)")
    parser.add_argument("--vllm", nargs="+", choices=VLLM_VERSIONS, default=[VLLM_HERE])
    given = parser.parse_args(arguments)
    if problems := environment_problems(given.vllm):
        raise BenchError("; ".join(problems))
    tokens = given.tokens or (LONG_TOKENS if "avx512f" in Path("/proc/cpuinfo").read_text() else SHORT_TOKENS)
    measured = {
        engines: measure_all(engines, given.tiers, tokens, given.runs, given.busy_loops)
        for vllm in given.vllm
        for engines in (Engines(vllm), *([] if vllm == VLLM_HERE else [Engines(vllm, stock=True)]))
    }
    report: dict[str, float | int | str] = {
        "processor": processor(),
        "avx512": int("avx512f" in Path("/proc/cpuinfo").read_text()),
        "prompt_tokens": tokens,
        "runs_per_figure": given.runs,
        "busy_loops": given.busy_loops,
    }
    for engines, seconds in measured.items():
        report |= figures(engines.prefix, seconds)
    print(render(report, list(measured)))
    output = OUTPUT_BUSY if given.busy_loops else OUTPUT
    write_report(report, output)
    return 0


def measure_all(
    engines: Engines, tiers: Sequence[str], tokens: int, runs: int, busy_loops: int
) -> dict[str, list[float]]:
    """Seconds per row, of all tiers' pairs together."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for tier in tiers:
        if engines.stock and tier == "s3":
            continue  # it is measured with the gate, which is the connector's
        for row, measured in measure(engines, tier, tokens, runs, busy_loops).items():
            seconds[row] += measured
    return seconds


def measure(engines: Engines, tier: str, tokens: int, runs: int, busy_loops: int) -> dict[str, list[float]]:
    """Seconds per row for one pair of engines. Raises BenchError on a partial hit or a different answer."""
    blocks = tokens // BLOCK_TOKENS
    # s3: prompts for each round trip and for the narrow path, of which the first and the last stand alone.
    asked = runs * (len(ROUND_TRIPS_MS) + 1) + 2 if tier == "s3" else runs
    prompts = [make_prompt(f"{tier} {number}", tokens + TAIL_TOKENS) for number in range(asked + 1)]
    print(f"{engines.title}, {tier}: starting two engines", flush=True)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as name:
        folder = Path(name)
        settings = settings_for(engines, tier, blocks, len(prompts), folder)
        if tier == "s3":
            with slow_path(settings.s3_port()) as path:
                endpoint = f"offload.sharedTier.s3.endpoint=http://127.0.0.1:{path.port}"
                settings = replace(settings, engine_overrides=(*settings.engine_overrides, endpoint))
                with LocalStack(settings, folder) as stack, beside(busy_loops):
                    seconds = ask_all_of_s3(stack, path, prompts, tokens, runs)
        elif engines.stock:
            started = stock_stack(settings, folder, tier)
            with started.stack as stack, beside(busy_loops):
                seconds = ask_all(stack, started.model, tier, prompts, tokens)
        else:
            with LocalStack(settings, folder) as stack, beside(busy_loops):
                seconds = ask_all(stack, stack.model.served_name, tier, prompts, tokens)
    for row, measured in seconds.items():
        print(f"  {row}: {', '.join(f'{value:.3f}' for value in measured)} s", flush=True)
    return seconds


@contextmanager
def beside(busy_loops: int) -> Iterator[None]:
    """Let ``busy_loops`` processes compute within the block."""
    command = [sys.executable, "-c", BUSY_LOOP, str(BUSY_SECONDS)]
    loops = [subprocess.Popen(command) for _ in range(busy_loops)]
    try:
        yield
        if any(loop.poll() is not None for loop in loops):
            raise BenchError(f"a busy loop ended after {BUSY_SECONDS:g} s, before the last answer: fewer --runs")
    finally:
        for loop in loops:
            loop.terminate()
            loop.wait()


def ask_all(
    stack: LocalStack, model: str, tier: str, prompts: Sequence[list[int]], tokens: int
) -> dict[str, list[float]]:
    """Seconds per row, without the warm-up prompt's."""
    seconds, known = ask_first(stack, model, tier, prompts, tokens)
    for prompt, expected in zip(prompts, known, strict=True):
        answer = full_hit(f"{tier}: shared tier", ask(port_of(stack, 1), model, prompt), tokens, expected)
        seconds[SHARED_ROW[tier]].append(answer.first_token_seconds)
    return {row: measured[1:] for row, measured in seconds.items()}


def port_of(stack: LocalStack, engine: int) -> int:
    return int(stack.engines[engine].url.rsplit(":", 1)[1])


def ask_all_of_s3(
    stack: LocalStack, path: SlowPath, prompts: Sequence[list[int]], tokens: int, runs: int
) -> dict[str, list[float]]:
    """Return seconds per row, as `ask_all` does, with the second engine at each round trip and on a narrow path."""
    model, second = stack.model.served_name, port_of(stack, 1)
    seconds, known = ask_first(stack, model, "s3", prompts, tokens)
    ask(second, model, make_prompt("a prompt that no engine knows", tokens + TAIL_TOKENS))  # measures its prefill
    left = iter(zip(prompts, known, strict=True))
    prompt, expected = next(left)
    full_hit("s3: warm-up", ask(second, model, prompt), tokens, expected)
    measured = {row: values[1:] for row, values in seconds.items()}
    for milliseconds, row in S3_ROW.items():
        path.round_trip_seconds = milliseconds / 1000
        measured[row] = []
        for _ in range(runs):
            prompt, expected = next(left)
            answer = full_hit(row, ask(second, model, prompt), tokens, expected)
            measured[row].append(answer.first_token_seconds)
        measured[RAW_ROW.format(row=row)] = [
            objects_alone(path.port, tokens // BLOCK_TOKENS) for _ in range(max(3, runs))
        ]
    path.round_trip_seconds = 0.01
    block_bytes = statistics.mean([size for _, size in objects_in(stack.settings.s3_port())])
    computed = statistics.median(measured["recompute"])
    path.bytes_per_second = NARROW_SHARE * block_bytes * (tokens // BLOCK_TOKENS) / computed
    narrow = list(left)
    rows = [NARROW_ROWS[0], *[NARROW_ROWS[1]] * (len(narrow) - 2), NARROW_ROWS[2]]
    for number, (row, (prompt, expected)) in enumerate(zip(rows, narrow, strict=True)):
        if row == NARROW_ROWS[2]:
            stack.restart_engine(1)
        beside = ask(second, model, make_prompt(f"unknown {number}", tokens + TAIL_TOKENS))
        measured.setdefault(BESIDE_NARROW, []).append(beside.first_token_seconds)
        answer = ask(second, model, prompt)
        if answer.tokens != expected:
            raise BenchError(f"s3, narrow path: answered {answer.tokens}, the device hit answered {expected}")
        print(f"  {row}: {answer.cached_tokens} tokens cached", flush=True)
        measured.setdefault(row, []).append(answer.first_token_seconds)
    return measured


def ask_first(
    stack: LocalStack, model: str, tier: str, prompts: Sequence[list[int]], tokens: int
) -> tuple[dict[str, list[float]], list[tuple[int, ...]]]:
    """Have the first engine answer each prompt from each of its tiers, until all blocks are in the shared tier.

    Returns:
        Seconds per row, the warm-up prompt's first, and the answer to each prompt.
    """
    first = port_of(stack, 0)
    seconds: dict[str, list[float]] = defaultdict(list)
    known: list[tuple[int, ...]] = []
    for prompt in prompts:
        cold = ask(first, model, prompt)
        if cold.cached_tokens:
            raise BenchError(f"{tier}: a new prompt had {cold.cached_tokens} cached tokens")
        hit = full_hit(f"{tier}: device", ask(first, model, prompt), tokens, None)
        known.append(hit.tokens)
        seconds["recompute"].append(cold.first_token_seconds)
        seconds["device_hit"].append(hit.first_token_seconds)
    for prompt, expected in zip(prompts, known, strict=True):
        answer = full_hit(f"{tier}: CPU tier", ask(first, model, prompt), tokens, expected)
        seconds["cpu_tier"].append(answer.first_token_seconds)
    wait_stored(stored_counter(tier, stack), tokens // BLOCK_TOKENS * len(prompts))
    return seconds, known


def settings_for(engines: Engines, tier: str, blocks: int, prompts: int, folder: Path) -> StackSettings:
    """The CPU tier holds every prompt, the device one of them."""
    overrides = PATIENT + (MAY_RECOMPUTE if tier == "s3" else ALWAYS_LOAD)
    if tier == "fs":
        upstream = {"type": "fs", "root_dir": str(folder / "fs")}
        overrides += (f"offload.extraTiers={json.dumps([upstream])}",)
    return StackSettings(
        port=free_port(),
        shared_tier="none" if tier == "fs" else tier,
        num_cpu_blocks=(blocks + 1) * prompts,
        device_blocks=blocks + 1 + DEVICE_SPARE_BLOCKS,
        max_length=(blocks + DEVICE_SPARE_BLOCKS) * BLOCK_TOKENS,
        gateway=False,
        vllm=(engines.vllm,),
        engine_overrides=overrides,
    )


def free_port() -> int:
    for port in range(12_000, 30_000, 10):
        if all(is_free(port + distance) for distance in (0, 100, 101, 200, 201, 300, 301, 400, *range(410, 418))):
            return port
    raise BenchError("no free family of ports between 12000 and 30400")


def make_prompt(name: str, tokens: int) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(1_000, 40_000) for _ in range(tokens)]


def ask(port: int, model: str, prompt: list[int], answer_tokens: int = ANSWER_TOKENS) -> Answer:
    """One streamed greedy completion, timed from the request's first byte to the first event with a token."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    payload = json.dumps(body)
    first: float | None = None
    tokens: list[int] = []
    cached_tokens = 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", payload, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise BenchError(f"the engine answered {response.status}: {response.read(500)!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", []):
                first = first or time.perf_counter()
                tokens += choice.get("token_ids") or []
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached_tokens = details.get("cached_tokens") or cached_tokens
    finally:
        connection.close()
    if first is None:
        raise BenchError("the engine streamed no token")
    return Answer(first - begun, tuple(tokens), cached_tokens)


def full_hit(what: str, answer: Answer, tokens: int, expected: tuple[int, ...] | None) -> Answer:
    if answer.cached_tokens != tokens:
        raise BenchError(f"{what}: {answer.cached_tokens} of {tokens} tokens were cached")
    if expected is not None and answer.tokens != expected:
        raise BenchError(f"{what}: answered {answer.tokens}, the device hit answered {expected}")
    return answer


def stored_counter(tier: str, stack: LocalStack) -> Callable[[], int]:
    """Count of whole blocks in the shared tier, read from the store."""
    if tier == "redis":
        server = redis.Redis.from_url(stack.valkey_url)
        return lambda: whole_blocks(server)
    if tier == "s3":
        return lambda: len(objects_in(stack.settings.s3_port()))
    if tier == "nvme":
        parts = FileInspector(stack.folder.nvme), SlabInspector(stack.folder.nvme)
        return lambda: sum(1 for part in parts for _ in part.frames(headers=False))
    return lambda: sum(1 for file in (stack.folder.root / "fs").rglob("*.bin"))


def whole_blocks(server: redis.Redis) -> int:
    """Count whole blocks: neither the namespace document nor the stripes of large blocks, whose commit record has the
    plain name."""
    if evicted := int(server.info("stats")["evicted_keys"]):
        raise BenchError(f"the server has evicted {evicted} values: fewer --runs or --tokens fit into it")
    names = [name for name in server.scan_iter(count=1000) if name.count(b":") == 2]
    return sum(1 for name in names if not name.endswith(b":document"))


def wait_stored(stored: Callable[[], int], blocks: int) -> None:
    deadline = time.monotonic() + STORED_SECONDS
    while (count := stored()) < blocks:
        if time.monotonic() > deadline:
            raise BenchError(f"{count} of {blocks} blocks were stored within {STORED_SECONDS:g} s")
        time.sleep(0.1)


def figures(prefix: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """The part of the report of one kind of engine."""
    medians = {row: statistics.median(seconds[row]) for row in ROWS if seconds.get(row)}
    part: dict[str, float] = {}
    for row, median in medians.items():
        part |= spread_of(f"{prefix}{row}", seconds[row])
        if row != "recompute":
            part[f"{prefix}recompute_over_{row}_ratio"] = round(medians["recompute"] / median, 2)
        if (raw := seconds.get(RAW_ROW.format(row=row))) is not None:
            alone = statistics.median(raw)
            part[f"{prefix}{row}_objects_alone_seconds"] = round(alone, 4)
            part[f"{prefix}{row}_share_of_bandwidth_ratio"] = round(alone / (median - medians["device_hit"]), 2)
        if row in SHARED_ROW.values() or row in S3_ROW.values():
            part[f"{prefix}{row}_over_cpu_tier_ratio"] = round(median / medians["cpu_tier"], 2)
    return part


def render(report: dict[str, float | int | str], measured: Sequence[Engines]) -> str:
    lines = [
        f"first token of a prompt of {report['prompt_tokens']} tokens, medians of {report['runs_per_figure']} "
        f"(recompute, device, CPU tier: of all pairs of engines), {report['processor']}"
        + (f", beside {report['busy_loops']} busy loops" if report["busy_loops"] else ""),
    ]
    for engines in measured:
        header = f"{'median':>10}{'fastest':>10}{'slowest':>10}{'speed-up':>10}{'of CPU tier':>13}"
        lines += ["", f"{engines.title:36}{header}", *_rows(report, engines.prefix)]
    return "\n".join(lines)


_ALONE = ("objects_alone_seconds", "share_of_bandwidth_ratio")


def _rows(report: dict[str, float | int | str], prefix: str) -> list[str]:
    lines = []
    for row in ROWS:
        if f"{prefix}{row}_seconds" in report:
            times = [report[f"{prefix}{row}{kind}_seconds"] for kind in ("", "_fastest", "_slowest")]
            ratio = report.get(f"{prefix}recompute_over_{row}_ratio", 1.0)
            cells = "".join(f"{float(seconds):>8.3f} s" for seconds in times)
            shared = f"{prefix}{row}_over_cpu_tier_ratio" in report
            share = f"{float(report[f'{prefix}{row}_over_cpu_tier_ratio']):>12.2f}x" if shared else ""
            if f"{prefix}{row}_objects_alone_seconds" in report:
                alone, reached = (report[f"{prefix}{row}_{part}"] for part in _ALONE)
                share += f", its objects alone {float(alone):.3f} s: {100 * float(reached):.0f} % of the bandwidth"
            lines.append(f"  {row.replace('_', ' '):34}{cells}{float(ratio):>9.2f}x{share}")
    return lines


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


if __name__ == "__main__":
    run(main)
