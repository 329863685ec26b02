"""A step whose load failed is taken back for all requests that hold its blocks, on vLLM's own scheduler class."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.requests import request_of

TOKENS, BLOCK_TOKENS = 48, 16
HASHES = {"loads": [b"1", b"2", b"3"], "shares": [b"1", b"2", b"4"], "beside": [b"5", b"6", b"7"]}  # of each block


def request(name: str, status: RequestStatus = RequestStatus.RUNNING) -> Request:
    made = request_of(
        name,
        [each * 32 for each in HASHES.get(name, ())],
        tokens=TOKENS,
        block_tokens=BLOCK_TOKENS,
        status=status,
    )
    made.num_computed_tokens, made.num_in_flight_tokens, made.num_output_placeholders = TOKENS, 2, 2
    return made


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler with just the attributes that these methods read."""
    patch_vllm("failed-step-loads")
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.running, scheduler.waiting = [], FCFSRequestQueue()
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(12, [], [KVCacheGroupSpec(["layer"], attention)])
    scheduler.kv_cache_manager = manager = KVCacheManager(config, TOKENS, BLOCK_TOKENS, BLOCK_TOKENS)
    for name in HASHES:
        scheduler.running.append(running := request(name))
        found, tokens = manager.get_computed_blocks(running)[:2]
        manager.allocate_slots(running, TOKENS - tokens, tokens, found)
    assert [manager.get_block_ids(name)[0] for name in HASHES] == [[1, 2, 3], [1, 2, 4], [5, 6, 7]]
    earlier = request("preempted", RequestStatus.PREEMPTED)
    earlier.num_stale_output_tokens = 3
    scheduler.requests = {each.request_id: each for each in (*scheduler.running, earlier)}
    scheduler.encoder_cache_manager = EncoderCacheManager(0)
    scheduler.aux_output_connector = None
    scheduler.log_stats = scheduler.defer_block_free = False
    scheduler._inflight_prefills, scheduler._pending_encoder_input_ids = set(), {}
    scheduler.reset_preempted_req_ids, scheduler.prev_step_scheduled_req_ids = set(), {"loads", "beside"}
    return scheduler


def cached(scheduler: Scheduler) -> set[int]:
    """The blocks that the device's prefix cache knows."""
    return {block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks if block.block_hash is not None}


def test_every_token_under_way_of_a_request_with_such_a_block_is_dropped(scheduler: Scheduler) -> None:
    found = scheduler._update_requests_with_invalid_blocks(scheduler.running, {2}, {})

    assert found == (set(), 96, set()), "vLLM itself drops what is stale, this step's token included"
    assert [each.request_id for each in scheduler.running] == ["beside"]
    assert [each.request_id for each in scheduler.waiting] == ["loads", "shares"]
    for hurt in scheduler.waiting:
        assert (hurt.status, hurt.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
        assert (hurt.num_stale_output_tokens, hurt.drop_stale_output) == (2, True)
    assert not cached(scheduler), "the device's prefix cache forgets all"
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
    assert len(scheduler.running) == 3 and cached(scheduler) == set(range(1, 8))


def test_a_block_that_two_wait_with_is_computed_by_each(scheduler: Scheduler) -> None:
    """The second may run before the first one has computed it."""
    scheduler.block_size = 16
    both = [request(name, RequestStatus.WAITING_FOR_REMOTE_KVS) for name in ("loads", "shares")]
    found = scheduler._update_requests_with_invalid_blocks(iter(both), {2}, {}, evict_blocks=False)
    assert found == ({"loads", "shares"}, 64, set())
    assert [each.num_computed_tokens for each in both] == [16, 16]


class Connector:
    """The one method of the connector that is called. loading: device blocks of loads within steps under way."""

    def __init__(self, loading: set[int]) -> None:
        self.loading = loading

    def loads_within_steps(self, block_ids: set[int]) -> bool:
        return not self.loading.isdisjoint(block_ids)


def test_an_asynchronous_load_that_fails_costs_no_other_prefix(scheduler: Scheduler) -> None:
    scheduler.connector = Connector({1, 2})
    assert scheduler._update_requests_with_invalid_blocks(scheduler.running, {10, 11}, {}) == (set(), 0, set())
    assert len(scheduler.running) == 3 and cached(scheduler) == set(range(1, 8))
    assert not scheduler.requests["preempted"].drop_stale_output

    scheduler._update_requests_with_invalid_blocks(scheduler.running, {2, 11}, {})
    assert [each.request_id for each in scheduler.running] == ["beside"]
    assert not cached(scheduler)


def test_blocks_of_a_step_whose_request_was_aborted_since_cost_all_prefixes(scheduler: Scheduler) -> None:
    """Later blocks of the aborted request, computed with bad ones, may be in the prefix cache."""
    scheduler.connector = Connector({11})
    assert scheduler._update_requests_with_invalid_blocks(scheduler.running, {11}, {}) == (set(), 0, set())
    assert not cached(scheduler)
