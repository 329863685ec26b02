"""Any bench of an older commit and of this tree, in turns: what the changes since then cost.

    python bench/beside_commit.py 3a173165 scheduler_step [--rounds 6] [--keys cpu_p50] [-- --steps 300 --only ready]

`git worktree` checks the commit out into a temporary folder. Each round runs `bench/NAME.py` once in each tree, with
the arguments behind `--`, the sources of that tree before all others, and the packages that are installed here; a
commit that needs other packages ends with its own error. What takes turns is a whole run, so a bench should be narrowed
to less than a minute. The ratio new / old is the median over rounds, with its 95 % interval; "old alone" is how far the
old commit's own rounds lie from their median. A ratio outside of that is marked with `*`. Writes
build/bench/beside_commit.json (flat; each key of the bench that both trees report, and `_old`, `_new`, `_ratio`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_report import BenchError, run, write_report
from paired_rounds import ROUNDS_LEAST, Interval, ordered, paired_ratio

OUTPUT = Path("build/bench/beside_commit.json")
REPORTS = Path("build/bench")  # in either tree
OLD, NEW = "old", "new"

Report = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of the bench: medians over rounds, the ratio new / old, and old rounds over their median."""

    old: float
    new: float
    ratio: Interval
    least: float
    most: float

    @property
    def is_outside(self) -> bool:
        """Whether the old commit alone does not explain the ratio."""
        return not self.least <= self.ratio.median <= self.most


def compare(rounds: Sequence[Mapping[str, Report]], pattern: str = "") -> dict[str, Compared]:
    """Compare the figures that both trees report in every round.

    Args:
        rounds: The reports of each round, by tree (`old`, `new`).
        pattern: A regular expression that keys have to contain.

    Returns:
        By key. Figures that are 0 or less in any round have no ratio and are left out.
    """
    reports = [one[tree] for one in rounds for tree in (OLD, NEW)]
    keys = [key for key in reports[0] if re.search(pattern, key) and all(one.get(key, 0) > 0 for one in reports)]
    compared = {}
    for key in keys:
        old, new = ([one[tree][key] for one in rounds] for tree in (OLD, NEW))
        middle = statistics.median(old)
        ratio = paired_ratio(new, old, random.Random(0))
        compared[key] = Compared(middle, statistics.median(new), ratio, min(old) / middle, max(old) / middle)
    return compared


@contextmanager
def checked_out(commit: str, repository: Path) -> Iterator[Path]:
    """The commit in a folder of its own, until the end.

    Raises:
        BenchError: git does not know the commit.
    """
    with tempfile.TemporaryDirectory(prefix="spillway-beside-") as folder:
        tree = Path(folder) / "tree"
        added = subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
        )
        if added.returncode:
            raise BenchError(f"git cannot check out {commit!r}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=repository, check=True)


def report_of(tree: Path, bench: str, arguments: Sequence[str]) -> Report:
    """Run the tree's bench, and return the numbers of the report that it writes.

    Raises:
        BenchError: The bench fails, or it writes no report.
    """
    before = {path: path.stat().st_mtime_ns for path in (tree / REPORTS).glob("*.json")}
    sources = [*sorted(tree.glob("*/src")), *sorted(tree.glob("services/*/src")), tree / "tests"]
    ended = subprocess.run(
        [sys.executable, f"bench/{bench}.py", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise BenchError(f"{bench} of {tree} ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
    written = [path for path in (tree / REPORTS).glob("*.json") if before.get(path) != path.stat().st_mtime_ns]
    if not written:
        raise BenchError(f"{bench} of {tree} wrote no report into {REPORTS}")
    report = json.loads(written[0].read_text(encoding="utf-8"))
    return {key: value for key, value in report.items() if isinstance(value, int | float)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="A bench of an older commit and of this tree, in turns.",
        epilog="Arguments behind -- are the bench's.",
    )
    parser.add_argument("commit", help="what git can check out")
    parser.add_argument("bench", help="the name of a file of bench/ without .py, in both trees")
    parser.add_argument("--rounds", type=int, default=ROUNDS_LEAST, help=f"at least {ROUNDS_LEAST}, even")
    parser.add_argument("--keys", default="", help="a regular expression that keys of the report have to contain")
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, passed_on = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if given.rounds < ROUNDS_LEAST or given.rounds % 2:
        raise BenchError(f"--rounds has to be even and at least {ROUNDS_LEAST}")
    rounds: list[dict[str, Report]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the checkout is removed
    with checked_out(given.commit, Path()) as old:
        trees = {OLD: old, NEW: Path().absolute()}
        for number in range(given.rounds):
            reports = {name: report_of(trees[name], given.bench, passed_on) for name in ordered([*trees], number)}
            rounds.append(reports)
            print(f"round {number + 1} of {given.rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    compared = compare(rounds, given.keys)
    if not compared:
        raise BenchError("no figure is in all reports")
    width = max(map(len, compared))
    print(f"\n{'':{width}} {'old':>11} {'new':>11}  new / old               old alone")
    for key, one in compared.items():
        ratio = f"{one.ratio.median:.3f} ({one.ratio.low:.3f} to {one.ratio.high:.3f})"
        mark = " *" if one.is_outside else ""
        print(f"{key:{width}} {one.old:>11.6g} {one.new:>11.6g}  {ratio:23} {one.least:.3f} to {one.most:.3f}{mark}")
    report: dict[str, object] = {"commit": given.commit, "bench": given.bench, "rounds": given.rounds}
    for key, one in compared.items():
        report |= {f"{key}_old": one.old, f"{key}_new": one.new, **one.ratio.figures(f"{key}_ratio")}
    write_report(report, OUTPUT)
    return 0


if __name__ == "__main__":
    run(main)
