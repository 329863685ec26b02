"""`python -m real_engines [0.23 0.32] [--parts poisoned ...]`: a table, and build/real-engines.json.

Ends with status 1 where something that is promised did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from lanes.rules import LOCAL_VLLM, ROOT

from . import agents, failover, kills, legs, lost_index, pauses, poisoned, tenants, weights
from .fleet import fleet
from .rows import Row, render

VERSIONS = (LOCAL_VLLM, "0.32")
FOLDER = "spillway-real-engines-"
OUTPUT = ROOT / "build" / "real-engines.json"
PARTS = {part.PART: part for part in (poisoned, agents, pauses, lost_index, weights, failover, kills, legs, tenants)}


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
    """Parts one after the other on one fleet, as long as they need the same engines."""
    rows: list[Row] = []
    for overrides, group in itertools.groupby(parts, lambda part: tuple(getattr(PARTS[part], "OVERRIDES", ()))):
        with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, fleet(vllm, Path(folder), overrides) as engines:
            for part in group:
                try:
                    PARTS[part].run(engines)
                except Exception as error:
                    traceback.print_exc()
                    engines.rows.add(part, "ran to its end", f"{type(error).__name__}: {error}"[:300], False)
                    engines.ready()
            rows += engines.rows.rows
    return rows


if __name__ == "__main__":
    sys.exit(main())
