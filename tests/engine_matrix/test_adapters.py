"""Engines with other LoRA weights under one adapter name and one NVMe folder: vLLM's own, with a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from module_runs import module_runs

from engine_matrix.engine_run import PROMPT_BLOCKS
from engine_matrix.models import BLOCK_TOKENS

_ROUNDING = 1e-3  # of a logprob, between a prompt computed whole and one computed behind a hit
_APART = 0.05  # least effect of other weights, or the comparison proves nothing


def ask(folder: Path) -> dict[str, dict[str, Any]]:
    runs = module_runs("engine_matrix.adapter_run", str(folder), timeout_seconds=1800)
    return {run["question"]: run for run in runs}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of the likeliest tokens' logprobs. Rounding may swap the last of them, not most."""
    left, right = one["logprobs"], other["logprobs"]
    both = left.keys() & right.keys()
    return max(abs(left[token] - right[token]) for token in both) if len(both) > 0.8 * len(left) else float("inf")


@pytest.mark.timeout(1800)
def test_one_adapter_name_and_other_weights(tmp_path: Path):
    runs = ask(tmp_path)
    ours, theirs = runs["plain, ours"], runs["plain, theirs"]
    assert difference(ours, theirs) > _APART
    assert runs["first, ours"]["cached"] == 0
    assert difference(runs["first, ours"], ours) < _ROUNDING
    assert runs["first, ours again"]["cached"] == PROMPT_BLOCKS * BLOCK_TOKENS
    assert difference(runs["first, ours again"], ours) < _ROUNDING
    assert runs["second, theirs"]["cached"] == 0
    assert difference(runs["second, theirs"], theirs) < _ROUNDING
    # The same name in the same engine: what the first engine stored with these weights, and nothing of the others.
    assert runs["second, ours in place of theirs"]["cached"] == PROMPT_BLOCKS * BLOCK_TOKENS
    assert difference(runs["second, ours in place of theirs"], ours) < _ROUNDING
