"""A few of the schedules that `python -m node_tier` runs ten thousand of, and engines that are stopped and killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from node_tier import killed, stopped
from node_tier.schedules import run


def test_engines_that_share_rows_load_what_was_stored_and_lose_no_row():
    seen: Counter[str] = Counter()
    for seed in range(200):
        seen += run(seed)
    happened = (
        "evicted",
        "failed",
        "loads",
        "refused",
        "resets",
        "killed within",
        "came back",
        "found under a name",
        "stopped within",
        "taken for dead",
    )
    assert min(seen[what] for what in happened) > 0


def test_no_byte_is_wrong_and_no_row_lost_when_engines_are_killed_at_any_moment(tmp_path: Path):
    assert killed.run(tmp_path / "region", kills=25, processes=3) > 0


def test_no_byte_is_wrong_when_engines_stop_at_any_line_and_go_on_or_are_killed_there(tmp_path: Path):
    assert stopped.run(tmp_path / "region", stops=300, kills=6, seed=2) > 0
