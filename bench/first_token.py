"""Time to the first token of a long prompt, by where its KV comes from, on this machine and in one run.

    python bench/first_token.py [--runs 5] [--tokens 4096] [--tiers nvme redis fs]

One pair of engines per shared tier, one pair after the other. Engine A computes each prompt (recompute), asks it again
(device hit), and once more after the others have evicted it from the device (CPU tier). Engine B, which never computed
any of them, then asks each of them once: its first hit comes from the shared tier. `fs` is vLLM's own file-system tier
under the same connector and CPU tier, for comparison.

Each figure is the median over `--runs` prompts after a warm-up prompt. Every hit must cover all whole
blocks of its prompt and give the same tokens as the device hit, or the run fails. Prints a table, writes
build/bench/first_token.json (flat; units are in the keys).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from spillway_connector.tiers.disk.files.inspect import FileInspector
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_stack.local_stack import LocalStack
from spillway_stack.ports import is_free
from spillway_stack.settings import StackSettings

BLOCK_TOKENS = 128
TAIL_TOKENS = 37  # beyond the last whole block; always computed
ANSWER_TOKENS = 16
LONG_TOKENS, SHORT_TOKENS = 4096, 2048  # with and without AVX-512
DEVICE_SPARE_BLOCKS = 4  # the device holds one prompt, so each prompt evicts the one before
STORED_SECONDS = 60.0
# This measures the cost of a load, so the engine may not decline a slow one.
ALWAYS_LOAD = ("offload.prefillTokensPerSecond=1", "offload.sharedTier.lookupTimeoutSeconds=2")
REQUEST_SECONDS = 600.0
TIERS = ("nvme", "redis", "fs")
SHARED_ROW = {"nvme": "nvme_tier", "redis": "redis_tier", "fs": "upstream_fs_tier"}
ROWS = ("recompute", "device_hit", "cpu_tier", *SHARED_ROW.values())
OUTPUT = Path("build/bench/first_token.json")


@dataclass(frozen=True, slots=True)
class Answer:
    first_token_seconds: float
    tokens: tuple[int, ...]
    cached_tokens: int


class BenchError(Exception):
    """A figure would not measure what its row names."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time to first token by tier.")
    parser.add_argument("--runs", type=int, default=5, help="prompts per figure (default 5)")
    parser.add_argument("--tokens", type=int, default=0, help="prompt length; default 4096, 2048 without AVX-512")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    given = parser.parse_args(arguments)
    tokens = given.tokens or (LONG_TOKENS if "avx512f" in Path("/proc/cpuinfo").read_text() else SHORT_TOKENS)
    seconds: dict[str, list[float]] = defaultdict(list)
    for tier in given.tiers:
        for row, measured in measure(tier, tokens, given.runs).items():
            seconds[row] += measured
    report = make_report(seconds, tokens, given.runs)
    print(render(report))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {OUTPUT}")
    return 0


def measure(tier: str, tokens: int, runs: int) -> dict[str, list[float]]:
    """Seconds per row for one pair of engines. Raises BenchError on a partial hit or a different answer."""
    blocks = tokens // BLOCK_TOKENS
    prompts = [make_prompt(f"{tier} {number}", tokens + TAIL_TOKENS) for number in range(runs + 1)]
    print(f"{tier}: starting two engines", flush=True)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        stack = LocalStack(settings_for(tier, blocks, runs + 1, Path(folder)), folder)
        with stack:
            first, second = (int(engine.url.rsplit(":", 1)[1]) for engine in stack.engines)
            model = stack.model.served_name
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
            wait_stored(stored_counter(tier, stack, Path(folder)), blocks * len(prompts))
            for prompt, expected in zip(prompts, known, strict=True):
                answer = full_hit(f"{tier}: shared tier", ask(second, model, prompt), tokens, expected)
                seconds[SHARED_ROW[tier]].append(answer.first_token_seconds)
    for row, measured in seconds.items():
        print(f"  {row}: {', '.join(f'{value:.3f}' for value in measured[1:])} s", flush=True)
    return {row: measured[1:] for row, measured in seconds.items()}


def settings_for(tier: str, blocks: int, prompts: int, folder: Path) -> StackSettings:
    """The CPU tier holds every prompt, the device one of them."""
    overrides = ALWAYS_LOAD
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
        engine_overrides=overrides,
    )


def free_port() -> int:
    for port in range(12_000, 30_000, 10):
        if all(is_free(port + distance) for distance in (0, 100, 101, 200, 201, 300, 301, 400)):
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


def stored_counter(tier: str, stack: LocalStack, folder: Path) -> Callable[[], int]:
    """Count of whole blocks in the shared tier, read from the store."""
    if tier == "redis":
        server = redis.Redis.from_url(stack.valkey_url)
        return lambda: whole_blocks(server)
    if tier == "nvme":
        parts = FileInspector(stack.folder.nvme), SlabInspector(stack.folder.nvme)
        return lambda: sum(1 for part in parts for _ in part.frames(headers=False))
    return lambda: sum(1 for file in (folder / "fs").rglob("*.bin"))


def whole_blocks(server: redis.Redis) -> int:
    """Without the namespace document and the stripes of large blocks, whose commit record has the plain name."""
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


def make_report(seconds: dict[str, list[float]], tokens: int, runs: int) -> dict[str, float | int | str]:
    medians = {row: statistics.median(seconds[row]) for row in ROWS if seconds.get(row)}
    report: dict[str, float | int | str] = {
        "processor": processor(),
        "avx512": int("avx512f" in Path("/proc/cpuinfo").read_text()),
        "prompt_tokens": tokens,
        "runs_per_figure": runs,
    }
    for row, median in medians.items():
        report[f"{row}_seconds"] = round(median, 4)
        report[f"{row}_fastest_seconds"] = round(min(seconds[row]), 4)
        report[f"{row}_slowest_seconds"] = round(max(seconds[row]), 4)
        if row != "recompute":
            report[f"recompute_over_{row}_ratio"] = round(medians["recompute"] / median, 2)
        if row in SHARED_ROW.values():
            report[f"{row}_over_cpu_tier_ratio"] = round(median / medians["cpu_tier"], 2)
    return report


def render(report: dict[str, float | int | str]) -> str:
    lines = [
        f"first token of a prompt of {report['prompt_tokens']} tokens, medians of {report['runs_per_figure']} "
        f"(recompute, device, CPU tier: of all pairs of engines), {report['processor']}",
        "",
        f"{'':18}{'median':>10}{'fastest':>10}{'slowest':>10}{'speed-up':>10}{'of CPU tier':>13}",
    ]
    for row in ROWS:
        if f"{row}_seconds" in report:
            figures = [report[f"{row}{kind}_seconds"] for kind in ("", "_fastest", "_slowest")]
            ratio = report.get(f"recompute_over_{row}_ratio", 1.0)
            cells = "".join(f"{float(figure):>8.3f} s" for figure in figures)
            shared = row in SHARED_ROW.values()
            share = f"{float(report[f'{row}_over_cpu_tier_ratio']):>12.2f}x" if shared else ""
            lines.append(f"{row.replace('_', ' '):18}{cells}{float(ratio):>9.1f}x{share}")
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"first_token: {error}", file=sys.stderr)
        sys.exit(1)
