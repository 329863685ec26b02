"""A request with windows or states starts again when its load failed; with attention alone vLLM decides."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of


def request(name: str, computed: int) -> Request:
    made = request_of(name, [], tokens=48, block_tokens=16)
    made.num_computed_tokens = computed
    return made


def group(spec: type) -> KVCacheGroupSpec:
    window = {"sliding_window": 32} if spec is SlidingWindowSpec else {}
    return KVCacheGroupSpec(["layer"], spec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, **window))


@pytest.fixture
def scheduler() -> Scheduler:
    """vLLM's own class with as much in it as these methods read: two requests, two groups."""
    patch_vllm("failed-loads")
    blocks = {"hurt": ([1, 2, 3], [0, 4, 5]), "fine": ([6, 7, 8], [0, 9, 10])}
    return part_of(
        Scheduler,
        kv_cache_config=KVCacheConfig(16, [], [group(FullAttentionSpec), group(SlidingWindowSpec)]),
        kv_cache_manager=part_of(KVCacheManager, get_block_ids=blocks.__getitem__),
        block_size=16,
    )


@pytest.mark.parametrize("bad_block", [2, 5])
def test_a_bad_block_of_any_group_sends_its_request_back_to_the_start(scheduler: Scheduler, bad_block: int):
    hurt, fine = request("hurt", 48), request("fine", 48)
    found = scheduler._update_requests_with_invalid_blocks([hurt, fine], {bad_block}, {}, evict_blocks=False)
    assert found == ({"hurt"}, 48, set())
    assert (hurt.num_computed_tokens, fine.num_computed_tokens) == (0, 48)


def test_requests_that_run_are_not_those_that_load(scheduler: Scheduler):
    running = request("hurt", 48)
    assert scheduler._update_requests_with_invalid_blocks([running], {2}, {"hurt": 1}) == (set(), 0, set())
    assert running.num_computed_tokens == 48


@pytest.mark.parametrize(("spec", "kept"), [(FullAttentionSpec, 16), (SlidingWindowSpec, 0)])
def test_only_attention_to_everything_keeps_what_came_before(scheduler: Scheduler, spec: type, kept: int):
    scheduler.kv_cache_config = KVCacheConfig(16, [], [group(spec)])
    scheduler.kv_cache_manager = part_of(KVCacheManager, get_block_ids={"hurt": ([1, 2, 3],)}.__getitem__)
    hurt = request("hurt", 48)
    found = scheduler._update_requests_with_invalid_blocks([hurt], {2}, {}, evict_blocks=False)
    assert found == ({"hurt"}, 48 - kept, set())
    assert hurt.num_computed_tokens == kept


def test_twice_is_harmless(scheduler: Scheduler):
    before = Scheduler._update_requests_with_invalid_blocks
    patch_vllm("failed-loads")
    assert Scheduler._update_requests_with_invalid_blocks is before
