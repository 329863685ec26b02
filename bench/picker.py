"""The gateway as an endpoint picker behind a real Envoy, beside the gateway itself and Envoy alone, in one run.

    python bench/picker.py [--tokens 200,8000,50000] [--connections 1,64,150] [--rates 400] [--extend] [--seconds 4]
                           [--rounds 1] [--processes 1] [--envoy-threads 1] [--envoy-calls N] [--engine-processes 1]
                           [--cores gateway=0-3,envoy=4-7,engines=8-11,load=12] [--beside NAME=CHECKOUT ...]
                           [--rows "engines alone,gateway"]
                           [--extension-picker SOURCE] [--only times,trace,restarts] [--tokenizer FOLDER]
                           [--output build/bench/picker.json]

Four mock engines are one process (gateway_load/engine.py), and the load generator is this process. One gateway serves
its own clients and Envoy's questions, from one index. The rows: the engines alone, which is the limit of every other
row; Envoy that spreads over them without asking; the gateway; Envoy that asks the gateway, which gets bodies as they
come, or keeps them until they are answered. All get the same chats, of which each is sent many times, so that its
beginning was seen before; with `--extend` each is a turn that extends such a chat by about 1,000 new tokens. Added
times are a row's percentile minus that of the engines alone in the same cell; CPU time is that of the gateway's
processes for each request. About five minutes.

A cell is a length and a number of connections, each of which sends its next request once the last one is answered: its
rate is the limit with so many connections, and its latency at this limit is connections by rate. With `--rates`, there
are further cells for the largest number of connections, in which so many requests arrive in a second, at random times;
their latencies count from the arrival.

`--processes`: of the gateway. `--envoy-calls`: of one connection to the picker, which is of one gateway process.
`--cores` pins the named parts; what is not named runs anywhere. `--beside` adds rows with the gateway of another
checkout of this repository; rows take turns. `--rows` measures only the rows with these names, beside the engines
alone; Envoy is started for the rows that need it. `--extension-picker` adds a row with the Inference Extension's own
picker (gateway_load/extension_picker.py), whose source this is.

Then two gateways of equal state get one trace of chats, one of them behind Envoy: the engines that each request reaches
are compared. And a picker's process is ended (SIGTERM), and killed, under load, while Envoy fails open; once more with
a hop in front that repeats requests which no picker has answered, and several times with an Envoy that keeps bodies.
`--only` leaves out `times`, `trace` or `restarts`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import uvloop
from bench_report import write_report
from gateway_load.extension_picker import extension_picker
from gateway_load.load_generator import generate_load, requests_of
from gateway_load.picker_cases import decisions, restarts
from gateway_load.processes import cost, free_ports, mock_engines, running
from gateway_load.routers import MODEL, routers, sources
from traces.synthetic import multi_turn

from spillway_gateway.testing.envoy import envoy_config, running_envoy

ENGINES = 4
CHATS = 16  # of each length
TURNS, NEW_TOKENS = 8, 1_000  # by which --extend extends each
WARM_SECONDS = 1.0
STREAM_EVENTS, EVENT_SECONDS = 20, 0.02  # of answers while a picker is killed
ALONE, ENVOY, GATEWAY, PICKER = "engines alone", "envoy alone", "gateway", "envoy and picker"
KEPT = "envoy keeps bodies and asks"
EXTENSION = "envoy and the extension's picker"
ROWS = (ALONE, ENVOY, GATEWAY, PICKER, KEPT, EXTENSION)
OUTPUT = Path("build/bench/picker.json")


class Cell(NamedTuple):
    """rate: of arrivals in a second; 0: each connection sends the next request after a reply."""

    row: str
    tokens: int
    connections: int
    rate: int


class Target(NamedTuple):
    """The ports to which requests of a row are sent, and the CPU seconds of its gateway's processes so far."""

    ports: list[int]
    cpu_seconds: Callable[[], float] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    if given.tokenizer is None:
        from spillway_stack.bundled_model import choose_model  # noqa: PLC0415 - not on a machine that has a folder

        given.tokenizer = Path(choose_model("", lambda line: print(line, file=sys.stderr)).folder)
    engines = free_ports(ENGINES)
    gc.disable()  # of this process: a pause here would look like one of a row
    with ExitStack() as stack:
        with _on_cores(given.cores.get("engines")):
            for at in range(given.engine_processes):
                stack.enter_context(mock_engines(engines[at :: given.engine_processes], given.tokenizer, 1, 0.0))
        report, failures = _times(given, engines) if "times" in given.only else ({}, [])
        if "trace" in given.only:
            report |= _trace(given, engines)
        if "restarts" in given.only:
            port, operations, picker = free_ports(3)
            slow = free_ports(ENGINES)  # so that a kill finds streams that have begun
            stack.enter_context(mock_engines(slow, given.tokenizer, STREAM_EVENTS, EVENT_SECONDS))
            chats = [_chat(random.Random(str(at)), 2_000) for at in range(CHATS)]
            report |= uvloop.run(
                restarts(lambda: _gateway(given, slow, (port, operations, picker)), picker, slow, chats)
            )
    others = {key: value for key, value in report.items() if key.startswith(("trace_", "picker_"))}
    print("\n".join(f"{key}: {value}" for key, value in others.items()))
    write_report(report, given.output)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_numbers, default=[200, 8_000, 50_000])
    parser.add_argument("--connections", type=_numbers, default=[1, 64, 150])
    parser.add_argument("--rates", type=_numbers, default=[])
    parser.add_argument("--extend", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--envoy-threads", type=int, default=1)
    parser.add_argument("--envoy-calls", type=int)
    parser.add_argument("--engine-processes", type=int, default=1)
    parser.add_argument("--cores", type=_cores, default={})
    parser.add_argument("--beside", type=lambda text: text.split("=", 1), action="append", default=[])
    parser.add_argument("--extension-picker", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=["times", "trace", "restarts"])
    parser.add_argument("--rows", type=_rows, default=ROWS)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    given.beside = {name: Path(folder) for name, folder in given.beside}
    return given


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _rows(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ROWS)}")
    return found


