"""The table: every column has a test, every result its word, and a failure or a gap fails the command."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lanes.rules import CELLS_TESTED, LOCAL_VLLM, OTHER_VLLM, ROOT, WITHOUT_ENGINE

from generations import __main__ as command
from generations.cells import ALIKE, CELLS, COLUMNS, CONTRACTS, ON_ENGINES, REFUSED, RUN_VLLM
from generations.table import Cell, nothing_ran, read_cells, render

CELLS_FILE = ROOT / "tests/generations/test_cells.py"
NEED_AN_ENGINE = {"two ranks", "data parallel"}


def case_of(test: str, inside: str = "") -> str:
    """A case of pytest's report, as of a file, a folder or a case that was asked for."""
    path, _, name = test.partition("::")
    file = path if path.endswith(".py") else f"{path}/test_it.py"
    return f'<testcase file="{file}" name="{name or "test_it"}" time="1.25">{inside}</testcase>'


PASSED = "".join(map(case_of, dict.fromkeys(test for tests in ON_ENGINES.values() for test in tests)))


RESULTS = ("engine", "refused", "contract", "ran")


def report(cases: str) -> str:
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def on_engines(cases: str) -> dict[str, Cell]:
    return read_cells(COLUMNS, ON_ENGINES, report(cases), engines=True)


def contracts(cases: str) -> dict[str, Cell]:
    return read_cells(COLUMNS, CONTRACTS, report(cases), engines=False)


def test_each_column_is_a_test_and_each_test_a_column() -> None:
    tree = ast.parse(CELLS_FILE.read_text())
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert tests == list(CELLS.values())


def test_the_versions_are_those_with_an_environment() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = re.findall(r"^VLLM_ENVIRONMENTS := (.*)$", makefile, re.M)[0].split()
    assert [LOCAL_VLLM, *listed] == list(command.VERSIONS)
    assert set(OTHER_VLLM["tests/generations"]) == set(listed)
    assert set(CELLS_TESTED) <= set(CELLS.values())
    assert tuple(re.findall(r"^VLLM_SCHEDULERS := (.*)$", makefile, re.M)[0].split()) == WITHOUT_ENGINE


def test_what_stands_for_a_column_runs_where_no_engine_does() -> None:
    assert CONTRACTS.keys() == set(COLUMNS) - NEED_AN_ENGINE
    tests = {test for tests in CONTRACTS.values() for test in tests}
    assert tests > RUN_VLLM and ALIKE.keys() > REFUSED
    for test in tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists() and f"def {name}" in (name and (ROOT / path).read_text()) + "def "
        assert set(WITHOUT_ENGINE) <= set(OTHER_VLLM[path])


def test_one_failed_test_fails_each_column_that_it_stands_for() -> None:
    cases = [case_of(test) for test in dict.fromkeys(test for tests in CONTRACTS.values() for test in tests)]
    cells = contracts("".join(cases))
    by_result = {result: {name for name, cell in cells.items() if cell["result"] == result} for result in RESULTS}
    assert by_result == {
        "engine": NEED_AN_ENGINE,
        "refused": REFUSED,
        "contract": {"LoRA", "events"},
        "ran": set(COLUMNS) - NEED_AN_ENGINE - REFUSED - {"LoRA", "events"},
    }
    for shown in ("without a model", "by contract", "refused", "needs an engine"):
        assert f"| {shown} |" in render({"0.33": cells})

    broken = case_of("tests/stock_tiers/test_tiers.py::other", '<failure message="wrong byte"/>')
    cells = contracts("".join([*cases, broken]))
    assert {name for name, cell in cells.items() if cell["result"] == "failed"} == {"NVMe", "Redis", "vLLM's tiering"}
    cells = contracts("".join(case for case in cases if "stock_tiers" not in case))
    assert (cells["Redis"]["result"], cells["CPU tier"]["result"]) == ("not run", "ran")


