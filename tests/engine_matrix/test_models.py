"""One of the models of the matrix, the rest of which `make test-models` runs: sliding windows beside full attention.

One process with one engine after the other, all of them vLLM's own with a tiny random model on the CPU.
"""

from __future__ import annotations

import pytest

from engine_matrix.verdict import faults, run_model


@pytest.mark.timeout(1800)
def test_several_kv_groups_answer_as_without_offload(tmp_path):
    cases = ["none", "cpu", "lossy", "failing", "npu", "npu-off"]
    outcome = run_model("gemma3-window", tmp_path, cases)
    assert not outcome.refusals, outcome.log
    assert list(outcome.runs) == cases
    assert faults(outcome) == []
