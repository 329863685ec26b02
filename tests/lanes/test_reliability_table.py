"""docs/reliability.md: every test that its tables name exists, and runs in the lane that they give."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lanes.rules import BY_HAND, ROOT, Lane, lane_of, needs_of
from lanes.test_rules import test_files

PAGE = ROOT / "docs" / "reliability.md"
LANES = [*Lane, *dict.fromkeys(BY_HAND.values())]  # in the order in which a row lists them


@dataclass(frozen=True)
class Row:
    line: int
    tests: tuple[str, ...]
    lanes: str


def rows(text: str) -> Iterator[Row]:
    """The rows of the tables whose last columns are `test` and `lane`."""
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells(line)
        elif header[-2:] == ["test", "lane"] and set(line) - set("|- "):
            *_, test, lane = cells(line)
            yield Row(number, tuple(re.findall(r"`([^`]+)`", test)), lane)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def lane_named(name: str) -> str:
    """Raises AssertionError if the name is no test, or more than one."""
    if name in BY_HAND:
        return BY_HAND[name]
    path, _, function = name.partition("::")
    found = [file for file in test_files() if file.as_posix().endswith(f"/{path}")]
    assert len(found) == 1, f"`{name}` is {'no test' if not found else f'the end of {len(found)} paths'}"
    assert not function or re.search(rf"^\s*(async )?def {re.escape(function)}\b", found[0].read_text(), re.M), name
    return lane_of(needs_of(found[0]))


ROWS = list(rows(PAGE.read_text()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line {row.line}")
def test_a_row_names_tests_that_exist_and_their_lanes(row: Row) -> None:
    assert row.tests, "a promise without a test"
    assert row.lanes == ", ".join(sorted({lane_named(name) for name in row.tests}, key=LANES.index))


def test_most_of_the_page_is_read() -> None:
    tables = re.findall(r"^\|.*\| test \| lane \|$", PAGE.read_text(), re.M)
    assert len(tables) >= 8
    assert len(ROWS) > 80
    assert not re.search(r"\| test \|$", PAGE.read_text(), re.M), "a table of tests without a lane"


@pytest.mark.parametrize("command", BY_HAND)
def test_commands_by_hand_exist(command: str) -> None:
    program, *words = command.split()
    if program == "make":
        assert re.search(rf"^{re.escape(words[0])}:", (ROOT / "Makefile").read_text(), re.M)
        assert all(word.split("=")[0] in (ROOT / "Makefile").read_text() for word in words[1:])
    else:
        assert importlib.util.find_spec(words[-1])


@pytest.mark.parametrize("name", ["tiers/test_nothing.py", "test_tenants.py", "plan/test_load_cost.py::test_nothing"])
def test_a_name_that_is_no_test_or_two_is_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        lane_named(name)


def test_rows_are_found_in_their_tables_alone() -> None:
    page = "| a | test | lane |\n| - | - | - |\n| x |`p.py`, `q.py::f` | unit |\n\n| b | test |\n| - | - |\n| y | z |\n"
    assert list(rows(page)) == [Row(3, ("p.py", "q.py::f"), "unit")]


def test_files_are_those_of_the_lanes() -> None:
    assert Path(__file__) in test_files()
