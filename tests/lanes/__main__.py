"""`python -m lanes unit quick full [-- pytest's arguments]`: one pytest for each lane, one closing line for them all.

The lane `other-vllm` is two for each version that --vllm names: the tests that its own interpreter runs, and those over
a stack with engines of that version, if they run here.

Separate processes keep vLLM out of the unit tests and real engines apart from all other tests. A stack of engines has
the machine for itself; all other lanes use several cores. Every lane runs, even after a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from .environments import interpreter
from .rules import CELLS_TESTED, OTHER_VLLM, ROOT, STACK_TESTS, WITHOUT_ENGINE, Lane

# A worker of the quick lane holds vLLM and a Valkey: 1.5 GB. An engine takes up to 5 GB, and the start of one, which is
# most of its test, uses one core. A file's tests share engines, or a run of vLLM's own tests, so they stay together.
WORKERS_MOST = {Lane.UNIT: 8, Lane.QUICK: 4, Lane.ENGINE: 2, Lane.OTHER_VLLM: 2}
# Tests of these lanes wait for a disk, a server or a deadline during a good part of their time.
WORKERS_PER_CORE = {Lane.UNIT: 2, Lane.QUICK: 2}
WHOLE_FILES = {Lane.QUICK, Lane.ENGINE, Lane.OTHER_VLLM}
# In the order in which they are found: by default files of few tests come last, and a slow one would run alone.
BY_FILE = ("loadfile", "--no-loadscope-reorder")
# Compiled modules and rewritten assertions are kept in __pycache__: 9 s of CPU for each worker of the unit lane.
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
SLOWEST = 30
CELLS = "tests/generations"
NO_TESTS = 5  # pytest's exit status
OUTCOMES = ("failed", "error", "passed", "skipped")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lanes", description="Runs lanes of the test suite, one after the other.")
    parser.add_argument("lanes", nargs="+", type=Lane, choices=list(Lane), metavar="LANE")
    parser.add_argument("--profile", default="quick", help="of Hypothesis: quick (default) or full")
    parser.add_argument("--workers", type=int, help="default: one or two for each core, by lane")
    parser.add_argument("--vllm", default="", help="versions for the lane other-vllm, separated by commas")
    given, rest = parser.parse_known_args(arguments)
    more = [word for word in rest if word != "--"]
    began = time.monotonic()
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    took: list[str] = []
    broken: list[str] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="spillway-lanes-") as folder:
        for number, run in enumerate(planned(given.lanes, given.vllm, given.profile, given.workers, more)):
            report = Path(folder, str(number))
            run_began = time.monotonic()
            status = subprocess.run(
                [*run.command, "--lanes-report", str(report)],
                cwd=ROOT,
                env={**os.environ, **KEEP_BYTECODE, **run.environment},
                check=False,
            ).returncode
            took.append(f"{run.name} {time.monotonic() - run_began:.0f} s")
            failed |= status not in (0, NO_TESTS)
            if report.exists():
                found = json.loads(report.read_text())
                counts.update(found["counts"])
                seconds |= {run.prefix + name: one for name, one in found["seconds"].items()}
                broken += [run.prefix + name for name in found["broken"]]
            else:
                counts["error"] += 1  # pytest ended before it could count
    print(slowest(seconds), end="")
    print("lanes: " + ", ".join(took))
    for name in broken:
        print(f"BROKEN {name}")
    print(closing_line(counts, time.monotonic() - began), flush=True)
    return int(failed)


@dataclass(frozen=True)
class Run:
    """One pytest."""

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    prefix: str = ""  # of its tests' names, where the same tests run more than once


def planned(lanes: Sequence[Lane], vllm: str, profile: str, workers: int | None, more: Sequence[str]) -> list[Run]:
    runs = []
    for lane in lanes:
        if lane is not Lane.OTHER_VLLM:
            runs.append(Run(lane, command(lane, profile, workers, more)))
            continue
        for version in filter(None, vllm.split(",")):
            prefix = f"vLLM {version}: "
            # By name: of folders that pytest searches by default it imports the conftest, whatever it then ignores.
            cells = CELLS_TESTED if version in OTHER_VLLM[CELLS] else ()
            listed = [f"{CELLS}/test_cells.py::{cell}" for cell in cells]  # first, as they take minutes
            listed += [named for named, versions in OTHER_VLLM.items() if version in versions and named != CELLS]
            own = command(lane, profile, workers, [*more, *listed], python=interpreter(version))
            runs.append(Run(f"vLLM {version}", own, prefix=prefix))
            if version in WITHOUT_ENGINE:
                continue
            stack = [sys.executable, "-m", "pytest", *STACK_TESTS]
            runs.append(Run(f"stack on vLLM {version}", stack, {"VLLM": version}, prefix))
    return runs


def command(
    lane: Lane, profile: str, workers: int | None, more: Sequence[str], python: Path = Path(sys.executable)
) -> list[str]:
    suitable = len(os.sched_getaffinity(0)) * WORKERS_PER_CORE.get(lane, 1)
    parallel = min(suitable if workers is None else workers, WORKERS_MOST.get(lane, 1))
    spread = BY_FILE if lane in WHOLE_FILES else ("worksteal",)
    return [
        *(str(python), "-m", "pytest", "--lanes", lane),
        *("--hypothesis-profile", profile),
        *(("-n", str(parallel), "--dist", *spread) if parallel > 1 else ()),
        *more,
    ]


def slowest(seconds: dict[str, float]) -> str:
    """The slowest tests of all lanes, each with its fixtures."""
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])[:SLOWEST]
    return f"\nslowest {len(longest)} of {len(seconds)} tests\n" + "".join(
        f"{s:9.2f} s  {name}\n" for name, s in longest
    )


def closing_line(counts: Counter[str], seconds: float) -> str:
    """Sum up all lanes in pytest's format."""
    named = [*OUTCOMES, *sorted(set(counts) - set(OUTCOMES))]
    outcomes = ", ".join(f"{counts[name]} {name}" for name in named if counts[name]) or "no tests ran"
    return f" {outcomes} in {seconds:.2f}s ({timedelta(seconds=int(seconds))}) ".center(80, "=")


if __name__ == "__main__":
    sys.exit(main())
