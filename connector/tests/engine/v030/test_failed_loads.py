"""A step whose load failed is taken back for all requests that hold its blocks, on vLLM's own scheduler class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from spillway_connector.testing.generation import patch_vllm

BLOCKS = {"loads": [1, 2, 3], "shares": [1, 2, 9], "beside": [4, 5]}


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(name: str, status: RequestStatus = RequestStatus.RUNNING, stale: int = 0) -> Request:
    return Request(
        request_id=name,
        status=status,
        num_computed_tokens=48,
        num_in_flight_tokens=2,
        num_stale_output_tokens=stale,
        drop_stale_output=False,
        num_output_placeholders=2,
        spec_token_ids=[],
        num_preemptions=0,
    )


@pytest.fixture
def scheduler() -> Scheduler:
    """As much in it as these methods read."""
    patch_vllm("failed-step-loads")
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.running = [request(name) for name in BLOCKS]
    earlier = request("preempted", RequestStatus.PREEMPTED, stale=3)
    scheduler.requests = {each.request_id: each for each in (*scheduler.running, earlier)}
    scheduler.queue = []
    scheduler.waiting = SimpleNamespace(prepend_request=lambda each: scheduler.queue.insert(0, each.request_id))
    scheduler.evicted = set()
    cached = [SimpleNamespace(block_id=at, block_hash=None if at == 9 else object()) for at in range(10)]
    scheduler.kv_cache_manager = SimpleNamespace(
        get_block_ids=lambda name: (BLOCKS[name],),
        block_pool=SimpleNamespace(blocks=cached, evict_blocks=scheduler.evicted.update),
    )
    scheduler._free_request_blocks = lambda each: None
    scheduler.encoder_cache_manager = SimpleNamespace(free=lambda each: None)
    scheduler.aux_output_connector = None
    scheduler.log_stats = False
    scheduler._inflight_prefills, scheduler._pending_encoder_input_ids = set(), {}
    scheduler.reset_preempted_req_ids, scheduler.prev_step_scheduled_req_ids = set(), {"loads", "beside"}
    return scheduler


def test_every_token_under_way_of_a_request_with_such_a_block_is_dropped(scheduler: Scheduler) -> None:
    found = scheduler._update_requests_with_invalid_blocks(scheduler.running, {2}, {})

    assert found == (set(), 96, set()), "vLLM itself drops what is stale, this step's token included"
    assert [each.request_id for each in scheduler.running] == ["beside"]
    assert scheduler.queue == ["loads", "shares"]
    for name in scheduler.queue:
        hurt = scheduler.requests[name]
        assert (hurt.status, hurt.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
        assert (hurt.num_stale_output_tokens, hurt.drop_stale_output) == (2, True)
    assert scheduler.evicted == set(range(9)), "the device's prefix cache forgets all"
    assert not scheduler.prev_step_scheduled_req_ids


def test_tokens_under_way_of_a_request_that_was_preempted_since_are_dropped_too(scheduler: Scheduler) -> None:
    scheduler._update_requests_with_invalid_blocks(scheduler.running, {2}, {})
    assert scheduler.requests["preempted"].drop_stale_output
    assert not scheduler.requests["beside"].drop_stale_output


def test_requests_that_wait_for_their_load_are_left_to_vllm(scheduler: Scheduler) -> None:
    scheduler.block_size = 16
    waits = request("loads", RequestStatus.WAITING_FOR_REMOTE_KVS)
    found = scheduler._update_requests_with_invalid_blocks([waits], {2}, {}, evict_blocks=False)
    assert found == ({"loads"}, 32, set())
    assert waits.num_computed_tokens == 16
    assert len(scheduler.running) == 3 and not scheduler.evicted


def test_a_block_that_two_wait_with_is_computed_by_each(scheduler: Scheduler) -> None:
    """The second may run before the first one has computed it."""
    scheduler.block_size = 16
    both = [request(name, RequestStatus.WAITING_FOR_REMOTE_KVS) for name in ("loads", "shares")]
    found = scheduler._update_requests_with_invalid_blocks(iter(both), {2}, {}, evict_blocks=False)
    assert found == ({"loads", "shares"}, 64, set())
    assert [each.num_computed_tokens for each in both] == [16, 16]


class Connector:
    """As much as these methods read. loading: device blocks of loads within steps under way."""

    def __init__(self, loading: set[int]) -> None:
        self.loading = loading

    def loads_within_steps(self, block_ids: set[int]) -> bool:
        return not self.loading.isdisjoint(block_ids)


def test_an_asynchronous_load_that_fails_costs_no_other_prefix(scheduler: Scheduler) -> None:
    scheduler.connector = Connector({1, 2})
    assert scheduler._update_requests_with_invalid_blocks(scheduler.running, {7, 8}, {}) == (set(), 0, set())
    assert len(scheduler.running) == 3 and not scheduler.evicted
    assert not scheduler.requests["preempted"].drop_stale_output

    scheduler._update_requests_with_invalid_blocks(scheduler.running, {2, 7}, {})
    assert [each.request_id for each in scheduler.running] == ["beside"]
    assert scheduler.evicted == set(range(9))


def test_blocks_of_a_step_whose_request_was_aborted_since_cost_all_prefixes(scheduler: Scheduler) -> None:
    """Its own later blocks, computed with bad ones, may be in the prefix cache."""
    scheduler.connector = Connector({7})
    assert scheduler._update_requests_with_invalid_blocks(scheduler.running, {7}, {}) == (set(), 0, set())
    assert scheduler.evicted == set(range(9))
