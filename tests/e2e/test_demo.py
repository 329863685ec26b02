"""`make demo` over real engines: each phase is served from the tier that it names, with the same answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from stack_driver.running_stack import RunningStack

from spillway_stack.demo.phases import Phase

SECONDS = 600


@pytest.mark.tiers("redis")
def test_every_phase_is_served_from_its_tier(stack: RunningStack, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spillway_stack", "--state-dir", str(stack.local.folder.root), "demo"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["phase"] for row in rows] == [phase.value for phase in Phase]
