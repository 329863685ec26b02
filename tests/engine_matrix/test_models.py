"""A small case of each KV layout that a CPU runs; `make test-models` runs every case of every model.

One process with one engine after the other, all of them vLLM's own with tiny random models: importing vLLM takes longer
than an engine of one rank. Models of latents need another, as vLLM lacks a part of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_matrix.verdict import Outcome, faults, run_models

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
    "llama-tp2": SMALL,
    "llama-pp2": ["none", "nvme", "lossy"],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    wanted = [(name, cases) for name, cases in CASES.items() if cases]
    return run_models(wanted, tmp_path_factory.mktemp("models"))


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


def test_two_ranks_answer_as_without_offload(outcomes: dict[str, Outcome]) -> None:
    require_same_answers(outcomes["llama-tp2"], CASES["llama-tp2"])


def test_two_pipeline_stages_of_unequal_layers_answer_as_without_offload(outcomes: dict[str, Outcome]) -> None:
    require_same_answers(outcomes["llama-pp2"], CASES["llama-pp2"])


def test_latents_that_one_rank_stored_are_loaded_by_two_and_the_other_way_round(tmp_path: Path) -> None:
    """Engines of one model with other numbers of ranks, on one directory, one after the other."""
    one, two = "deepseek-v2", "deepseek-v2-two-ranks"
    turns = [(one, ["none", "nvme"]), (two, ["nvme-other", "nvme"]), (one, ["nvme-other"])]
    found = run_models(turns, tmp_path)
    require_same_answers(found[one], ["none", "nvme", "nvme-other"])
    found[two].runs = {"none": found[one].runs["none"], **found[two].runs}
    require_same_answers(found[two], ["none", "nvme-other", "nvme"])
    for loader in found.values():
        # Already when each prompt comes for the first time: by then this engine has computed none of it.
        assert min(loader.runs["nvme-other"]["cached"][:PROMPTS]) > 0
    assert max(found[two].runs["nvme"]["cached"][:PROMPTS]) == 0
