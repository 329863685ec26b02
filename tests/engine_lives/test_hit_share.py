"""Late stores lose nothing while all sessions fit in both tiers: copies end before the device takes their blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUN = ["-m", "engine_lives.hit_share", "--turns", "240", "--loads", "0.35", "--storing", "auto"]


def test_where_everything_fits_late_stores_find_what_one_cache_of_both_sizes_finds() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, *RUN], check=True, capture_output=True, text=True, env=environment, timeout=500
    )
    _, _, storing, found, one_cache, _ = run.stdout.splitlines()[-1].split(" | ")
    assert storing == "auto"
    assert float(found.rstrip("%")) >= float(one_cache.rstrip("%")) - 0.5
