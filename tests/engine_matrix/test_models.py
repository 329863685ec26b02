"""A small case of each KV layout that a CPU runs; `make test-models` runs every case of every model.

One process with one engine after the other, all of them vLLM's own with tiny random models. Two ranks are separate
processes, bound to cores by the environment, so they get another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_matrix.verdict import Outcome, faults, run_model, run_models

pytestmark = pytest.mark.timeout(1800)  # of the first, which starts all engines
CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split())
HAS_FP8_CACHE = bool(CPU_FLAGS & {"avx512f", "amx_tile"})
PROMPTS = 3  # different ones, of engine_run; each comes once before any comes again
SMALL = ["none", "cpu", "lossy"]  # the reference answers, Spillway's, and the control with wrong bytes
MEETS = ["none", "meet", "meet-async"]
CASES = {
    "llama": MEETS,
    "gemma3-window": [*SMALL, "failing", "npu", "npu-off"],
    "mistral-window": SMALL,
    "llama-fp8": SMALL if HAS_FP8_CACHE else [],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_models({name: cases for name, cases in CASES.items() if cases}, tmp_path_factory.mktemp("models"))


def require_same_answers(outcome: Outcome, cases: list[str]) -> None:
    assert not outcome.refusals, outcome.log
    assert list(outcome.runs) == cases
    assert faults(outcome) == []


def test_a_prompt_that_is_computed_while_its_end_is_loaded_answers_as_without_offload(
    outcomes: dict[str, Outcome],
) -> None:
    require_same_answers(outcomes["llama"], MEETS)


def test_several_kv_groups_answer_as_without_offload(outcomes: dict[str, Outcome]) -> None:
    require_same_answers(outcomes["gemma3-window"], CASES["gemma3-window"])


def test_a_sliding_window_in_every_layer_answers_as_without_offload(outcomes: dict[str, Outcome]) -> None:
    require_same_answers(outcomes["mistral-window"], CASES["mistral-window"])


@pytest.mark.skipif(not HAS_FP8_CACHE, reason="vLLM's CPU attention has an fp8 KV cache with AVX-512 or AMX alone")
def test_a_kv_cache_in_fp8_answers_as_without_offload(outcomes: dict[str, Outcome]) -> None:
    require_same_answers(outcomes["llama-fp8"], CASES["llama-fp8"])


def test_two_ranks_answer_as_without_offload(tmp_path: Path) -> None:
    require_same_answers(run_model("llama-tp2", tmp_path, SMALL), SMALL)


def test_two_pipeline_stages_of_unequal_layers_answer_as_without_offload(tmp_path: Path) -> None:
    cases = ["none", "nvme", "lossy"]
    require_same_answers(run_model("llama-pp2", tmp_path, cases), cases)


def test_latents_that_one_rank_stored_are_loaded_by_two_and_the_other_way_round(tmp_path: Path) -> None:
    """Engines of one model with other numbers of ranks, on one directory, one after the other."""
    one = run_model("deepseek-v2", tmp_path, ["none", "nvme"])
    require_same_answers(one, ["none", "nvme"])
    two = run_model("deepseek-v2-two-ranks", tmp_path, ["nvme-other", "nvme"])
    again = run_model("deepseek-v2", tmp_path, ["nvme-other"])
    for loader in (two, again):
        loader.runs = {"none": one.runs["none"], **loader.runs}
        require_same_answers(loader, list(loader.runs))
        assert "nvme-other" in loader.runs
        # Already when each prompt comes for the first time: by then this engine has computed none of it.
        assert min(loader.runs["nvme-other"]["cached"][:PROMPTS]) > 0
    assert max(two.runs["nvme"]["cached"][:PROMPTS]) == 0
