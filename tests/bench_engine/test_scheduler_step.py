"""bench/scheduler_step.py runs: nothing else builds vLLM's scheduler half from what that bench gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lanes.rules import ROOT


def test_every_scenario_runs_beside_every_rival(tmp_path: Path) -> None:
    short = ["--steps", "4", "--chunks", "40", "--requests", "2", "--rivals", "spillway,node,upstream"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/scheduler_step.py"), *short],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads((tmp_path / "build/bench/scheduler_step.json").read_text())
    for rival in ("spillway", "node", "upstream"):
        assert any(rival in name for name in figures), figures