def is_chosen(row: str, names: Collection[str]) -> bool:
    """Whether a row is measured: its name, without the checkout's behind it, is one of these. That of the engines alone
    always is, as the others' added times need it."""
    name = row.partition(", ")[0]
    return name == ALONE or name in names


def _cores(text: str) -> dict[str, set[int]]:
    """The sets in `gateway=0-3,envoy=4-7,load=8`."""
    found: dict[str, set[int]] = {}
    for part in text.split(","):
        name, _, cores = part.partition("=")
        first, _, last = cores.partition("-")
        if name not in ("gateway", "envoy", "engines", "load"):
            raise argparse.ArgumentTypeError(f"{name!r} is none of gateway, envoy, engines and load")
        found[name] = set(range(int(first), int(last or first) + 1))
    return found


def _times(given: argparse.Namespace, engines: list[int]) -> tuple[dict[str, float], list[str]]:
    """The report, which is printed too, and what failed."""
    targets: dict[str, Target] = {ALONE: Target(engines)}
    pickers: dict[str, int] = {}
    with ExitStack() as stack:
        for name, checkout in {"": Path(), **given.beside}.items():
            row = f", {name}" if name else ""
            port, operations, picker = free_ports(3)
            process = stack.enter_context(_gateway(given, engines, (port, operations, picker), checkout))
            target = Target([port], partial(_cpu_seconds, process))
            targets[GATEWAY + row] = target
            for each in (PICKER, KEPT):
                targets[each + row], pickers[each + row] = target, picker
        if given.extension_picker is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spillway-bench-")))
            with _on_cores(given.cores.get("gateway")):
                picker, process = stack.enter_context(extension_picker(given.extension_picker, engines, folder))
            targets[EXTENSION], pickers[EXTENSION] = Target([], partial(_cpu_seconds, process)), picker
        if "load" in given.cores:
            os.sched_setaffinity(0, given.cores["load"])
        cells, failures = uvloop.run(_measure(given, targets, pickers))
    report = flat(cells)
    print(render(cells, report))
    return report, failures


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    return cost(process).cpu_seconds


