"""Waits for a load in steps that compute nothing."""

from __future__ import annotations

import pytest
from vllm.config import ParallelConfig

from spillway_connector.engine.worker.half import IDLE_STEP_SECONDS_MAX, idle_step_seconds_max


@pytest.mark.parametrize(
    ("pipeline", "data", "waits"),
    [
        (1, 1, True),
        (2, 1, False),  # another stage computes meanwhile, and its result would come later
        (1, 2, False),  # the other ranks of a mixture of experts would wait in the same step
    ],
)
def test_only_an_engine_whose_workers_compute_nothing_meanwhile_waits(pipeline, data, waits):
    parallel = ParallelConfig(pipeline_parallel_size=pipeline, data_parallel_size=data)
    assert idle_step_seconds_max(parallel) == (IDLE_STEP_SECONDS_MAX if waits else 0.0)
