"""`python -m generations [0.23 0.30 0.32 0.33]`: the table of versions and columns, and build/generations.json.

Each version's cells run in its own environment (`make install VLLM=`). Of a version whose engine does not run here, the
tests that stand for the cells run (CONTRACTS). Cells of other versions and columns stay in the file as they are, each
with the commit and the day of its run, so what was interrupted can be continued. Ends with status 1 if a cell that was
asked for failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from lanes.environments import interpreter
from lanes.rules import LOCAL_VLLM, ROOT, WITHOUT_ENGINE

from generations.cells import CELLS, CONTRACTS
from generations.table import NOT_RUN, Cell, nothing_ran, read_cells, read_contracts, render

VERSIONS = (LOCAL_VLLM, "0.30", "0.32")  # with engines
OUTPUT = ROOT / "build" / "generations.json"
CELLS_FILE = Path(__file__).with_name("test_cells.py")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="generations", description="What Spillway does on each supported vLLM.")
    parser.add_argument("versions", nargs="*", default=[*VERSIONS, *WITHOUT_ENGINE], help="default: all")
    parser.add_argument("--columns", nargs="+", choices=CELLS, default=list(CELLS), metavar="COLUMN")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    results = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    gap = False
    for version in given.versions:
        of_run = {"commit": commit(), "day": datetime.now(UTC).date().isoformat()}
        cells = {column: cell | of_run for column, cell in run_cells(version, given.columns).items()}
        gap |= any(cell["result"] in ("failed", NOT_RUN) for cell in cells.values())
        results[version] = results.get(version, {}) | cells
        given.output.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    print("\n" + render(results))
    return int(gap)


def commit() -> str:
    """The commit of this checkout, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run_cells(version: str, columns: Sequence[str]) -> dict[str, Cell]:
    python = interpreter(version)
    if not python.exists():
        return nothing_ran(columns, f"{python} does not exist; run make install VLLM={version}")
    tests, read = [f"{CELLS_FILE}::{CELLS[column]}" for column in columns], read_cells
    if version in WITHOUT_ENGINE:
        named = dict.fromkeys(chain.from_iterable(CONTRACTS.get(column, ()) for column in columns))
        if not named:
            return read_contracts(columns, "<testsuites/>")
        tests, read = ["--lanes=other-vllm", *named], read_contracts
    with tempfile.TemporaryDirectory(prefix="spillway-generations-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run(
            [str(python), "-m", "pytest", *tests, *options],
            cwd=ROOT,
            env=os.environ,
            check=False,
        )
        if not report.exists():
            return nothing_ran(columns, "pytest ended without a report")
        return read(columns, report.read_text())


if __name__ == "__main__":
    sys.exit(main())
