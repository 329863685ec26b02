"""Time of one first token, process by process: from the CPU tier, and from a shared tier.

    python bench/first_token_stamps.py [--tiers redis nvme] [--runs 5]

The prompts and engines of first_token.py, answered with one token each. The processes stamp what they do
(stamping/sitecustomize.py), and the processor time of their threads is read before each request and after its answer.
Prints medians over the requests: milliseconds from when the client began to send, and milliseconds of processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from first_token import (
    BLOCK_TOKENS,
    LONG_TOKENS,
    TAIL_TOKENS,
    Engines,
    ask,
    full_hit,
    make_prompt,
    settings_for,
    stored_counter,
    wait_stored,
)

from spillway_stack.engine_environments import VLLM_HERE
from spillway_stack.local_stack import LocalStack

CPU_TIER = "CPU tier"
# What is printed of each name: when the first began, when the last ended, how many there were, how long all took.
TABLE = (
    ("accepted", "API server has the request"),
    ("received", "engine core has it"),
    ("lookup", "lookup in the shared tier"),
    ("load_submitted", "load submitted"),
    ("block", "blocks into rows"),
    ("piece_sent", "pieces sent to the worker"),
    ("copy", "copies to the device"),
    ("load_ended", "load taken in"),
    ("scheduled", "prompt's end scheduled"),
    ("forward", "forward pass"),
    ("output", "output in the API server"),
    ("step", "steps of the engine core"),
    ("worker_step", "steps of the worker"),
)
PROCESSES = {"accepted": "API server", "received": "engine core", "forward": "worker"}
SERVER = "Valkey"


class Stamp(NamedTuple):
    pid: int
    name: str
    begun: float
    ended: float


class Trace(NamedTuple):
    """The stamps of one request. ``processor_ms``: by process."""

    sent_at: float
    first_token_ms: float
    stamps: list[Stamp]
    processor_ms: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where the time of one first token goes.")
    parser.add_argument("--tiers", nargs="+", choices=("redis", "nvme"), default=("redis", "nvme"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=LONG_TOKENS)
    given = parser.parse_args(arguments)
    for tier in given.tiers:
        for source, traces in measure(tier, given.tokens, given.runs).items():
            print(f"\n{source}, medians of {len(traces)} requests of {given.tokens} tokens")
            print(render(traces), flush=True)
    return 0


def measure(tier: str, tokens: int, runs: int) -> dict[str, list[Trace]]:
    blocks = tokens // BLOCK_TOKENS
    prompts = [make_prompt(f"stamps {tier} {number}", tokens + TAIL_TOKENS) for number in range(runs + 1)]
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as name, stamping(Path(name) / "stamps") as file:
        settings = settings_for(Engines(VLLM_HERE), tier, blocks, runs + 1, Path(name))
        with LocalStack(settings, Path(name)) as stack:
            first, second = (int(engine.url.rsplit(":", 1)[1]) for engine in stack.engines)
            model = stack.model.served_name
            server = server_pid(settings.valkey_port()) if tier == "redis" else None
            known = [ask(first, model, prompt, 1).tokens for prompt in prompts]

            def trace(port: int, prompt: list[int], expected: tuple[int, ...], pids: Mapping[str, int]) -> Trace:
                place = file.stat().st_size
                before = {process: processor_seconds(pid) for process, pid in pids.items()}
                sent_at = time.monotonic()
                answer = full_hit(tier, ask(port, model, prompt, 1), tokens, expected)
                spent = {name: (processor_seconds(pid) - before[name]) * 1e3 for name, pid in pids.items()}
                return Trace(sent_at, answer.first_token_seconds * 1e3, stamps_of(file, place), spent)

            def trace_all(port: int) -> list[Trace]:
                """Return the traces of all requests but the first, which only shows which processes there are."""
                warm = trace(port, prompts[0], known[0], {})
                pids = {PROCESSES[stamp.name]: stamp.pid for stamp in warm.stamps if stamp.name in PROCESSES}
                if server is not None:
                    pids[SERVER] = server
                return [trace(port, *pair, pids) for pair in zip(prompts[1:], known[1:], strict=True)]

            from_cpu = trace_all(first)
            wait_stored(stored_counter(tier, stack), blocks * len(prompts))
            return {CPU_TIER: from_cpu, tier: trace_all(second)}


@contextmanager
def stamping(file: Path) -> Iterator[Path]:
    """Let processes that are started within the block stamp into ``file``."""
    file.touch()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "stamping"), *([before] if before else [])])
    os.environ["STAMP_FILE"] = str(file)
    try:
        yield file
    finally:
        del os.environ["STAMP_FILE"], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def stamps_of(file: Path, place: int) -> list[Stamp]:
    """Return the stamps that follow byte ``place`` of the file."""
    with file.open() as stream:
        stream.seek(place)
        lines = [line.split() for line in stream]
    return [Stamp(int(pid), name, float(begun), float(ended)) for pid, name, begun, ended in lines]


def server_pid(port: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"valkey-server" in words[0] and words[0].rstrip().endswith(f":{port}".encode()):
            return int(folder.name)
    raise RuntimeError(f"no Valkey on port {port}")


def processor_seconds(pid: int) -> float:
    """The processor time of all threads of the process that run now."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def render(traces: Sequence[Trace]) -> str:
    def median(of: Callable[[Trace], float]) -> float:
        return statistics.median(of(trace) for trace in traces)

    lines = [f"{'ms':>32}{'begun':>8}{'ended':>8}{'count':>7}{'together':>10}"]
    for name, title in TABLE:
        found = [[stamp for stamp in trace.stamps if stamp.name == name] for trace in traces]
        if not all(found):
            continue
        columns: dict[str, list[float]] = defaultdict(list)
        for trace, stamps in zip(traces, found, strict=True):
            columns["begun"].append((min(stamp.begun for stamp in stamps) - trace.sent_at) * 1e3)
            columns["ended"].append((max(stamp.ended for stamp in stamps) - trace.sent_at) * 1e3)
            columns["count"].append(len(stamps))
            columns["together"].append(sum(stamp.ended - stamp.begun for stamp in stamps) * 1e3)
        begun, ended, count, together = (statistics.median(column) for column in columns.values())
        lines.append(f"{title:>32}{begun:>8.1f}{ended:>8.1f}{count:>7.0f}{together:>10.1f}")
    lines.append(f"{'first token at the client':>32}{median(lambda trace: trace.first_token_ms):>8.1f}")
    for process in traces[0].processor_ms:
        spent = median(lambda trace, process=process: trace.processor_ms[process])  # type: ignore[misc]
        lines.append(f"{'processor time, ' + process:>32}{spent:>8.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
