"""Weights changed in place under a real engine of vLLM with a tiny random model: after a reset of the device's prefix
cache, of whatever kind, answers are those of the new weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from module_runs import module_runs

from engine_matrix.test_adapters import difference
from engine_matrix.weights_run import WAYS

_ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
_APART = 0.05  # least effect of other weights, or the comparison proves nothing


@pytest.mark.timeout(1800)
def test_weights_changed_in_place_before_between_and_after_each_kind_of_reset(tmp_path: Path):
    runs = {
        run["question"]: run for run in module_runs("engine_matrix.weights_run", str(tmp_path), timeout_seconds=1800)
    }
    for way in WAYS:
        assert difference(runs[f"old: before, {way}"], runs[f"B: before, {way}"]) > _APART
        for when in ("before", "between", "across"):
            name = f"{when}, {way}"
            assert difference(runs[f"new: {name}"], runs[f"B: {name}"]) < _ROUNDING, name
            assert difference(runs[f"asked again: {name}"], runs[f"B: {name}"]) < _ROUNDING, name
