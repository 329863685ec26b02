"""`python -m generations [0.23 0.30 0.32 0.33]`: the table of versions and columns, and build/generations.json.

Each version's cells run in its own environment (`make install VLLM=`), two versions at once if there are two cores. Of
a version whose engine does not run here, the tests that stand for the cells run (CONTRACTS). Cells of other versions
and columns stay in the file as they are, each with the commit and the day of its run, so what was interrupted can be
continued. Ends with status 1 if a cell that was asked for failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from lanes.environments import interpreter
from lanes.rules import LOCAL_VLLM, ROOT, WITHOUT_ENGINE

from generations.cells import COLUMNS, CONTRACTS, ON_ENGINES
from generations.table import NOT_RUN, Cell, nothing_ran, read_cells, render

VERSIONS = (LOCAL_VLLM, "0.30", "0.32")  # with engines
OUTPUT = ROOT / "build" / "generations.json"
AT_ONCE_MOST = 2  # engines have one thread, and ranks of data parallel are several processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="generations", description="What Spillway does on each supported vLLM.")
    parser.add_argument("versions", nargs="*", default=[*VERSIONS, *WITHOUT_ENGINE], help="default: all")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    results = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    of_run = {"commit": commit(), "day": datetime.now(UTC).date().isoformat()}
    gap = False
    with ThreadPoolExecutor(min(AT_ONCE_MOST, len(os.sched_getaffinity(0)))) as versions:
        running = {versions.submit(run_cells, version, given.columns): version for version in given.versions}
        for done in as_completed(running):
            version = running[done]
            cells = {column: cell | of_run for column, cell in done.result().items()}
            gap |= any(cell["result"] in ("failed", NOT_RUN) for cell in cells.values())
            results[version] = results.get(version, {}) | cells
            given.output.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    print("\n" + render(dict(sorted(results.items()))))
    return int(gap)


def commit() -> str:
    """The commit of this checkout, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run_cells(version: str, columns: Sequence[str]) -> dict[str, Cell]:
    python = interpreter(version)
    if not python.exists():
        return nothing_ran(columns, f"{python} does not exist; run make install VLLM={version}")
    engines = version not in WITHOUT_ENGINE
    tests = ON_ENGINES if engines else CONTRACTS
    named = list(dict.fromkeys(chain.from_iterable(tests.get(column, ()) for column in columns)))
    if not named:
        return read_cells(columns, tests, "<testsuites/>", engines=engines)
    with tempfile.TemporaryDirectory(prefix="spillway-generations-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run(
            [str(python), "-m", "pytest", *([] if engines else ["--lanes=other-vllm"]), *named, *options],
            cwd=ROOT,
            env=os.environ,
            check=False,
        )
        if not report.exists():
            return nothing_ran(columns, "pytest ended without a report")
        return read_cells(columns, tests, report.read_text(), engines=engines)


if __name__ == "__main__":
    sys.exit(main())
