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
    """The documents are the longest that fit the engines, as on a machine that computes them quickly.

    The last phase may come from any tier: the stack's ALWAYS_LOAD prices the few tokens behind a document at
    seconds, so the gateway may prefer an idle engine to the one that has just put the document on its device.
    """
    command = [sys.executable, "-m", "spillway_stack", "--state-dir", str(stack.local.folder.root), "demo"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--longest"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    printed = done.stdout[-6000:] + done.stderr[-2000:]
    assert (tmp_path / "report.json").exists(), printed
    rows = {row["phase"]: row for row in json.loads((tmp_path / "report.json").read_text())}
    assert list(rows) == [phase.value for phase in Phase], printed
    assert all(row["cached_tokens"] for phase, row in rows.items() if phase != Phase.COLD.value), printed
    wrong = [phase for phase, row in rows.items() if not (row["identical"] or row["differs_by_rounding"])]
    assert set(wrong) <= {Phase.DEVICE_HIT.value}, printed  # which then is the reference of the others
    assert {phase for phase, row in rows.items() if not row["served_as_planned"]} <= {Phase.GATEWAY.value}, printed
