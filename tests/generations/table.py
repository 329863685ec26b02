"""From pytest's reports to the table of versions and columns. Pure."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import TypedDict

from generations.cells import CELLS

NOT_RUN = "not run"
SHOWN = {"passed": "yes", "failed": "FAILED", "unsupported": "no", NOT_RUN: NOT_RUN}
_WHY_CHARACTERS = 2000


class Cell(TypedDict):
    """result: a key of SHOWN. why: of what is not passed."""

    result: str
    seconds: float
    why: str


def read_cells(junit: str) -> dict[str, Cell]:
    """Column -> result, from pytest's XML of test_cells.py; a column without a test case was not run."""
    found = {case.get("name", ""): case for case in ElementTree.fromstring(junit).iter("testcase")}
    return {column: _cell(found.get(test)) for column, test in CELLS.items()}


def nothing_ran(why: str) -> dict[str, Cell]:
    return {column: Cell(result=NOT_RUN, seconds=0.0, why=why) for column in CELLS}


def render(results: Mapping[str, Mapping[str, Cell]]) -> str:
    """Version -> its cells, as Markdown; below it why a cell is not `yes`."""
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
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(case: ElementTree.Element | None) -> Cell:
    if case is None:
        return Cell(result=NOT_RUN, seconds=0.0, why="pytest ended before this test")
    result, why = "passed", ""
    for kind, meaning in (("failure", "failed"), ("error", "failed"), ("skipped", "unsupported")):
        for element in case.findall(kind):
            result, why = meaning, element.get("message") or element.text or ""
    return Cell(result=result, seconds=round(float(case.get("time", 0.0)), 1), why=why[:_WHY_CHARACTERS])
