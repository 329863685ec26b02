"""From pytest's reports to the table of versions and columns. Pure."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from generations.cells import CELLS, CONTRACTS

NOT_RUN = "not run"
SHOWN = {
    "passed": "yes",
    "contract": "by contract",  # tests of vLLM's scheduler and of its interfaces passed; no engine ran
    "failed": "FAILED",
    "unsupported": "no",
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


def read_cells(columns: Sequence[str], junit: str) -> dict[str, Cell]:
    """Column -> result, from pytest's XML of test_cells.py; a column without a test case was not run."""
    found = {case.get("name", ""): case for case in ElementTree.fromstring(junit).iter("testcase")}
    return {column: _cell(found.get(CELLS[column])) for column in columns}


def read_contracts(columns: Sequence[str], junit: str) -> dict[str, Cell]:
    """Column -> result, from pytest's XML (family xunit1) of the tests that CONTRACTS names."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    return {column: _contract(cases, CONTRACTS.get(column, ())) for column in columns}


def _contract(cases: list[ElementTree.Element], tests: tuple[str, ...]) -> Cell:
    if not tests:
        return Cell(result="engine", seconds=0.0, why="no engine of this vLLM runs here")
    seconds = 0.0
    for test in tests:
        ran = [case for case in cases if f"{case.get('file')}/".startswith(f"{test}/")]
        cells = [_cell(case) for case in ran]
        seconds += sum(cell["seconds"] for cell in cells)
        failed = next((cell for cell in cells if cell["result"] == "failed"), None)
        if failed is not None:
            return failed
        if not any(cell["result"] == "passed" for cell in cells):
            return Cell(result=NOT_RUN, seconds=0.0, why=f"no test of {test} ran")
    return Cell(result="contract", seconds=round(seconds, 1), why=", ".join(tests))


def nothing_ran(columns: Sequence[str], why: str) -> dict[str, Cell]:
    return {column: Cell(result=NOT_RUN, seconds=0.0, why=why) for column in columns}


def render(results: Mapping[str, Mapping[str, Cell]]) -> str:
    """Version -> its cells, as Markdown; below it why a cell is not `yes`, and what was run on which day.

    A column without a cell was not run.
    """
    missing = nothing_ran(list(CELLS), "not asked for so far")
    results = {version: missing | dict(cells) for version, cells in results.items()}
    lines = [
        f"| vLLM | {' | '.join(CELLS)} |",
        f"| --- |{' --- |' * len(CELLS)}",
        *(
            f"| {version} | {' | '.join(SHOWN[cells[column]['result']] for column in CELLS)} |"
            for version, cells in results.items()
        ),
    ]
    notes = [
        f"{version}, {column}: {cells[column]['why'].splitlines()[0] if cells[column]['why'] else 'no reason given'}"
        for version, cells in results.items()
        for column in CELLS
        if cells[column]["result"] != "passed"
    ]
    runs = {
        version: dict.fromkeys(f"{cell['commit']} on {cell['day']}" for cell in cells.values() if "commit" in cell)
        for version, cells in results.items()
    }
    notes += [f"{version} ran at {', '.join(of_version)}" for version, of_version in runs.items() if of_version]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(case: ElementTree.Element | None) -> Cell:
    if case is None:
        return Cell(result=NOT_RUN, seconds=0.0, why="pytest ended before this test")
    result, why = "passed", ""
    for kind, meaning in (("failure", "failed"), ("error", "failed"), ("skipped", "unsupported")):
        for element in case.findall(kind):
            result, why = meaning, element.get("message") or element.text or ""
    return Cell(result=result, seconds=round(float(case.get("time", 0.0)), 1), why=why[:_WHY_CHARACTERS])