def _trace(given: argparse.Namespace, engines: list[int]) -> dict[str, float]:
    ports = [free_ports(3) for _ in range(2)]
    trace = multi_turn(sessions=100, opening_tokens=2_000)

    async def compared() -> dict[str, float]:
        async with running_envoy(envoy_config(ports[1][2])) as url:
            return await decisions([f"http://127.0.0.1:{ports[0][0]}", url], trace)

    with _gateway(given, engines, ports[0]), _gateway(given, engines, ports[1]):
        return uvloop.run(compared())


@contextmanager
def _on_cores(cores: set[int] | None) -> Iterator[None]:
    """Run processes that are started within the block on these cores; None: on those of this process."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _gateway(
    given: argparse.Namespace, engines: Sequence[int], ports: Sequence[int], checkout: Path = Path()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the gateway of the checkout. ports: its main one, the operators' and the picker's."""
    port, operations, picker = ports
    listed = routers(given.tokenizer, processes=[given.processes], picker_port=picker)
    name = f"spillway, {given.processes} processes" if given.processes > 1 else "spillway"
    spillway = next(router for router in listed if router.name == name)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder, ExitStack() as stack:
        start = spillway.start(spillway.install(), Path(folder), port, operations, engines)
        start = replace(start, environment={**start.environment, "PYTHONPATH": sources(checkout)})
        with _on_cores(given.cores.get("gateway")):
            process = stack.enter_context(running(spillway, start, Path(folder), port))
        yield process


async def _measure(
    given: argparse.Namespace, targets: Mapping[str, Target], pickers: Mapping[str, int]
) -> tuple[dict[Cell, list[dict[str, float]]], list[str]]:
    """The figures of each round, and what failed."""
    cells: dict[Cell, list[dict[str, float]]] = {}
    failures: list[str] = []
    async with AsyncExitStack() as stack:
        engines = [f"127.0.0.1:{engine}" for engine in targets[ALONE].ports]
        first = next(iter(pickers.values()))
        configs = {ENVOY: envoy_config(first, processed=False, fail_open_to=engines)}
        for row, picker in pickers.items():  # the extension's has its health service on another port
            configs[row] = envoy_config(
                picker,
                calls_max=given.envoy_calls,
                asks_health=row != EXTENSION,
                keeps_bodies=row.startswith(KEPT),
            )
        rows = {row: target for row, target in targets.items() if is_chosen(row, given.rows)}
        with _on_cores(given.cores.get("envoy")):
            for row, config in configs.items():
                if not is_chosen(row, given.rows):
                    continue
                url = await stack.enter_async_context(running_envoy(config, given.envoy_threads))
                rows[row] = Target([int(url.rpartition(":")[2])], targets[row].cpu_seconds if row in targets else None)
        most = max(given.connections)
        loads = [(connections, 0) for connections in given.connections] + [(most, rate) for rate in given.rates]
        for number, tokens in itertools.product(range(given.rounds), given.tokens):
            bodies = [_chat(random.Random(f"{tokens} {at}"), tokens) for at in range(CHATS)]
            for connections, rate in loads:
                for row in sorted(rows, reverse=bool(number % 2)):
                    cell = Cell(row, tokens, connections, rate)
                    print(f"round {number + 1}: {cell}", file=sys.stderr)
                    sent = _extended(bodies) if given.extend else itertools.cycle(bodies)
                    measured, failed = await _run(sent, rows[row], cell, given.seconds)
                    cells.setdefault(cell, []).append(measured)
                    failures += [f"{cell}: {failed}"] if failed else []
    return cells, failures


def _chat(draw: random.Random, tokens: int) -> bytes:
    """A chat of about so many tokens, in messages of up to 2,000."""
    words = draw.choices(_WORDS, k=tokens)
    texts = [" ".join(words[at : at + 2_000]) for at in range(0, tokens, 2_000)]
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


