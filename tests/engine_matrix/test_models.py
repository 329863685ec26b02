"""A small case of each KV layout that a CPU runs; `make test-models` runs every case of every model.

One process with one engine after the other, all of them vLLM's own with tiny random models. Two ranks are separate
processes, bound to cores by the environment, so they get another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_matrix.verdict import Outcome, faults, run_model, run_models
from spillway_connector.engine.generation import Generation, generation

pytestmark = pytest.mark.timeout(1800)  # of the first, which starts all engines
CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split())
HAS_FP8_CACHE = bool(CPU_FLAGS & {"avx512f", "amx_tile"})
SMALL = ["none", "cpu", "lossy"]  # the reference answers, Spillway's, and the control with wrong bytes
MEETS = ["none", "meet", "meet-async"] if generation() is Generation.V023 else []
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


@pytest.mark.skipif(not MEETS, reason="vLLM 0.23 alone")
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
