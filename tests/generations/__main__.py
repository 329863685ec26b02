"""`python -m generations [0.23 0.30 0.32 0.33]`: the table of versions and columns, and build/generations.json.

Each version's cells run in its own environment (`make install VLLM=`). Of a version whose engine does not run here, the
tests that stand for the cells run (CONTRACTS). Ends with status 1 where a cell failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from lanes.environments import interpreter
from lanes.rules import LOCAL_VLLM, ROOT, WITHOUT_ENGINE

from generations.cells import CONTRACTS
from generations.table import Cell, nothing_ran, read_cells, read_contracts, render

VERSIONS = (LOCAL_VLLM, "0.30", "0.32")  # with engines
OUTPUT = ROOT / "build" / "generations.json"
CELLS_FILE = Path(__file__).with_name("test_cells.py")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="generations", description="What Spillway does on each supported vLLM.")
    parser.add_argument("versions", nargs="*", default=[*VERSIONS, *WITHOUT_ENGINE], help="default: all")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    results: dict[str, dict[str, Cell]] = {}
    for version in given.versions:
        results[version] = run_cells(version)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + render(results))
    return int(any(cell["result"] in ("failed", "not run") for cells in results.values() for cell in cells.values()))


def run_cells(version: str) -> dict[str, Cell]:
    python = interpreter(version)
    if not python.exists():
        return nothing_ran(f"{python} does not exist; run make install VLLM={version}")
    tests, read = ([str(CELLS_FILE)], read_cells)
    if version in WITHOUT_ENGINE:
        tests, read = ["--lanes=other-vllm", *dict.fromkeys(chain.from_iterable(CONTRACTS.values()))], read_contracts
    with tempfile.TemporaryDirectory(prefix="spillway-generations-") as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run(
            [str(python), "-m", "pytest", *tests, *options],
            cwd=ROOT,
            env=os.environ,
            check=False,
        )
        return read(report.read_text()) if report.exists() else nothing_ran("pytest ended without a report")


if __name__ == "__main__":
    sys.exit(main())