def _extended(chats: Sequence[bytes]) -> Iterator[bytes]:
    """Chats in turn, each behind an answer and a message that are new to the gateway. After TURNS of them a chat
    starts again from its beginning."""
    draw, name = random.Random("turns"), os.urandom(4).hex()
    said = [" ".join(draw.choices(_WORDS, k=NEW_TOKENS)) for _ in range(CHATS)]
    begun = [chat[: chat.rindex(b"]")] for chat in chats]
    ends = [chat[chat.rindex(b"]") :] for chat in chats]
    for turn in itertools.count():
        if turn % TURNS == 0:
            sent = list(begun)
        for at, end in enumerate(ends):
            texts = (f"{name} {turn}", f"{name} {turn} {said[at]}")
            new = [{"role": role, "content": text} for role, text in zip(("assistant", "user"), texts, strict=True)]
            sent[at] += b", " + json.dumps(new).encode()[1:-1]
            yield sent[at] + end


async def _run(sent: Iterator[bytes], target: Target, cell: Cell, seconds: float) -> tuple[dict[str, float], str]:
    """The cell's figures, and what failed. sent: bodies."""
    requests = requests_of(sent, target.ports[0])
    used: list[float] = []

    def note() -> None:
        used.append(target.cpu_seconds() if target.cpu_seconds is not None else 0.0)

    measured = await generate_load(
        target.ports,
        requests,
        stream=False,
        concurrent=cell.connections,
        warm_seconds=WARM_SECONDS,
        seconds=seconds,
        at_start=note,
        at_end=note,
        rate=cell.rate,
    )
    whole = sorted(measured.whole)
    if len(whole) < 2:
        raise SystemExit(f"{cell}: {measured.failures} requests failed, {len(whole)} ended: {measured.first_failure}")
    cuts = quantiles(whole, n=100, method="inclusive")
    cpu = (used[1] - used[0]) / len(whole)
    figures = {"p50": median(whole), "p99": cuts[98], "rate": len(whole) / measured.seconds, "cpu": cpu}
    return figures, f"{measured.failures} requests: {measured.first_failure}" if measured.failures else ""


def _name(cell: Cell) -> str:
    row = cell.row.replace(" ", "_").translate({ord(","): None, ord("'"): None})
    name = f"{row}_{cell.tokens}_tokens_{cell.connections}_connections"
    return f"{name}_at_{cell.rate}_per_second" if cell.rate else name


def flat(cells: dict[Cell, list[dict[str, float]]]) -> dict[str, float]:
    """Figures with units in their keys; of several rounds the medians."""
    middle = {cell: {key: median(one[key] for one in rounds) for key in rounds[0]} for cell, rounds in cells.items()}
    report: dict[str, float] = {}
    for cell, figures in middle.items():
        name = _name(cell)
        report[f"{name}_requests_per_second"] = round(figures["rate"], 1)
        if cell.row not in (ALONE, ENVOY):
            report[f"{name}_cpu_milliseconds"] = round(1000 * figures["cpu"], 3)
        limit = middle[cell._replace(row=ALONE)]
        for key in ("p50", "p99"):
            report[f"{name}_{key}_milliseconds"] = round(1000 * figures[key], 3)
            report[f"{name}_added_{key}_milliseconds"] = round(1000 * (figures[key] - limit[key]), 3)
    return report


def render(cells: dict[Cell, list[dict[str, float]]], report: dict[str, float]) -> str:
    columns = "tokens | connections | arrivals/s | row | added p50 ms | added p99 ms | requests/s | CPU ms"
    lines = [f"| {columns} |", "|" + "---|" * 8]
    for cell in sorted(cells, key=lambda cell: (cell.tokens, cell.connections, cell.rate, cell.row)):
        name = _name(cell)
        added = [report[f"{name}_added_{key}_milliseconds"] for key in ("p50", "p99")]
        rate = report[f"{name}_requests_per_second"]
        cpu = report.get(f"{name}_cpu_milliseconds", "")
        arriving = cell.rate or "after each reply"
        lines.append(
            f"| {cell.tokens} | {cell.connections} | {arriving} | {cell.row} | {added[0]:.2f} | {added[1]:.2f} | "
            f"{rate:.0f} | {cpu} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
