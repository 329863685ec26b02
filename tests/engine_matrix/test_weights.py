"""Weights changed in place under a real engine of vLLM with a tiny random model: after a reset of the device's prefix
cache, of whatever kind, answers are those of the new weights.
"""

from __future__ import annotations

from typing import Any

import pytest
from module_runs import module_runs

from engine_matrix.test_adapters import difference
from engine_matrix.weights_run import WAYS

_ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
_APART = 0.05  # least effect of other weights, or the comparison proves nothing


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = str(tmp_path_factory.mktemp("weights"))
    return {run["question"]: run for run in module_runs("engine_matrix.weights_run", place, timeout_seconds=1800)}


@pytest.mark.timeout(1800)
def test_weights_that_are_named_use_the_shared_tier_at_once_and_find_their_own_kv_alone(runs: dict[str, Any]):
    assert [runs[f"named: {name}"]["cached"] > 0 for name in ("A", "B", "A again", "B again")] == [
        False,
        False,
        True,
        True,
    ]
    assert difference(runs["named: A"], runs["B: named"]) > _APART
    assert difference(runs["named: B"], runs["B: named"]) < _ROUNDING
    assert difference(runs["named: A again"], runs["named: A"]) < _ROUNDING
    assert difference(runs["named: B again"], runs["B: named"]) < _ROUNDING


@pytest.mark.timeout(1800)
def test_weights_changed_in_place_before_between_and_after_each_kind_of_reset(runs: dict[str, Any]):
    for way in WAYS:
        assert difference(runs[f"old: before, {way}"], runs[f"B: before, {way}"]) > _APART
        for when in ("before", "between", "across"):
            name = f"{when}, {way}"
            assert difference(runs[f"new: {name}"], runs[f"B: {name}"]) < _ROUNDING, name
            assert difference(runs[f"asked again: {name}"], runs[f"B: {name}"]) < _ROUNDING, name
