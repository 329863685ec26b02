"""Late stores at a device's speed: copies end in time, no block is copied again and again, and as much is found as with
eager ones while all sessions fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NAMES = ("requests", "computed_blocks", "stored_blocks", "late_blocks", "lost_blocks", "cached_percent")
# Half of the default load and tiers.
LOAD = {"sessions": 4, "device-blocks": 400, "cpu-rows": 682, "warm-seconds": 15, "seconds": 15, "seeds": 1}
OPTIONS = [word for name, value in LOAD.items() for word in (f"--{name}", f"{value}")]


def test_while_all_sessions_fit_late_stores_copy_each_block_about_once_and_lose_none(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    run = [sys.executable, "-m", "engine_lives.timed_agents", *OPTIONS]
    subprocess.run(run, check=True, capture_output=True, text=True, env=environment, timeout=500, cwd=tmp_path)
    found = json.loads((tmp_path / "build/bench/late_stores.json").read_text())
    eager, auto = ({name: found[f"{storing}_seed_1_{name}"] for name in NAMES} for storing in ("eager", "auto"))
    assert eager["requests"] > 10 and eager["stored_blocks"] and not eager["late_blocks"]
    assert not auto["lost_blocks"]
    assert auto["stored_blocks"] <= 1.3 * auto["computed_blocks"]
    assert auto["cached_percent"] >= eager["cached_percent"] - 2
