"""The real vLLM engine through the NPU transport: the same answers with and without offload, whatever the path.

The engines are CPU engines with a tiny random model; the NPU is the ACL emulator, which checks every call against the
documentation and measures nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_matrix.greedy import scored_answers
from reference_answers.margins import difference, differences

HERE = Path(__file__).parent
WHOLE_PROMPT = 12 * 32  # tokens in whole blocks, all of which a tier can give back


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process, an engine after the other; see engine_runs.py."""
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_runs.py"), str(tmp_path_factory.mktemp("model"))],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2] / "tests")},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line.removeprefix("RUN ") for line in done.stdout.splitlines() if line.startswith("RUN ")]
    return {run["name"]: run for run in map(json.loads, lines)}


def test_without_offload_nothing_is_cached(runs):
    assert runs["none"]["cached"] == [0] * 7  # so what is cached below came through the transport
    first, second, third, *again = scored_answers(runs["none"])
    assert differences([first, second, third, first], again) == {}
    assert difference(first, second) and difference(second, third) and difference(first, third)


@pytest.mark.parametrize("batch_memcpy", ["on", "off"])
def test_the_answers_are_the_same(runs, batch_memcpy):
    run = runs[batch_memcpy]
    assert differences(scored_answers(runs["none"]), scored_answers(run)) == {}
    assert run["cached"] == [0, 0, 0] + [WHOLE_PROMPT] * 4
    used, other = run["batch_calls"], run["single_calls"]
    if batch_memcpy == "off":
        used, other = other, used
    assert used > 0
    assert other == 0
    assert run["unpinned_copies"] == 0
    assert run["live"] == [0, 0, 0]  # streams, events, host registrations


def test_a_device_without_batches_is_found_out_by_the_first_job(runs):
    run = runs["unsupported"]
    assert differences(scored_answers(runs["none"]), scored_answers(run)) == {}
    assert run["cached"] == [0, 0, 0] + [WHOLE_PROMPT] * 4  # no job was lost
    assert run["batch_calls"] == 1
    assert run["single_calls"] > 0


def test_copies_that_fail_are_recomputed(runs):
    run = runs["faults"]
    assert differences(scored_answers(runs["none"]), scored_answers(run)) == {}
    assert sum(run["cached"]) < 4 * WHOLE_PROMPT
