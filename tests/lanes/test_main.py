"""The runner's command lines and its last line, which .ci/run reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lanes import __main__ as runner
from lanes.rules import CELLS_TESTED, ROOT, STACK_TESTS, Lane
from lanes.small_repository import run_in_repository


def test_lanes_use_the_cores_and_a_stack_runs_alone() -> None:
    commands = {lane: runner.command(lane, "quick", 2, ["-x"]) for lane in Lane}
    assert "-n" in commands[Lane.UNIT] and "-n" in commands[Lane.QUICK]
    # What a file's fixtures start, starts once.
    assert all("loadfile" in commands[lane] for lane in (Lane.QUICK, Lane.ENGINE, Lane.OTHER_VLLM))
    assert "-n" not in commands[Lane.FULL] and commands[Lane.FULL][-1] == "-x"
    assert "-n" not in runner.command(Lane.UNIT, "quick", 1, [])
    few = runner.command(Lane.QUICK, "quick", 64, [])
    assert few[few.index("-n") + 1] == "4"


def test_a_core_runs_two_workers_of_a_lane_that_waits_and_one_of_a_lane_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner.os, "sched_getaffinity", lambda _: {0, 1})
    lanes = {lane: runner.command(lane, "quick", None, []) for lane in (Lane.UNIT, Lane.QUICK, Lane.ENGINE)}
    assert {lane: words[words.index("-n") + 1] for lane, words in lanes.items()} == {
        Lane.UNIT: "4",
        Lane.QUICK: "4",
        Lane.ENGINE: "2",
    }


def test_another_vllm_has_its_own_interpreter_and_a_stack_of_its_engines() -> None:
    (unit, own, stack) = runner.planned([Lane.UNIT, Lane.OTHER_VLLM], "0.32", "quick", 1, [])
    assert unit.command[0] == stack.command[0] == sys.executable
    assert own.command[0] == str(ROOT / ".venv" / "vllm-0.32" / "bin" / "python")
    assert "other-vllm" in own.command and not own.environment
    assert "tests/stock_tiers" in own.command and "gateway/tests" not in own.command
    assert "tests/generations/test_refusals.py" in own.command
    assert [word for word in own.command if word.startswith("tests/generations/test_cells.py")] == [
        f"tests/generations/test_cells.py::{cell}" for cell in CELLS_TESTED
    ]
    assert stack.environment["VLLM"] == "0.32"
    assert runner.planned([Lane.OTHER_VLLM], "", "quick", 1, []) == []


def test_the_tests_over_a_stack_exist() -> None:
    for named in STACK_TESTS:
        path, _, function = named.partition("::")
        assert f"def {function.partition('[')[0]}" in (ROOT / path).read_text()


def test_the_slowest_come_first_and_are_thirty() -> None:
    lines = runner.slowest({f"t{at}": float(at) for at in range(40)}).splitlines()[1:]
    assert lines[0] == "slowest 30 of 40 tests"
    assert lines[1].split() == ["39.00", "s", "t39"] and len(lines) == 31


def test_lanes_are_added_up_and_all_run_whatever_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([(1, {"passed": 3, "failed": 1, "skipped": 1}), (0, {"passed": 4}), (2, None)])

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert not env["PYTHONDONTWRITEBYTECODE"]
        status, counts = next(outcomes)
        if counts is not None:
            path = Path(command[command.index("--lanes-report") + 1])
            broken = ["a.py::test"] if status else []
            path.write_text(json.dumps({"counts": counts, "seconds": {}, "broken": broken}))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(runner.subprocess, "run", run)
    assert runner.main(["unit", "quick", "full"]) == 1
    broken, last = capsys.readouterr().out.splitlines()[-2:]
    assert broken == "BROKEN a.py::test"
    assert re.fullmatch(r"=+ 1 failed, 1 error, 7 passed, 1 skipped in \d+\.\d\ds \(0:00:\d\d\) =+", last)


def test_ci_reads_the_last_line_as_it_reads_pytests_own() -> None:
    expression = re.search(r"sed -n '(/.*/\{.*\})' \"\$logs", (ROOT / ".ci" / "run").read_text())
    assert expression is not None
    log = "collected 1 item\n===== 1 passed in 0.10s =====\n" + runner.closing_line(Counter(passed=7), 3723.4) + "\n"
    done = subprocess.run(["sed", "-n", expression[1]], input=log, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "7 passed in 3723.40s (1:02:03)"


def test_counts_and_durations_are_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    files = {"tests/a/test_it.py": "def test_a(): ...\ndef test_b(): assert 0\n"}
    done = run_in_repository(tmp_path, {"tests/a": ("nothing",)}, files, "--lanes-report", str(report))
    assert done.returncode == 1
    found = json.loads(report.read_text())
    assert found["counts"] == {"passed": 1, "failed": 1}
    assert found["broken"] == ["tests/a/test_it.py::test_b"]
    assert set(found["seconds"]) == {"tests/a/test_it.py::test_a", "tests/a/test_it.py::test_b"}
