"""bench/scheduler_step.py still drives the scheduler half that it measures, on rows of one engine and on a node's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scheduler_step


def test_every_scenario_runs_on_both_kinds_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_step, "OUTPUT", output := tmp_path / "bench" / "steps.json")
    monkeypatch.setattr(scheduler_step, "WARM_STEPS", 0)
    monkeypatch.setattr(scheduler_step, "ANSWER_REQUESTS", 4)
    monkeypatch.setattr(scheduler_step, "ANSWER_CHUNKS", 2)
    few = ["--steps", "3", "--chunks", "8", "--requests", "2", "--rivals", "spillway,node"]
    assert scheduler_step.main(few) == 0
    report = json.loads(output.read_text())
    for name in scheduler_step.SCENARIOS:
        for rival in ("spillway", "node"):
            assert report[f"{name}_{rival}_all_cpu_p50_microseconds"] > 0