def test_a_version_without_what_is_refused_says_so() -> None:
    skipped = case_of(ALIKE["HiSparse"][0], '<skipped message="this vLLM has no HiSparse"/>')
    for engines, tests in ((True, ON_ENGINES), (False, CONTRACTS)):
        (cell,) = read_cells(["HiSparse"], tests, report(skipped), engines=engines).values()
        assert (cell["result"], cell["why"]) == ("absent", "this vLLM has no HiSparse")
        (cell,) = read_cells(["HiSparse"], tests, report(case_of(ALIKE["HiSparse"][0])), engines=engines).values()
        assert cell["result"] == "refused"


def test_results_of_pytest_become_cells() -> None:
    inside = {
        "CPU tier": '<properties><property name="seconds" value="12.34"/></properties>',
        "NVMe": '<failure message="AssertionError: 1 != 2">long</failure>',
        "Redis": '<error message="no server"/>',
        "LoRA": '<skipped message="There are none."/>',
        "reset": "",
    }
    cells = on_engines("".join(case_of(ON_ENGINES[column][0], text) for column, text in inside.items()))
    assert cells["CPU tier"] == {"result": "passed", "seconds": 12.3, "why": ""}
    assert cells["reset"] == {"result": "passed", "seconds": 1.2, "why": ""}
    assert (cells["NVMe"]["result"], cells["NVMe"]["why"]) == ("failed", "AssertionError: 1 != 2")
    assert cells["Redis"]["result"] == "failed"
    assert (cells["LoRA"]["result"], cells["LoRA"]["why"]) == ("absent", "There are none.")
    assert cells["two ranks"]["result"] == "not run"


def test_the_table_shows_every_column_and_why_not() -> None:
    lines = render({"0.23": on_engines(PASSED), "9.9": nothing_ran(COLUMNS, "no such thing")}).splitlines()
    assert lines[0] == f"| vLLM | {' | '.join(COLUMNS)} |"
    assert lines[2] == "| 0.23 |" + " yes |" * (len(COLUMNS) - len(REFUSED)) + " refused |" * len(REFUSED)
    assert lines[3] == "| 9.9 |" + " not run |" * len(COLUMNS)
    assert "9.9, LoRA: no such thing" in lines


@pytest.mark.parametrize(("cases", "status"), [(PASSED, 0), (PASSED.replace('"test_lora"', '"x"'), 1)])
def test_a_gap_fails_the_command(
    cases: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_cells", lambda version, columns: on_engines(cases))
    assert command.main(["0.23", "--output", str(tmp_path / "build" / "table.json")]) == status
    assert json.loads((tmp_path / "build" / "table.json").read_text())["0.23"]["CPU tier"]["result"] == "passed"
    assert "| 0.23 | yes |" in capsys.readouterr().out


def test_a_run_of_some_columns_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "table.json"
    asked: list[list[str]] = []
    commits = iter(("first", "second", "third"))

    def run_cells(version: str, columns: list[str]) -> dict[str, Any]:
        asked.append(columns)
        return read_cells(columns, ON_ENGINES, report(PASSED), engines=True)

    monkeypatch.setattr(command, "run_cells", run_cells)
    monkeypatch.setattr(command, "commit", lambda: next(commits))
    assert command.main(["0.32", "--output", str(output), "--columns", "CPU tier", "LoRA"]) == 0
    assert "0.32, NVMe: not asked for so far" in capsys.readouterr().out
    assert command.main(["0.23", "--output", str(output), "--columns", "LoRA"]) == 0
    assert command.main(["0.32", "--output", str(output), "--columns", "LoRA"]) == 0
    found = json.loads(output.read_text())
    assert asked == [["CPU tier", "LoRA"], ["LoRA"], ["LoRA"]]
    assert {(v, c): cell["commit"] for v, cells in found.items() for c, cell in cells.items()} == {
        ("0.23", "LoRA"): "second",
        ("0.32", "CPU tier"): "first",
        ("0.32", "LoRA"): "third",
    }
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("0.32 ran at first on") and "; seconds: CPU tier 1, NVMe 0" in said


def test_of_a_vllm_without_engines_nothing_runs_for_columns_that_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "interpreter", lambda version: Path(sys.executable))
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("pytest without a name runs all"))
    assert {cell["result"] for cell in command.run_cells(WITHOUT_ENGINE[0], ["two ranks"]).values()} == {"engine"}
