"""The gateway as an endpoint picker behind a real Envoy, beside the gateway itself and Envoy alone, in one run.

    python bench/picker.py [--tokens 200,8000,50000] [--connections 1,64,150] [--seconds 4] [--rounds 1]
                           [--tokenizer FOLDER] [--output build/bench/picker.json]

Four mock engines are one process (gateway_load/engine.py), and the load generator is this process. One gateway serves
its own clients and Envoy's questions, from one index. The rows: the engines alone, which is the limit of every other
row; Envoy that spreads over them without asking; the gateway; Envoy that asks the gateway. All get the same chats, of
which each is sent many times, so that its beginning was seen before. Added times are a row's percentile minus that of
the engines alone at the same length and number of connections; CPU time is that of the gateway's process for each
request. Envoy has one worker thread. Everything shares this machine's cores. About three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median, quantiles

import uvloop
from gateway_load.load_generator import generate_load, requests_of
from gateway_load.processes import cost, free_ports, mock_engines, running
from gateway_load.routers import MODEL, routers

from spillway_gateway.testing.envoy import envoy_config, running_envoy
from spillway_stack.bundled_model import choose_model

ENGINES = 4
CHATS = 16  # of each length
WARM_SECONDS = 1.5
ALONE, ENVOY, GATEWAY, PICKER = "engines alone", "envoy alone", "gateway", "envoy and picker"
OUTPUT = Path("build/bench/picker.json")
_Cell = tuple[str, int, int]  # row, tokens, connections


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[200, 8_000, 50_000])
    parser.add_argument("--connections", type=_numbers, default=[1, 64, 150])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    given.tokenizer = given.tokenizer or Path(choose_model("", lambda line: print(line, file=sys.stderr)).folder)
    engines, (port, operations, picker) = free_ports(ENGINES), free_ports(3)
    spillway = next(router for router in routers(given.tokenizer, picker_port=picker) if router.name == "spillway")
    with (
        mock_engines(engines, given.tokenizer, 1, 0.0),
        tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder,
        running(
            spillway, spillway.start(spillway.install(), Path(folder), port, operations, engines), Path(folder), port
        ) as process,
    ):
        cells = uvloop.run(_measure(given, engines, port, picker, lambda: cost(process).cpu_seconds))
    report = flat(cells)
    print(render(cells, report))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {given.output}")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


async def _measure(
    given: argparse.Namespace, engines: list[int], gateway: int, picker: int, cpu_seconds: Callable[[], float]
) -> dict[_Cell, list[dict[str, float]]]:
    cells: dict[_Cell, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        alone = envoy_config(picker, processed=False, fail_open_to=[f"127.0.0.1:{engine}" for engine in engines])
        asking = envoy_config(picker)
        ports = {
            ALONE: engines,
            ENVOY: [_port(await stack.enter_async_context(running_envoy(alone)))],
            GATEWAY: [gateway],
            PICKER: [_port(await stack.enter_async_context(running_envoy(asking)))],
        }
        for number, tokens in itertools.product(range(given.rounds), given.tokens):
            bodies = [_chat(random.Random(f"{tokens} {at}"), tokens) for at in range(CHATS)]
            for connections in given.connections:
                for row in sorted(ports, reverse=bool(number % 2)):
                    print(f"round {number + 1}: {tokens} tokens, {connections} connections, {row}", file=sys.stderr)
                    cell = await _cell(bodies, ports[row], connections, given.seconds, cpu_seconds)
                    cells.setdefault((row, tokens, connections), []).append(cell)
    return cells


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _chat(draw: random.Random, tokens: int) -> bytes:
    """A chat of about so many tokens, in messages of up to 2,000."""
    words = draw.choices(_WORDS, k=tokens)
    texts = [" ".join(words[at : at + 2_000]) for at in range(0, tokens, 2_000)]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


async def _cell(
    bodies: list[bytes], ports: Sequence[int], connections: int, seconds: float, cpu_seconds: Callable[[], float]
) -> dict[str, float]:
    """cpu_seconds: of the gateway's process so far."""
    requests: Iterator[bytes] = requests_of(itertools.cycle(bodies), ports[0])
    used: list[float] = []
    measured = await generate_load(
        ports,
        requests,
        stream=False,
        concurrent=connections,
        warm_seconds=WARM_SECONDS,
        seconds=seconds,
        at_start=lambda: used.append(cpu_seconds()),
        at_end=lambda: used.append(cpu_seconds()),
    )
    whole = sorted(measured.whole)
    if measured.failures or len(whole) < 2:
        raise SystemExit(f"{measured.failures} requests failed, {len(whole)} ended: {measured.first_failure}")
    cuts = quantiles(whole, n=100, method="inclusive")
    cpu = (used[1] - used[0]) / len(whole)
    return {"p50": median(whole), "p99": cuts[98], "rate": len(whole) / measured.seconds, "cpu": cpu}


def flat(cells: dict[_Cell, list[dict[str, float]]]) -> dict[str, float]:
    """Figures with units in their keys; of several rounds the medians."""
    middle = {cell: {key: median(one[key] for one in rounds) for key in rounds[0]} for cell, rounds in cells.items()}
    report: dict[str, float] = {}
    for (row, tokens, connections), figures in middle.items():
        name = f"{row.replace(' ', '_')}_{tokens}_tokens_{connections}_connections"
        report[f"{name}_requests_per_second"] = round(figures["rate"], 1)
        if row in (GATEWAY, PICKER):
            report[f"{name}_cpu_milliseconds"] = round(1000 * figures["cpu"], 3)
        limit = middle[ALONE, tokens, connections]
        for key in ("p50", "p99"):
            report[f"{name}_added_{key}_milliseconds"] = round(1000 * (figures[key] - limit[key]), 3)
    return report


def render(cells: dict[_Cell, list[dict[str, float]]], report: dict[str, float]) -> str:
    lines = ["| tokens | connections | row | added p50 ms | added p99 ms | requests/s | CPU ms |", "|" + "---|" * 7]
    for row, tokens, connections in sorted(cells, key=lambda cell: (cell[1], cell[2], cell[0])):
        name = f"{row.replace(' ', '_')}_{tokens}_tokens_{connections}_connections"
        added = [report[f"{name}_added_{key}_milliseconds"] for key in ("p50", "p99")]
        rate = report[f"{name}_requests_per_second"]
        cpu = report.get(f"{name}_cpu_milliseconds", "")
        lines.append(f"| {tokens} | {connections} | {row} | {added[0]:.2f} | {added[1]:.2f} | {rate:.0f} | {cpu} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
