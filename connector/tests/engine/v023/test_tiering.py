"""Residency and waiting, over upstream's real CPU-tier manager and a scripted shared tier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.shared_tiers.prefix_tier import TierJobResult
from spillway_connector.engine.v023.cpu_tier import LruCpuTier
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.memory import unnamed_region

ROWS = 8


class ScriptedTier(SecondaryTierManager):
    """Answers lookups from a dict (absent: miss) and ends jobs when the test chooses."""

    def __init__(self) -> None:
        self.tier_type = "scripted"
        self.holds: dict[bytes, bool | None] = {}
        self.loads, self.stores, self.ended = [], [], []

    def lookup(self, key, req_context):
        return self.holds.get(key, False)

    def submit_store(self, job_metadata):
        self.stores.append(job_metadata)

    def submit_load(self, job_metadata):
        self.loads.append(job_metadata)

    def get_finished_jobs(self):
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def end(self, job, failed=(), seconds=0.001):
        result = TierJobResult(job.job_id, success=not failed, failed_keys=frozenset(failed), seconds=seconds)
        self.ended.append(result)


def key(number: int) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def request(name: str = "r") -> ReqContext:
    return ReqContext(req_id=name)


class Stack:
    def __init__(self, **config) -> None:
        self.clock = SteppedClock()
        self.tier = ScriptedTier()
        self.region = unnamed_region(ROWS, 4096)
        primary = LruCpuTier(ROWS, self.region)
        parsed = ConnectorConfig.parse({"num_cpu_blocks": ROWS, **config})
        self.manager = SpillwayTieringManager(
            primary,
            [self.tier],
            ROWS,
            parsed,
            chunk_tokens=128,
            chunk_bytes=4096,
            clock=self.clock,
        )

    def step(self) -> None:
        self.manager.on_schedule_end()

    def store(self, *numbers: int, context: ReqContext | None = None) -> list[bytes]:
        """Offload chunks from the device into the CPU tier and let the cascade end."""
        context = context or request("writer")
        output = self.manager.prepare_store([key(n) for n in numbers], context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)
        self.end_stores()
        return output.keys_to_store

    def end_stores(self) -> None:
        for job in self.tier.stores:
            self.tier.end(job)
        self.tier.stores = []
        self.step()

    def used_rows(self) -> int:
        return ROWS - self.manager.primary_tier.free_rows()


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    stack = Stack(**getattr(request, "param", {}))
    yield stack
    stack.region.cleanup()


def test_a_promotion_keeps_its_good_chunks(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(1): True, key(2): True, key(3): True}
    assert [stack.manager.lookup(key(n), context) for n in (1, 2, 3)] == [None, None, None]
    stack.step()
    (job,) = stack.tier.loads
    stack.tier.holds[key(2)] = False  # a failed load is a miss before it is reported
    stack.tier.end(job, failed=[key(2)])
    assert [stack.manager.lookup(key(n), context) for n in (1, 2, 3)] == [True, False, True]
    assert stack.used_rows() == 2


def test_waiting_ends_at_the_request_s_own_deadline_however_often_it_asks(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(1): None}  # a tier that never makes up its mind
    for _ in range(20):
        assert stack.manager.lookup(key(1), context) is None
        stack.step()
        stack.clock.advance(0.14)
    stack.clock.advance(0.3)  # 3.1 s since the first answer
    assert stack.manager.lookup(key(1), context) is False
    other = request("other")
    stack.manager.on_new_request(other)
    assert stack.manager.lookup(key(1), other) is None  # its own time


def test_a_promotion_that_never_ends_holds_no_request_beyond_its_deadline(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(1): True}
    assert stack.manager.lookup(key(1), context) is None
    stack.step()
    stack.clock.advance(3.1)
    assert stack.manager.lookup(key(1), context) is False


def test_promotions_are_bounded_in_flight_and_go_on_as_they_land(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(n): True for n in range(ROWS)}
    assert [stack.manager.lookup(key(n), context) for n in range(6)] == [None] * 4 + [False] * 2  # half of 8 rows
    stack.step()
    stack.tier.end(stack.tier.loads.pop())
    assert [stack.manager.lookup(key(n), context) for n in range(6)] == [True] * 4 + [None] * 2


def test_one_request_cannot_promote_over_its_own_head(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(n): True for n in range(20)}
    promoted = 0
    for _ in range(10):
        for n in range(20):
            if stack.manager.lookup(key(n), context) is False:
                break
        stack.step()
        while stack.tier.loads:
            job = stack.tier.loads.pop()
            promoted += len(job.keys)
            stack.tier.end(job)
    assert promoted == 6  # three quarters of 8 rows
    assert [stack.manager.lookup(key(n), context) for n in range(7)] == [True] * 6 + [False]


def promote(stack: Stack, name: str, number: int, seconds: float) -> bool | None:
    """The answer of the first lookup of a chunk; if it starts a promotion, let that end after `seconds`."""
    context = request(name)
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(number): True}
    answer = stack.manager.lookup(key(number), context)
    stack.step()
    while stack.tier.loads:
        stack.tier.end(stack.tier.loads.pop(), seconds=seconds)
    stack.step()
    return answer


@pytest.mark.parametrize("stack", [{"prefill_tokens_per_second": 1280.0}], indirect=True)  # a chunk in 100 ms
def test_a_tier_slower_than_recomputing_is_left_alone_but_for_a_probe(stack: Stack):
    assert promote(stack, "first", 1, seconds=0.2) is None
    assert promote(stack, "probe", 2, seconds=0.2) is None
    assert promote(stack, "third", 3, seconds=0.2) is False
    assert promote(stack, "first-again", 1, seconds=0.2) is True  # what the CPU tier holds is served all the same
    stack.clock.advance(31)
    assert promote(stack, "second-probe", 4, seconds=0.001) is None
    stack.clock.advance(60)
    assert promote(stack, "third-probe", 5, seconds=0.001) is None  # the slow past has faded
    assert promote(stack, "open-again", 6, seconds=0.001) is None
    assert stack.manager.take_stats().reduce()["tier_not_worth|scripted"] == 1


def test_a_failed_device_copy_never_becomes_a_hit_nor_a_cascade(stack: Stack):
    context = request("writer")
    output = stack.manager.prepare_store([key(1), key(2)], context)
    stack.manager.fail_store([key(2)])
    stack.manager.complete_store(output.keys_to_store, context)
    assert [sorted(job.keys) for job in stack.tier.stores] == [[key(1)]]
    stack.end_stores()
    reader = request()
    stack.manager.on_new_request(reader)
    assert stack.manager.lookup(key(1), reader) is True
    assert stack.manager.lookup(key(2), reader) is False
    assert stack.used_rows() == 1
    stack.store(2)  # once more, this time well
    assert stack.manager.lookup(key(2), reader) is True


def test_rows_of_a_running_cascade_are_not_evicted(stack: Stack):
    context = request("writer")
    output = stack.manager.prepare_store([key(n) for n in range(ROWS)], context)
    stack.manager.complete_store(output.keys_to_store, context)
    assert stack.manager.prepare_store([key(100)], context) is None  # all rows are being read
    stack.end_stores()
    assert stack.manager.prepare_store([key(100)], context) is not None


def test_reset_drops_everything_and_leaves_nothing_pending(stack: Stack):
    context = request()
    stack.store(1)
    stack.manager.on_new_request(context)
    stack.manager.reset_cache()
    assert stack.manager.lookup(key(1), context) is False
    assert stack.used_rows() == 0


def test_a_finished_request_leaves_no_trace(stack: Stack):
    context = request()
    stack.manager.on_new_request(context)
    stack.tier.holds = {key(1): True}
    stack.manager.lookup(key(1), context)
    stack.step()
    stack.manager.on_request_finished(context)  # aborted while its promotion runs
    stack.tier.end(stack.tier.loads.pop())
    stack.step()
    assert not stack.manager._bounds.waits
    assert stack.manager._bounds.rows_in_flight == 0
    again = request("again")
    stack.manager.on_new_request(again)
    assert stack.manager.lookup(key(1), again) is True


def test_random_schedules_leak_no_row(stack: Stack):
    """Seeded schedules of stores, lookups, failures, aborts and resets; at the end every row can be had again."""
    rng = np.random.default_rng(20260)
    for _ in range(3000):
        action = rng.integers(0, 7)
        name = f"r{rng.integers(0, 4)}"
        context = request(name)
        numbers = [int(n) for n in rng.integers(0, 24, size=rng.integers(1, 5))]
        if action == 0:
            stack.manager.on_new_request(context)
        elif action in (1, 2):
            stack.tier.holds = {key(int(n)): bool(rng.integers(0, 2)) or None for n in rng.integers(0, 24, size=8)}
            for n in numbers:
                stack.manager.lookup(key(n), context)
        elif action == 3:
            output = stack.manager.prepare_store([key(n) for n in dict.fromkeys(numbers)], context)
            if output is not None and output.keys_to_store:
                if rng.random() < 0.3:
                    stack.manager.fail_store(output.keys_to_store[:1])
                stack.manager.complete_store(output.keys_to_store, context)
        elif action == 4:
            stack.manager.on_request_finished(context)
        else:
            for jobs in (stack.tier.loads, stack.tier.stores):
                while jobs and rng.random() < 0.7:
                    job = jobs.pop(0)
                    stack.tier.end(job, failed=[k for k in job.keys if job.is_promotion and rng.random() < 0.3])
        stack.step()
    for job in stack.tier.loads + stack.tier.stores:
        stack.tier.end(job)
    stack.step()
    assert stack.manager._bounds.rows_in_flight == 0
    assert not stack.manager._transfer_jobs
    output = stack.manager.prepare_store([key(1000 + n) for n in range(ROWS)], request("last"))
    assert output is not None
    assert sorted(output.store_spec.block_ids.tolist()) == list(range(ROWS))
