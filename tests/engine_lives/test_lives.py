"""Some of the schedules that `python -m engine_lives` runs ten thousand of, on every shape of KV groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("shape", "options"),
    [("full", []), ("chunks", []), ("window-alone", []), ("windows", []), ("shared", [])],
)
def test_random_schedules_leave_nothing_and_read_no_wrong_byte(shape: str, options: list[str]):
    # In a process of its own: vLLM reads its settings from the environment when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "engine_lives", "--count", "100", "--shapes", shape, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"{shape}: 100 schedules" in done.stdout
