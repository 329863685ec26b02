"""Spillway's connector and vLLM's ExampleConnector in one engine (MultiConnector), with a tiny random model."""

from __future__ import annotations

from typing import Any

import pytest
from module_runs import module_runs

from engine_matrix.models import BLOCK_TOKENS
from engine_matrix.test_adapters import difference
from spillway_connector import metrics

_ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
_APART = 0.05  # least effect of other weights, or the comparison proves nothing


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (run,) = module_runs("engine_matrix.combined_run", str(tmp_path_factory.mktemp("combined")), timeout_seconds=1800)
    return run


def test_answers_are_the_same_whichever_loads(found: dict[str, Any]) -> None:
    answers, loadable = found["answers"], (found["blocks"] - 1) * BLOCK_TOKENS
    assert answers["computed"]["cached"] == 0
    for question in ("loaded by ours", "loaded by the other", "loaded by ours what the other had loaded"):
        assert answers[question]["cached"] >= loadable, question
        assert difference(answers[question], answers["computed"]) < _ROUNDING, question


def test_a_change_of_weights_drops_what_ours_holds(found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert answers["after a change of weights"]["cached"] == 0
    assert answers["computed with other weights"]["cached"] == 0
    assert difference(answers["after a change of weights"], answers["computed with other weights"]) < _ROUNDING
    assert difference(answers["after a change of weights"], answers["computed"]) > _APART


def test_its_metrics_and_events_reach_the_api_process(found: dict[str, Any]) -> None:
    assert found["published"]
    assert {metrics.PROCESS_SETTING.name, metrics.CPU_TIER_BLOCKS.name} <= set(found["series"])
