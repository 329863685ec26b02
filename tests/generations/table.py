"""The table of versions and columns, made from pytest's reports. Pure."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from typing import NotRequired, TypedDict

from generations.cells import COLUMNS, REFUSED, RUN_VLLM

NOT_RUN = "not run"
SHOWN = {
    "passed": "yes",
    "ran": "without a model",  # tests of vLLM's scheduler or tiering passed; no engine ran
    "contract": "by contract",  # tests of what vLLM calls passed
    "refused": "refused",
    "failed": "FAILED",
    "absent": "absent",
    "engine": "needs an engine",
    NOT_RUN: NOT_RUN,
}
_WHY_CHARACTERS = 2000


class Cell(TypedDict):
    """result: a key of SHOWN. why: of what is not passed. commit, day: of its run, in the file."""

    result: str
    seconds: float
    why: str
    commit: NotRequired[str]
    day: NotRequired[str]


def read_cells(
    columns: Iterable[str], tests: Mapping[str, Sequence[str]], junit: str, *, engines: bool
) -> dict[str, Cell]:
    """Column -> result, from pytest's XML (family xunit1).

    tests: of each column, as pytest is asked for them; a column without any needs an engine. engines: whether one ran.
    """
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    return {column: _read(column, cases, tests.get(column, ()), engines=engines) for column in columns}


def _read(column: str, cases: list[ElementTree.Element], tests: Sequence[str], *, engines: bool) -> Cell:
    if not tests:
        return Cell(result="engine", seconds=0.0, why="no engine of this vLLM runs here")
    seconds = 0.0
    for test in tests:
        ran = [_case(case) for case in cases if _is_of(case, test)]
        seconds += sum(cell["seconds"] for cell in ran)
        failed = next((cell for cell in ran if cell["result"] == "failed"), None)
        if failed is not None:
            return failed
        if not any(cell["result"] == "passed" for cell in ran):
            return ran[0] if ran else Cell(result=NOT_RUN, seconds=0.0, why=f"no test of {test} ran")
    if column in REFUSED:
        result = "refused"
    elif engines:
        return Cell(result="passed", seconds=round(seconds, 1), why="")
    else:
        result = "ran" if RUN_VLLM & set(tests) else "contract"
    return Cell(result=result, seconds=round(seconds, 1), why=", ".join(tests))


def _is_of(case: ElementTree.Element, test: str) -> bool:
    """test: a case, a file or a folder."""
    path, _, name = test.partition("::")
    if name:
        return case.get("file") == path and case.get("name", "").partition("[")[0] == name
    return f"{case.get('file')}/".startswith(f"{path}/")


def nothing_ran(columns: Iterable[str], why: str) -> dict[str, Cell]:
    return {column: Cell(result=NOT_RUN, seconds=0.0, why=why) for column in columns}


def render(results: Mapping[str, Mapping[str, Cell]]) -> str:
    """Version -> its cells, as Markdown; below it why a cell is not `yes`, what was run on which day, and how long it
    took.

    A column without a cell was not run.
    """
    missing = nothing_ran(COLUMNS, "not asked for so far")
    results = {version: missing | dict(cells) for version, cells in results.items()}
    lines = [
        f"| vLLM | {' | '.join(COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
        *(
            f"| {version} | {' | '.join(SHOWN[cells[column]['result']] for column in COLUMNS)} |"
            for version, cells in results.items()
        ),
    ]
    notes = [
        f"{version}, {column}: {cells[column]['why'].splitlines()[0] if cells[column]['why'] else 'no reason given'}"
        for version, cells in results.items()
        for column in COLUMNS
        if cells[column]["result"] != "passed"
    ]
    for version, cells in results.items():
        runs = dict.fromkeys(f"{cell['commit']} on {cell['day']}" for cell in cells.values() if "commit" in cell)
        took = ", ".join(f"{column} {cells[column]['seconds']:.0f}" for column in COLUMNS)
        notes += [f"{version} ran at {', '.join(runs)}; seconds: {took}"] if runs else []
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _case(case: ElementTree.Element) -> Cell:
    """seconds: those that the case itself names, if it does: it may share engines with others."""
    result, why = "passed", ""
    for kind, meaning in (("failure", "failed"), ("error", "failed"), ("skipped", "absent")):
        for element in case.findall(kind):
            result, why = meaning, element.get("message") or element.text or ""
    named = {one.get("name"): one.get("value", "") for one in case.iter("property")}
    seconds = float(named.get("seconds", case.get("time", 0.0)))
    return Cell(result=result, seconds=round(seconds, 1), why=why[:_WHY_CHARACTERS])
