"""`python -m generations [0.23 0.30 0.32]`: the table of versions and columns, and build/generations.json.

Each version's cells run in its own environment (`make install VLLM=`). Ends with status 1 where a cell failed or did
not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lanes.environments import interpreter
from lanes.rules import LOCAL_VLLM, ROOT

from generations.table import Cell, nothing_ran, read_cells, render

VERSIONS = (LOCAL_VLLM, "0.30", "0.32")
OUTPUT = ROOT / "build" / "generations.json"
CELLS_FILE = Path(__file__).with_name("test_cells.py")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="generations", description="What Spillway does on each supported vLLM.")
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
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
    with tempfile.TemporaryDirectory(prefix="spillway-generations-") as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [str(python), "-m", "pytest", str(CELLS_FILE), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"],
            cwd=ROOT,
            env=os.environ,
            check=False,
        )
        return read_cells(report.read_text()) if report.exists() else nothing_ran("pytest ended without a report")


if __name__ == "__main__":
    sys.exit(main())
