"""The scheduler half with upstream's real scheduler, real CPU-tier manager and requests of four blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager
from vllm.v1.outputs import KVConnectorOutput

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.tiering import SpillwayTieringManager
from spillway_connector.engine.worker import SpillwayWorkerMetadata
from spillway_connector.testing.clock import SteppedClock

BLOCK_TOKENS, BLOCKS, ROWS = 16, 4, 8
TOKENS = BLOCK_TOKENS * BLOCKS


class FakeRequest(SimpleNamespace):
    """As much of vLLM's Request as the connector reads."""

    def __init__(self, request_id: str) -> None:
        hashes = [bytes([n]) * 32 for n in range(BLOCKS)]
        super().__init__(
            request_id=request_id,
            kv_transfer_params=None,
            block_hashes=hashes,
            num_tokens=TOKENS,
            num_prompt_tokens=TOKENS,
            num_computed_tokens=0,
            finished=False,
        )

    def is_finished(self) -> bool:
        return self.finished


@pytest.fixture
def scheduler() -> Iterator[SpillwayConnectorScheduler]:
    region = HostRegion(region_path(f"test-scheduler-{os.getpid()}"), ROWS, 4096)
    region.unlink_name()
    config = ConnectorConfig.parse({"num_cpu_blocks": ROWS})
    manager = SpillwayTieringManager(
        CPUPrimaryTierOffloadingManager(ROWS, region),
        [],
        ROWS,
        config,
        enable_events=False,
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    group = SimpleNamespace(
        kv_cache_spec=FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    )
    spec = SimpleNamespace(
        gpu_block_size=(BLOCK_TOKENS,),
        hash_block_size=BLOCK_TOKENS,
        block_size_factor=1,
        offload_prompt_only=True,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=2), cache_config=SimpleNamespace(enable_prefix_caching=True)
        ),
        get_manager=lambda: manager,
    )
    yield SpillwayConnectorScheduler(spec)
    region.cleanup()


def report(scheduler, completed: dict[int, int], failed: set[int] = frozenset()) -> None:
    meta = SpillwayWorkerMetadata(completed_jobs=completed, failed_jobs=set(failed))
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def build_meta(scheduler, scheduled: dict[str, int] | None = None, new: dict[str, list[int]] | None = None):
    """One scheduler step's metadata: `new` requests with their device blocks, `scheduled` tokens."""
    new_requests = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in (new or {}).items()]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    output = SimpleNamespace(
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        preempted_req_ids=None,
        finished_req_ids=set(),
    )
    return scheduler.build_connector_meta(output)


def compute_and_store(scheduler, name: str) -> int:
    """A request computes its blocks and a store job leaves for the workers; its id."""
    request = FakeRequest(name)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (job_id,) = build_meta(scheduler, {name: TOKENS}, {name: [1, 2, 3, 4]}).store_jobs
    return job_id


def ask(scheduler, name: str) -> tuple[FakeRequest, tuple[int | None, bool]]:
    request = FakeRequest(name)
    scheduler.on_new_request(request)
    return request, scheduler.get_num_new_matched_tokens(request, 0)


def test_a_store_becomes_a_hit_when_every_rank_has_done_it(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 1})
    assert ask(scheduler, "early")[1] == (None, False)
    report(scheduler, {job: 1})
    assert ask(scheduler, "reader")[1] == (TOKENS, True)


def test_a_store_that_failed_on_one_rank_is_no_hit(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 1}, failed={job})
    report(scheduler, {job: 1})
    assert ask(scheduler, "reader")[1] == (0, False)
    assert scheduler.manager.primary_tier._get_num_free_blocks() == ROWS
    assert not scheduler._failed_jobs


def test_a_request_whose_load_failed_recomputes_and_is_not_offered_the_load_again(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, matched = ask(scheduler, "reader")
    assert matched == (TOKENS, True)
    blocks = KVCacheBlocks(([KVCacheBlock(block_id) for block_id in (5, 6, 7, 8)],))
    scheduler.update_state_after_alloc(request, blocks, TOKENS)
    (load_job,) = build_meta(scheduler).load_jobs
    report(scheduler, {load_job: 2}, failed={load_job})
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert ask(scheduler, "another")[1] == (TOKENS, True)  # the bytes in the CPU tier are good
    scheduler.request_finished(request)
    assert not scheduler._recompute_only


def test_steps_that_prefill_are_timed_and_others_are_not(scheduler, monkeypatch):
    clock = SteppedClock()
    monkeypatch.setattr("spillway_connector.engine.scheduler.time.monotonic", clock)
    build_meta(scheduler, {"a": 1000})
    build_meta(scheduler, {"a": 2000})  # async scheduling: begun before the first has ended
    clock.advance(1.0)
    report(scheduler, {})
    clock.advance(2.0)
    report(scheduler, {})
    assert scheduler.manager.prefill_rate.per_second == pytest.approx(1000)
    build_meta(scheduler, {"a": 1})  # a decode step
    clock.advance(1.0)
    report(scheduler, {})
    assert scheduler.manager.prefill_rate.per_second == pytest.approx(1000)


def test_a_preempted_request_waits_for_its_own_stores(scheduler):
    job = compute_and_store(scheduler, "writer")
    request = scheduler._req_status["writer"].req
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    report(scheduler, {job: 2})
    assert scheduler.get_num_new_matched_tokens(request, 0) == (TOKENS, True)
