"""Records that a test's module prints in a separate process: vLLM reads its settings when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent
_GATEWAY = _TESTS.parent / "gateway" / "src"  # environments of other vLLMs hold it, interpreters of others may not


def module_runs(module: str, *arguments: str, timeout_seconds: float) -> list[dict[str, Any]]:
    """The objects of its lines `RUN {json}`. Raises AssertionError with all of its output where there are none."""
    paths = [str(_TESTS), str(_GATEWAY), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    runs = [json.loads(line.removeprefix("RUN ")) for line in done.stdout.splitlines() if line.startswith("RUN ")]
    assert runs, done.stdout[-4000:] + done.stderr[-12_000:]
    return runs
