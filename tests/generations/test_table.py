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
from generations.cells import CELLS, CONTRACTS
from generations.table import nothing_ran, read_cells, read_contracts, render

COLUMNS = list(CELLS)
PASSED = "".join(f'<testcase name="{test}" time="1.25"/>' for test in CELLS.values())


def report(cases: str) -> str:
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def test_each_column_is_a_test_and_each_test_a_column() -> None:
    tree = ast.parse(Path(command.CELLS_FILE).read_text())
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
    assert CONTRACTS.keys() < CELLS.keys()
    for test in {test for tests in CONTRACTS.values() for test in tests}:
        assert (ROOT / test).exists()
        assert set(WITHOUT_ENGINE) <= set(OTHER_VLLM[test])


def test_one_failed_test_fails_each_column_that_it_stands_for() -> None:
    passed = {test: f"{test}/test_it.py" if "." not in test else test for one in CONTRACTS.values() for test in one}
    cases = [f'<testcase name="test_it" file="{file}" time="1.0"/>' for file in passed.values()]
    cells = read_contracts(COLUMNS, report("".join(cases)))
    assert {name for name, cell in cells.items() if cell["result"] == "contract"} == CONTRACTS.keys()
    assert {cell["result"] for name, cell in cells.items() if name not in CONTRACTS} == {"engine"}
    assert "| by contract |" in render({"0.33": cells}) and "| needs an engine |" in render({"0.33": cells})

    broken = '<testcase name="other" file="tests/stock_tiers/test_tiers.py"><failure message="wrong byte"/></testcase>'
    cells = read_contracts(COLUMNS, report("".join([*cases, broken])))
    assert {name for name, cell in cells.items() if cell["result"] == "failed"} == {"NVMe", "Redis"}
    cells = read_contracts(COLUMNS, report("".join(case for case in cases if "stock_tiers" not in case)))
    assert (cells["Redis"]["result"], cells["CPU tier"]["result"]) == ("not run", "contract")


def test_results_of_pytest_become_cells() -> None:
    cases = (
        '<testcase name="test_cpu_tier" time="12.34"/>'
        '<testcase name="test_nvme" time="0.1"><failure message="AssertionError: 1 != 2">long</failure></testcase>'
        '<testcase name="test_redis" time="0"><error message="no server"/></testcase>'
        '<testcase name="test_lora" time="0"><skipped message="There are none."/></testcase>'
    )
    cells = read_cells(COLUMNS, report(cases))
    assert cells["CPU tier"] == {"result": "passed", "seconds": 12.3, "why": ""}
    assert (cells["NVMe"]["result"], cells["NVMe"]["why"]) == ("failed", "AssertionError: 1 != 2")
    assert cells["Redis"]["result"] == "failed"
    assert (cells["LoRA"]["result"], cells["LoRA"]["why"]) == ("unsupported", "There are none.")
    assert cells["two ranks"]["result"] == "not run"


def test_the_table_shows_every_column_and_why_not() -> None:
    lines = render(
        {"0.23": read_cells(COLUMNS, report(PASSED)), "9.9": nothing_ran(COLUMNS, "no such thing")}
    ).splitlines()
    assert lines[0] == f"| vLLM | {' | '.join(CELLS)} |"
    assert lines[2] == "| 0.23 |" + " yes |" * len(CELLS)
    assert lines[3] == "| 9.9 |" + " not run |" * len(CELLS)
    assert "9.9, LoRA: no such thing" in lines


@pytest.mark.parametrize(("cases", "status"), [(PASSED, 0), (PASSED.replace('"test_lora"', '"x"'), 1)])
def test_a_gap_fails_the_command(
    cases: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_cells", lambda version, columns: read_cells(COLUMNS, report(cases)))
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
        return read_cells(columns, report(PASSED))

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
    assert "0.32 ran at first on" in capsys.readouterr().out.splitlines()[-1]


def test_of_a_vllm_without_engines_nothing_runs_for_columns_that_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "interpreter", lambda version: Path(sys.executable))
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("pytest without a name runs all"))
    assert {cell["result"] for cell in command.run_cells(WITHOUT_ENGINE[0], ["two ranks"]).values()} == {"engine"}
