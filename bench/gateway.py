"""The gateway beside other routers: requests/s, added time, CPU and memory, in one run over the same mock engines.

    python bench/gateway.py [--rounds 1] [--only spillway,vllm-router] [--tokenizer FOLDER] [--distinct 150000]
                            [--python FILE ...] [--processes N ...] [--concurrent 1,64]
                            [--skip cells,streamed,streams,memory] [--output build/bench/gateway.json]

Four mock engines are one process that costs some microseconds per request (gateway_load/engine.py); the load generator
is this process (gateway_load/load_generator.py). Both without a router are the row `engines alone`, the limit of every
other row. Each router has its defaults, which is one process, and the same requests: chats, questions about documents
and prompts that share nothing, in English, code and Chinese, of 150 to 8,000 tokens (gateway_load/prompts.py). With
`--processes N` the gateway with `processes: N` is a row of its own. With more rounds the order of the routers
alternates, and a figure is the median. Added times are a router's percentile minus that of the engines alone at the
same concurrency. Streams send 32 events, one each 20 ms; CPU is the router's process tree alone.

Then 1,000 streams at once, of 100 events each with 100 ms between two, and a probe each 100 ms beside them, from a
separate process (gateway_load/probing.py); and prompts of about 300 tokens that share no block, over which memory must
stay flat. By default 150,000 prompts with an index of 32 MiB, which reach its bound in a short time; the full run is
`--only spillway --skip cells,streams --distinct 1000000 --index-bytes 134217728`, ten minutes and more.

Other routers are installed on first use below ~/.cache/spillway/rivals (SPILLWAY_RIVALS); one that cannot be is left
out with the reason. PRODUCTION_STACK=DIRECTORY takes that checkout instead of GitHub. About seven minutes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop
from bench_report import write_report
from gateway_load.cells import CONCURRENT, Cell, Load, Memory, Probed, distinct_prompts, many_streams
from gateway_load.processes import DidNotStart, free_ports, mock_engines, running
from gateway_load.report import LIMIT, Results, flat, goals, render
from gateway_load.routers import CannotInstall, Router, chinese_words, routers
from gateway_load.texts import Texts

from spillway_stack.bundled_model import choose_model

ENGINES = 4
CHUNKS = 32
CHUNK_SECONDS = 0.02
STREAMS = 1_000
STREAMS_SECONDS = 6.0
STREAM_CHUNKS = 100
STREAM_CHUNK_SECONDS = 0.1
SECONDS = {1: 2.0, 64: 2.5, 512: 3.5}  # of a cell, by requests at once
OUTPUT = Path("build/bench/gateway.json")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    tokenizer = given.tokenizer or Path(choose_model("", _print).folder)
    try:
        _print("making the prompts")
        streams = (False,) if "streamed" in given.skip else (False, True)
        load = Load(Texts(chinese_words(), tokenizer), given.concurrent, streams)
    except CannotInstall as error:
        _print(f"there are no Chinese words for the prompts: {error}")
        return 1
    results = Results()
    chosen = [
        router
        for router in routers(tokenizer, pythons=given.python, processes=given.processes)
        if not given.only or any(router.name.startswith(name) for name in given.only)
    ]
    installed: list[tuple[Router, Path]] = []
    for router in chosen:
        try:
            installed.append((router, router.install()))
        except CannotInstall as error:
            results.left_out[router.name] = f"cannot be installed here: {error}"
            _print(f"{router.name}: left out, {results.left_out[router.name]}")
    gc.disable()  # of this process: a pause here would look like one of the router
    try:
        _run(given, tokenizer, installed, results, load)
    except KeyboardInterrupt:
        _print("interrupted: what follows is what was measured until then")
    print(f"\n{render(results)}\n")
    for goal, outcome in goals(results).items():
        print(f"{outcome:<10} {goal}")
    write_report(flat(results), given.output)
    return 0


def _run(
    given: argparse.Namespace, tokenizer: Path, installed: list[tuple[Router, Path]], results: Results, load: Load
) -> None:
    ports = free_ports(ENGINES)
    with mock_engines(ports, tokenizer, CHUNKS, CHUNK_SECONDS):
        for number in range(given.rounds if "cells" not in given.skip else 0):
            _print(f"round {number + 1} of {given.rounds}")
            _measure(results, LIMIT, uvloop.run(_cells(load, ports, None, None)))
            for router, python in installed if number % 2 == 0 else reversed(installed):
                _one(router, python, ports, results, load)
        if "memory" not in given.skip and any(router.name == "spillway" for router, _ in installed):
            spillway = next(router for router in routers(tokenizer, given.index_bytes) if router.name == "spillway")
            results.memory = _memory(spillway, ports, load.distinct(), given.distinct)
    if "streams" not in given.skip:
        with mock_engines(ports, tokenizer, STREAM_CHUNKS, STREAM_CHUNK_SECONDS):
            for router, python in installed:
                _one(router, python, ports, results, load, streams=True)


def _one(
    router: Router, python: Path, engines: list[int], results: Results, load: Load, *, streams: bool = False
) -> None:
    """Start the router and measure its cells, or its streams; one that does not start is left out."""
    if router.name in results.left_out:
        return
    port, other = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        start = router.start(python, Path(folder), port, other, engines)
        try:
            with running(router, start, Path(folder), port) as process:
                if not streams:
                    _measure(results, router.name, uvloop.run(_cells(load, [port], process, start.key)))
                else:
                    bodies = load.bodies(stream=True, concurrent=STREAMS)
                    targets = {router.name: f"{port}{router.health}"}
                    if router.operations:
                        targets[f"{router.name}, operations port"] = f"{other}{router.health}"
                    probed = uvloop.run(_streams(bodies, port, targets, start.key))
                    results.probed.update(probed)
                    if probed[router.name].failures:
                        _print(f"{router.name}: streams failed: {probed[router.name].first_failure[:160]!r}")
        except DidNotStart as error:
            results.left_out[router.name] = str(error)
            _print(f"{router.name}: left out, {error}")


async def _streams(bodies: Iterator[bytes], port: int, targets: dict[str, str], key: str | None) -> dict[str, Probed]:
    return await many_streams(bodies, port, targets, streams=STREAMS, seconds=STREAMS_SECONDS, key=key)


async def _cells(load: Load, ports: list[int], process: object, key: str | None) -> dict[tuple[bool, int], Cell]:
    cells = {}
    for concurrent, stream in itertools.product(load.concurrent, load.streams):
        cells[stream, concurrent] = await load.cell(
            ports,
            process,  # type: ignore[arg-type]
            stream=stream,
            concurrent=concurrent,
            seconds=SECONDS[concurrent],
            key=key,
        )
    return cells


def _measure(results: Results, name: str, cells: dict[tuple[bool, int], Cell]) -> None:
    for key, cell in cells.items():
        results.cells.setdefault((name, *key), []).append(cell)
        if cell.failures:
            _print(f"{name}: {cell.failures} failures at {key[1]}: {cell.first_failure[:160]!r}")
    for (stream, concurrent), cell in cells.items():
        if not stream:
            _print(f"{name}: {cell.requests_per_second:,.0f} requests/s at {concurrent}, p50 {cell.p50_ms:.2f} ms")
    gc.collect()


def _memory(router: Router, engines: list[int], bodies: Iterator[bytes], prompts: int) -> Memory:
    port, other = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        start = router.start(router.install(), Path(folder), port, other, engines)
        with running(router, start, Path(folder), port) as process:
            return uvloop.run(
                distinct_prompts(
                    port, process, bodies, prompts=prompts, on_tenth=lambda rss_mb: _print(f"memory: {rss_mb:.0f} MB")
                )
            )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="starts of routers' names")
    parser.add_argument("--skip", type=lambda text: text.split(","), default=[], help="cells,streamed,streams,memory")
    parser.add_argument(
        "--concurrent",
        type=lambda text: [int(each) for each in text.split(",")],
        default=list(CONCURRENT),
        metavar="NUMBERS",
        help=f"requests at once, of {', '.join(map(str, CONCURRENT))}",
    )
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="another interpreter; Spillway on it is a row of its own. That of the images is a profile-guided build, "
        "which one that was compiled on the spot seldom is",
    )
    parser.add_argument(
        "--processes",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="Spillway with `processes: N` is a row of its own",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a model; the bundled one without it")
    parser.add_argument("--distinct", type=int, default=150_000, metavar="PROMPTS")
    parser.add_argument("--index-bytes", type=int, default=32 * 1024 * 1024)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
