"""A hundred of the schedules that `python -m node_tier` runs ten thousand of, and engines that are killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from node_tier import killed
from node_tier.schedules import run


def test_engines_that_share_rows_load_what_was_stored_and_lose_no_row():
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += run(seed)
    happened = ("evicted", "failed", "loads", "refused", "resets", "killed within", "came back", "found under a name")
    assert min(seen[what] for what in happened) > 0


def test_no_byte_is_wrong_and_no_row_lost_when_engines_are_killed_at_any_moment(tmp_path: Path):
    assert killed.run(tmp_path / "region", kills=25, processes=3) > 0
