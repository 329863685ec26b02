"""The functions that first_token_stamps.py and first_token_pairs.py stamp are there, and stamped in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lanes.rules import ROOT

IMPORT_ALL = """
import importlib
import sitecustomize
for module, functions in sitecustomize.STAMPED.items():
    imported = importlib.import_module(module)
    for path, _, _ in functions:
        function = imported
        for part in path.split("."):
            function = getattr(function, part)
        assert function.__wrapped__
    print(module)
"""


def test_every_function_that_is_stamped_is_there(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench/stamping"), "STAMP_FILE": str(tmp_path / "stamps")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "spillway_connector.engine.manager.early_loads" in done.stdout
