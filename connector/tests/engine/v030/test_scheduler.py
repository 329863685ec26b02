"""Calls of vLLM's half into the manager since 0.33: under its lock, and after all else at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.request import RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.testing.generation import SpillwayTieringManager, make_cpu_tier, scheduler_half, step_output
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import new_request, request_of

BLOCK_TOKENS, ROWS = 16, 8
HOOKS = ("on_new_request", "prepare_store", "on_request_finished", "on_schedule_end", "take_events", "get_stats")

pytestmark = pytest.mark.skipif(not hasattr(OffloadingManager, "lock"), reason="since vLLM 0.33")


class WatchedManager(SpillwayTieringManager):
    """Notes its calls, and those of them that come without the lock."""

    calls: list[str]
    unlocked: list[str]
    depth = 0

    @property
    def lock(self) -> AbstractContextManager[None]:
        return self._held()

    @contextmanager
    def _held(self) -> Iterator[None]:
        assert not self.depth, "vLLM says of its lock that it may be entered once at a time"
        self.depth += 1
        yield
        self.depth -= 1

    def __getattribute__(self, name: str):
        if name in HOOKS:
            self.calls.append(name)
            if not self.depth:
                self.unlocked.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def manager() -> Iterator[WatchedManager]:
    region = unnamed_region(ROWS, 4096)
    WatchedManager.calls, WatchedManager.unlocked = [], []
    yield WatchedManager(
        make_cpu_tier(ROWS, region, "lru", enable_events=False),
        [],
        ROWS,
        ConnectorConfig.parse({"num_cpu_blocks": ROWS}),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    region.cleanup()


def test_a_step_ends_for_the_manager_after_its_stores_and_finished_requests(manager: WatchedManager) -> None:
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    half = scheduler_half(manager, [attention])
    request = request_of(
        "one", [bytes([7]) * 32], tokens=BLOCK_TOKENS + 1, block_tokens=BLOCK_TOKENS, status=RequestStatus.WAITING
    )
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    request.status = RequestStatus.RUNNING
    manager.calls.clear()
    assert half.build_connector_meta(step_output({"one": request.num_tokens}, [new_request("one", [1, 2])])).store_jobs
    assert manager.calls[-1] == "on_schedule_end" and "prepare_store" in manager.calls

    request.status = RequestStatus.FINISHED_STOPPED
    half.request_finished(request)
    manager.calls.clear()
    half.build_connector_meta(step_output(finished={"one"}))
    assert manager.calls[-2:] == ["on_request_finished", "on_schedule_end"]
    assert manager.depth == 0
    # Spillway's own hooks enter its manager outside of vLLM's steps, too: only the scheduler's thread does.
    assert {"prepare_store", "on_request_finished", "on_schedule_end"}.isdisjoint(manager.unlocked)


def test_the_lock_of_spillways_manager_holds_nothing() -> None:
    assert SpillwayTieringManager.lock is OffloadingManager.lock
