"""Real engines with vLLM's own scheduler half and manager, and Spillway's tiers: the answers of an engine without a
connector, whatever the tier does. engine_run.py describes the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_matrix.greedy import scored_answers
from reference_answers.margins import differences

from stock_tiers.engine_run import CASES, PROMPTS

pytestmark = [
    pytest.mark.timeout(3600),  # of the first, which runs all engines
    pytest.mark.skipif(
        find_spec("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config") is None,
        reason="the tiers are for the tiering of vLLM 0.30 and newer",
    ),
]
TESTS = Path(__file__).parents[1]
HEALTHY = ("fs", "nvme", "nvme-class", "redis", "one-by-one")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcomes by case, of one process for all of them."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "stock_tiers.engine_run", str(tmp_path_factory.mktemp("runs")), ",".join(CASES)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3500, check=False)
    found = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("RUN ")]
    assert [run["case"] for run in found] == list(CASES), done.stdout[-3000:] + done.stderr[-6000:]
    return {run["case"]: run for run in found}


@pytest.mark.parametrize("case", CASES[1:])
def test_answers_are_those_without_a_connector(runs: dict[str, dict[str, Any]], case: str) -> None:
    assert differences(scored_answers(runs["none"]), scored_answers(runs[case])) == {}


@pytest.mark.parametrize("case", HEALTHY)
def test_evicted_prompts_are_loaded(runs: dict[str, dict[str, Any]], case: str) -> None:
    assert sum(runs["none"]["cached"]) == 0, "the device holds fewer prompts than are asked"
    loaded = runs[case]["cached"][PROMPTS:]
    assert loaded == [runs[case]["reusable"]] * PROMPTS, loaded


def test_an_engine_that_is_started_anew_loads_what_was_stored(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["nvme-restart"]
    assert run["cached"][:PROMPTS] == [run["reusable"]] * PROMPTS


def test_damaged_frames_are_computed_again(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["nvme-damaged"]
    assert run["damaged"] >= PROMPTS
    assert sum(run["cached"]) < PROMPTS * run["reusable"]


def test_a_killed_server_ends_loads_not_requests(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["redis-killed"]
    assert run["cached"][PROMPTS] == run["reusable"]
    assert sum(run["cached"]) < PROMPTS * run["reusable"]


def test_canonical_rows_of_one_rank_are_loaded_by_two_and_the_other_way_round(runs: dict[str, dict[str, Any]]) -> None:
    """A head of each layer on each rank, or both on one."""
    for case in ("one-by-two", "two-by-one"):
        assert runs[case]["cached"][:PROMPTS] == [runs[case]["reusable"]] * PROMPTS, case
    assert sum(runs["two-by-two"]["cached"][:PROMPTS]) == 0
