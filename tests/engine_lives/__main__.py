"""`python -m engine_lives [--count 10000] [--seed 0] [--shapes full chunks ...]`
and, with `--races 20`, resets during copies, each in one fixed order, on a real NVMe tier, and hits of blocks whose
load fails; with `--stalls 20`, a tier that stalls while a prompt is computed, in simulated time; with `--partings 20`,
what prompts with windows and with states find; with `--drawn 100`, schedules of so many shapes that are drawn, too."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.update(PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    from engine_lives.drawn_shapes import drawn_shape
    from engine_lives.engine import RANDOM_SHAPES, SHAPES, Engine
    from engine_lives.partings import PARTINGS
    from engine_lives.resets import RACES
    from engine_lives.stalls import STALLS
    from engine_lives.step_races import STEP_RACES

    parser = argparse.ArgumentParser(prog="engine_lives", description="Random schedules on vLLM's real scheduler.")
    parser.add_argument("--count", type=int, default=10_000, help="schedules of each shape (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default 0)")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=RANDOM_SHAPES)
    parser.add_argument(
        "--races", type=int, default=0, help="of resets and hits during copies, each in one fixed order, first"
    )
    parser.add_argument(
        "--stalls", type=int, default=0, help="of a tier that is read while a prompt is computed, first"
    )
    parser.add_argument("--partings", type=int, default=0, help="of prompts with windows and with states, first")
    parser.add_argument("--without", nargs="+", choices=("failures", "resets"), default=[], help="to narrow a fault")
    parser.add_argument("--drawn", type=int, default=0, help="shapes of groups and blocks, the first by --seed")
    given = parser.parse_args(arguments)
    for shape, cases, count, what in (
        ("nvme", RACES, given.races, "races"),
        ("layers-hit", STEP_RACES, given.races, "races"),
        ("meetings", STALLS, given.stalls, "prompts"),
        *((shape, cases, given.partings, "partings") for shape, cases in PARTINGS.items()),
    ):
        if count:
            with tempfile.TemporaryDirectory() as folder:
                engine = Engine(SHAPES[shape], Path(folder))
                for name, case in cases.items():
                    for number in range(count):
                        case(engine, number)
                    print(f"{name}: {count} {what}", flush=True)
                engine.close()
    for name in given.shapes:
        started = time.monotonic()
        engine = _lived(name, SHAPES[name], given, given.seed)
        figures = engine.figures
        print(
            f"{name}: {given.count} schedules, {figures.steps} steps, {figures.checked_tokens} tokens of KV checked, "
            f"{figures.accepted} drafted tokens accepted, {figures.rejected} rejected, "
            f"{figures.preemptions} preemptions, {figures.aborted} aborts, {figures.failures} steps with failed loads, "
            f"{len(engine.copiers[next(iter(engine.copiers))].submitted_ids)} stores, "
            f"{len(list(engine.copiers.values())[1].submitted_ids)} loads or pieces of them, "
            f"{figures.early_loads} begun early, {figures.step_loads} within steps, "
            f"{figures.steps_taken_back} steps taken back, {engine.jumps} jumps to what was loaded meanwhile, "
            f"{figures.resets} resets, {figures.resets_refused} refused, "
            f"{figures.resets_of_all} of all, {figures.pauses} pauses, "
            f"{figures.resets_forced} for new weights, {figures.rows_kept_back} rows kept back, "
            f"{figures.overtakes} times another request was next, "
            f"{figures.fair_steps} steps without a flood, {figures.flood_steps} short ones, "
            f"{figures.settled} chunks settled, "
            f"{figures.kept_for_waiting} times a chunk was kept for a request that waited; "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    for number in range(given.seed, given.seed + given.drawn):
        shape = drawn_shape(number)
        checked = _lived(f"drawn shape {number}, {shape}", shape, given, given.count * number).figures.checked_tokens
        print(f"drawn shape {number}: {given.count} schedules, {checked} tokens of KV checked", flush=True)
    return 0


def _lived(name: str, shape: Any, given: argparse.Namespace, first_seed: int) -> Any:
    """An engine of this shape that has lived through the schedules, and is closed."""
    from engine_lives.engine import Engine
    from engine_lives.schedules import run

    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(shape, Path(folder))
        engine.may_fail, engine.may_reset = "failures" not in given.without, "resets" not in given.without
        for seed in range(first_seed, first_seed + given.count):
            try:
                run(engine, seed)
            except BaseException:
                print("\n".join(engine.trace[-200:]), file=sys.stderr)
                print(f"{name}: schedule {seed} (counting on from {first_seed})", file=sys.stderr)
                raise
        engine.close()
    return engine


if __name__ == "__main__":
    sys.exit(main())
