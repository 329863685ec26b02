"""A few of the schedules of which `python -m engine_lives` runs ten thousand, on every shape of KV groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHAPES = ("full", "chunks", "windows", "shared", "window-alone", "prompts", "drafts", "async", "async-drafts")
SHAPES += ("meetings", "meetings-async", "exclusive-async", "exclusive-shared", "fair", "fair-async", "fair-meetings")
SHAPES += ("windows-of-two-sizes", "windows-within-chunks", "windows-shared", "states", "states-shared", "states-async")
SHAPES += ("windows-in-parts", "states-in-parts", "layers", "exclusive-layers")
COUNT = 40  # of each shape
RACES = STALLS = PARTINGS = 5  # of each kind
DRAWN = 6


@pytest.mark.timeout(1800)
def test_random_schedules_leave_nothing_and_read_no_wrong_byte() -> None:
    # In a separate process: vLLM reads its settings from the environment when it is imported. One for all shapes:
    # the import takes four times as long as the schedules of a shape.
    counts = ["--count", str(COUNT), "--races", str(RACES), "--stalls", str(STALLS), "--partings", str(PARTINGS)]
    counts += ["--drawn", str(DRAWN)]
    done = subprocess.run(
        [sys.executable, "-m", "engine_lives", *counts, "--shapes", *SHAPES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=1700,  # a machine with other work, not slow schedules
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert re.findall(rf"^(\S+): {COUNT} schedules", done.stdout, re.M) == list(SHAPES)
    assert len(re.findall(rf"^drawn shape \d+: {COUNT} schedules, [1-9]\d+ tokens", done.stdout, re.M)) == DRAWN
    kept = re.findall(r"(\d+) times a chunk was kept", done.stdout)
    assert len(kept) == len(SHAPES) and all(map(int, kept)), "no chunk was kept for a request that waited"
    settled = re.findall(r"^exclusive-shared: .* (\d+) chunks settled", done.stdout, re.M)
    assert int(settled[0]), "an engine without work stored nothing"
    overtakes = re.findall(r"^(\S+): .* (\d+) times another request was next", done.stdout, re.M)
    ordered = {shape for shape, count in overtakes if int(count)}
    in_order_of_arrival = {shape for shape in SHAPES if shape.startswith(("window", "states"))} | {"async-drafts"}
    steered = {shape for shape in SHAPES if shape.startswith("fair")}  # their queues are shown in part
    assert ordered - steered == set(SHAPES) - in_order_of_arrival - steered, "only where attention reads a prefix whole"
    steps = re.findall(r"^(\S+): .* (\d+) steps without a flood, (\d+) short ones", done.stdout, re.M)
    fair = {shape for shape, without, short in steps if int(without) and int(short)}
    assert fair == steered, "no flood was left out, or none got its part"
    assert re.findall(rf"^(\S+): {RACES} races", done.stdout, re.M) == [
        "store-that-began-before",
        "load-under-way",
        "hit-of-blocks-being-stored",
        "blocks-reused-while-stored",
        "reset-of-all-under-a-load",
        "pause-under-a-load",
        "weights-that-are-named",
        "weights-that-change-under-a-load",
        "weights-that-changed",
        "hits-of-a-load-that-fails",
    ]
    stalls = re.findall(rf"^(\S+): {STALLS} prompts", done.stdout, re.M)
    assert stalls == ["load-that-is-met", "tier-that-stalls"]
    partings = re.findall(rf"^(\S+): {PARTINGS} partings", done.stdout, re.M)
    assert partings == [
        "conversation",
        "prompts-that-part",
        "conversation-with-short-windows",
        "prompts-that-end-with-a-chunk",
        "prompts-that-part-on-the-device",
        "conversation-of-states",
        "prompts-that-part-with-states",
    ]
