"""`python -m real_engines [0.23 0.32] [--parts poisoned ...]`: a table, and build/real-engines.json.

Ends with status 1 where something that is promised did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lanes.rules import LOCAL_VLLM, ROOT

from . import failover, poisoned, weights
from .fleet import Fleet, fleet
from .rows import Row, render

VERSIONS = (LOCAL_VLLM, "0.32")
OUTPUT = ROOT / "build" / "real-engines.json"
PARTS: dict[str, Callable[[Fleet], None]] = {part.PART: part.run for part in (poisoned, weights, failover)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="real_engines", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=[*PARTS])
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for vllm in given.versions:
        rows += run_parts(vllm, given.parts)
        OUTPUT.parent.mkdir(parents=True, exist_ok=True)
        load = {"processors": os.cpu_count(), "load": os.getloadavg()}
        OUTPUT.write_text(json.dumps({"machine": load, "rows": [row.as_json() for row in rows]}, indent=1) + "\n")
    print("\n" + render(rows))
    return int(not all(row.held for row in rows))


def run_parts(vllm: str, parts: Sequence[str]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="spillway-real-engines-") as folder, fleet(vllm, Path(folder)) as engines:
        for part in parts:
            try:
                PARTS[part](engines)
            except Exception as error:
                traceback.print_exc()
                engines.rows.add(part, "ran to its end", f"{type(error).__name__}: {error}"[:300], False)
                engines.ready()
        return engines.rows.rows


if __name__ == "__main__":
    sys.exit(main())
