"""One test for each column, on the vLLM of this interpreter, with tiny random models: the answers of an engine with
Spillway are those of one without, and the counters show that the column's mechanism was used.

The engines of most columns are started one after the other in one process, those of the columns that are asked for
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_matrix.test_adapters import test_one_adapter_name_and_other_weights as adapters_keep_apart
from engine_matrix.test_data_parallel import (
    test_ranks_answer_as_without_offload_and_load_each_others_blocks as ranks_share_blocks,
)
from engine_matrix.verdict import Outcome, faults, run_each
from module_runs import module_runs

ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
# Test -> model and cases (engine_run) that must answer as without offload and use what they are for.
IN_ONE_PROCESS = {
    "test_cpu_tier": ("llama", ("cpu", "lossy")),
    "test_nvme": ("llama", ("nvme",)),
    "test_redis": ("llama", ("redis",)),
    "test_early_load": ("llama", ("early",)),
    "test_load_within_a_step": ("llama", ("layers", "layers-failing", "layers-refused", "layers-lossy")),
    "test_failed_load": ("llama", ("failing",)),
    "test_computed_while_loading": ("llama", ("meet", "meet-async")),
    "test_several_kv_groups": ("gemma3-window", ("cpu", "lossy", "failing")),
    "test_two_ranks": ("llama-tp2", ("cpu",)),
}
pytestmark = pytest.mark.timeout(1800)  # of the first, which starts all of these engines


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    wanted: dict[str, list[str]] = {}
    for test in dict.fromkeys(item.name for item in request.session.items if item.name in IN_ONE_PROCESS):
        model, cases = IN_ONE_PROCESS[test]
        wanted.setdefault(model, ["none"]).extend(cases)
    return run_each(wanted, tmp_path_factory.mktemp("cells"))


@pytest.fixture
def require_own(
    request: pytest.FixtureRequest, outcomes: dict[str, Outcome], record_property: Callable[[str, object], None]
) -> Callable[[], None]:
    """Requires the test's own cases."""

    def require_cases() -> None:
        model, cases = IN_ONE_PROCESS[request.node.name]
        require(outcomes[model], *cases)
        record_property("seconds", sum(outcomes[model].runs[case]["seconds"] for case in cases))

    return require_cases


@pytest.fixture(scope="module")
def lifecycle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (run,) = module_runs("engine_matrix.lifecycle_run", str(tmp_path_factory.mktemp("lifecycle")), timeout_seconds=900)
    return run


def require(outcome: Outcome, *cases: str) -> None:
    """Require that these cases ran, answered as without offload, and used what they are for."""
    missing = [case for case in ("none", *cases) if case not in outcome.runs]
    assert not missing, f"{missing} did not run: {outcome.refusals}\n{outcome.log}"
    chosen = Outcome({name: run for name, run in outcome.runs.items() if name in ("none", *cases)}, log=outcome.log)
    assert faults(chosen) == []


def test_cpu_tier(require_own: Callable[[], None]) -> None:
    require_own()


def test_nvme(require_own: Callable[[], None]) -> None:
    require_own()


def test_redis(require_own: Callable[[], None]) -> None:
    require_own()


def test_early_load(require_own: Callable[[], None]) -> None:
    require_own()


def test_load_within_a_step(require_own: Callable[[], None]) -> None:
    """Copies that fail, and copies that are refused, too."""
    require_own()


def test_failed_load(require_own: Callable[[], None]) -> None:
    require_own()


def test_computed_while_loading(require_own: Callable[[], None]) -> None:
    """Both synchronous and asynchronous scheduling can do it."""
    require_own()


def test_several_kv_groups(require_own: Callable[[], None]) -> None:
    """A failed load of such a model too."""
    require_own()


def test_two_ranks(require_own: Callable[[], None]) -> None:
    require_own()


@pytest.mark.timeout(3000)
def test_data_parallel(tmp_path: Path) -> None:
    """Two ranks of a dense model behind one server."""
    ranks_share_blocks(tmp_path)


def test_lora(tmp_path: Path) -> None:
    adapters_keep_apart(tmp_path)


def test_reset(lifecycle: dict[str, Any]) -> None:
    """The CPU tier has the prompt after a reset of the device alone, and nothing after one of all caches. Answers
    stay."""
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
