"""Random lives of requests on the scheduler that vllm-ascend puts in the place of vLLM's, with its patches in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_lives.engine import SHAPES, Engine
from engine_lives.schedules import run
from vllm.v1.core.sched import scheduler
from vllm_ascend.patch.platform.patch_balance_schedule import BalanceScheduler

SCHEDULES = 20


@pytest.mark.parametrize("shape", ["full", "meetings"])
def test_no_byte_is_wrong_on_their_scheduler(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM looks at the model's class in a process of its own, which has no stand-ins.
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # without it no KV is shared, and no weights are named
    assert scheduler.Scheduler is BalanceScheduler
    engine = Engine(SHAPES[shape], tmp_path)
    for seed in range(SCHEDULES):
        run(engine, seed)
    engine.close()

    assert engine.figures.checked_tokens > 0
