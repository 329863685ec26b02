"""One test for each column, on the vLLM of this interpreter, with tiny random models: the answers of an engine with
Spillway are those of one without, and the counters show that the column's mechanism was used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_matrix.test_adapters import test_one_adapter_name_and_other_weights as adapters_keep_apart
from engine_matrix.test_data_parallel import (
    test_ranks_answer_as_without_offload_and_load_each_others_blocks as ranks_share_blocks,
)
from engine_matrix.verdict import Outcome, faults, run_model, run_models
from module_runs import module_runs

ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
STEP_LOADS = ("layers", "layers-failing", "layers-refused", "layers-lossy")
pytestmark = pytest.mark.timeout(1800)  # of the first, which starts all engines of one rank


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cases = ["none", "cpu", "lossy", "nvme", "redis", "early", "failing", *STEP_LOADS]
    return run_models({"llama": cases}, tmp_path_factory.mktemp("llama"))["llama"]


@pytest.fixture(scope="module")
def lifecycle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (run,) = module_runs("engine_matrix.lifecycle_run", str(tmp_path_factory.mktemp("lifecycle")), timeout_seconds=900)
    return run


def require(outcome: Outcome, *cases: str) -> None:
    """These cases ran, answered as without offload, and used what they are for."""
    missing = [case for case in ("none", *cases) if case not in outcome.runs]
    assert not missing, f"{missing} did not run: {outcome.refusals}\n{outcome.log}"
    chosen = Outcome({name: run for name, run in outcome.runs.items() if name in ("none", *cases)}, log=outcome.log)
    assert faults(chosen) == []


def test_cpu_tier(llama: Outcome) -> None:
    require(llama, "cpu", "lossy")


def test_nvme(llama: Outcome) -> None:
    require(llama, "nvme")


def test_redis(llama: Outcome) -> None:
    require(llama, "redis")


def test_early_load(llama: Outcome) -> None:
    require(llama, "early")


def test_load_within_a_step(llama: Outcome) -> None:
    """Copies that fail, and copies that are refused, too."""
    require(llama, *STEP_LOADS)


def test_failed_load(llama: Outcome) -> None:
    require(llama, "failing")


def test_computed_while_loading(tmp_path: Path) -> None:
    """With synchronous and with asynchronous scheduling."""
    cases = ["meet", "meet-async"]
    require(run_model("llama", tmp_path, ["none", *cases]), *cases)


def test_several_kv_groups(tmp_path: Path) -> None:
    """A failed load of such a model too."""
    cases = ["cpu", "lossy", "failing"]
    require(run_model("gemma3-window", tmp_path, ["none", *cases]), *cases)


def test_two_ranks(tmp_path: Path) -> None:
    require(run_model("llama-tp2", tmp_path, ["none", "cpu"]), "cpu")


@pytest.mark.timeout(3000)
def test_data_parallel(tmp_path: Path) -> None:
    """Two ranks of a dense model behind one server."""
    ranks_share_blocks(tmp_path)


def test_lora(tmp_path: Path) -> None:
    adapters_keep_apart(tmp_path)


def test_reset(lifecycle: dict[str, Any]) -> None:
    """After a reset of the device alone the CPU tier has the prompt, after one of all caches nothing. Answers stay."""
    answers = lifecycle["answers"]
    assert answers["first"]["cached"] == 0
    assert answers["device reset"]["cached"] > 0
    assert answers["all reset"]["cached"] == 0
    for name in ("device reset", "all reset"):
        first, again = answers["first"]["logprobs"], answers[name]["logprobs"]
        assert max(first, key=first.__getitem__) in again, name
        for token in first.keys() & again.keys():  # the last of the top tokens may be a near tie
            assert abs(again[token] - first[token]) < ROUNDING, name


def test_events(lifecycle: dict[str, Any]) -> None:
    """The gateway can decode every event; device and CPU tier publish the prompt's blocks under the same hashes."""
    assert lifecycle["undecodable"] == 0
    assert lifecycle["both_tiers_published"] and lifecycle["clearing_published"]
    assert lifecycle["same_hashes"], "one block has two names"
    assert lifecycle["tokens_match"]
