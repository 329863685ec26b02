"""A pause of vLLM 0.23 waits for copies, and one that fails is its caller's failure, not the engine's."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc

from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.vllm_parts import part_of


class Connector:
    copying = True
    steps_without_requests = False

    def copies_under_way(self) -> bool:
        return self.copying


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own, with nothing to schedule."""
    monkeypatch.setattr(Scheduler, "has_requests", Scheduler.has_requests)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    patch_vllm("pauses", "failed-pauses")
    patch_vllm("pauses", "failed-pauses")
    return part_of(
        Scheduler,
        connector=Connector(),
        running=[],
        waiting=[],
        skipped_waiting=[],
        requests={},
        finished_req_ids=set(),
        num_waiting_for_streaming_input=0,
        _pause_state=PauseState.UNPAUSED,
    )


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
def test_a_paused_engine_steps_on_until_its_copies_have_ended(scheduler: Any, state: PauseState):
    scheduler._pause_state = state
    assert scheduler.has_requests()
    scheduler.connector.copying = False
    assert not scheduler.has_requests()


def test_an_engine_without_requests_steps_on_while_it_settles(scheduler: Any):
    scheduler.connector.steps_without_requests = True
    assert scheduler.has_requests()


def test_otherwise_vllm_decides(scheduler: Any):
    assert not scheduler.has_requests()
    scheduler._pause_state, scheduler.connector = PauseState.PAUSED_ALL, None
    assert not scheduler.has_requests()
    scheduler.finished_req_ids = {"one"}
    assert scheduler.has_requests()


def test_a_pause_that_fails_at_its_end_leaves_the_engine(scheduler: Any):
    def fails(engine: Any, future: Future[Any]) -> None:
        raise RuntimeError("Failed to reset KV cache")

    first: Future[Any] = Future()
    second: Future[Any] = Future()
    succeeds = partial(lambda engine, future: future.set_result(None), future=second)
    core = part_of(EngineCoreProc, _idle_state_callbacks=[partial(fails, future=first), succeeds])

    core._notify_idle_state_callbacks()

    assert second.result(0) is None
    with pytest.raises(RuntimeError, match="Failed to reset"):
        first.result(0)


def test_what_has_no_caller_is_raised(scheduler: Any):
    core = part_of(EngineCoreProc, _idle_state_callbacks=[lambda engine: engine.missing])
    with pytest.raises(AttributeError):
        core._notify_idle_state_callbacks()
