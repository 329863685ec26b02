"""Damages stored blocks at random, a million times; not a single wrong byte may be served.

    python bench/corruption.py [--count N] [--seed S] [--directory DIR]

Damages frames of the memory, file and slab tiers, and of blocks stored in parts, loads them through the real tiers and
compares every byte that comes back. Prints a table by kind of damage and outcome, writes build/bench/corruption.json,
and exits with 1 if a single wrong byte was served.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench_report import write_report

from spillway_connector.testing.corruption import SERVED, WRONG, Outcomes, run, shelves

RESULT = Path("build/bench/corruption.json")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=1_000_000, help="damaged stores in all")
    arguments.add_argument(
        "--seed", type=int, default=1, help="of all random choices: the same seed does the same damage"
    )
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    arguments.add_argument("--directory", type=Path, default=memory, help="for the tiers' files while it runs")
    given = arguments.parse_args()
    began = time.monotonic()

    def report_progress(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done:,} of {given.count:,}", end="", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="spillway-corruption-", dir=given.directory) as folder,
        shelves(Path(folder)) as on,
    ):
        outcomes = run(on, given.count, given.seed, report_progress)
    seconds = time.monotonic() - began
    print_table(outcomes)
    wrong = sum(times for (_, _, outcome), times in outcomes.items() if outcome == WRONG)
    print(f"\n{given.count:,} damaged stores in {seconds:.0f} s, seed {given.seed}: {wrong} loads with wrong bytes")
    write_report(as_json(outcomes, given.count, given.seed, seconds, wrong), RESULT)
    return 1 if wrong else 0


def print_table(outcomes: Outcomes) -> None:
    """One row per kind of damage, with the outcomes of its loads, the most frequent first."""
    kinds: dict[tuple[str, str], Counter[str]] = {}
    for (shelf, kind, outcome), times in outcomes.items():
        kinds.setdefault((shelf, kind), Counter())[outcome] += times
    print(f"{'stored in':<10}{'damage':<24}{'loads':>10}  outcome")
    for (shelf, kind), by_outcome in sorted(kinds.items()):
        listed = ", ".join(f"{outcome} {times:,}" for outcome, times in by_outcome.most_common())
        print(f"{shelf:<10}{kind:<24}{by_outcome.total():>10,}  {listed}")


def as_json(outcomes: Outcomes, count: int, seed: int, seconds: float, wrong: int) -> dict[str, object]:
    totals: Counter[str] = Counter()
    table: dict[str, dict[str, dict[str, int]]] = {}
    for (shelf, kind, outcome), times in sorted(outcomes.items()):
        totals[outcome] += times
        table.setdefault(shelf, {}).setdefault(kind, {})[outcome] = times
    return {
        "corruptions": count,
        "seed": seed,
        "seconds": round(seconds, 1),
        "loads": totals.total(),
        "loads_with_wrong_bytes": wrong,
        "loads_served_whole": totals[SERVED],
        "loads_by_outcome": dict(sorted(totals.items())),
        "loads_by_store_damage_and_outcome": table,
    }


if __name__ == "__main__":
    sys.exit(main())
