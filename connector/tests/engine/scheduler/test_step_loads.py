"""Loads under their request's own step, and what the scheduler keeps of them. Requests of four blocks, two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.testing.generation import (
    SpillwayTieringManager,
    StepLoadingScheduler,
    make_cpu_tier,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import allocated, new_request, request_of

BLOCKS, BLOCK_TOKENS, ROWS = 4, 16, 12
TOKENS = BLOCKS * BLOCK_TOKENS


def request_for(request_id: str, prompt: int = 0) -> Request:
    """The prompt ends one token behind its blocks."""
    hashes = [bytes([number, prompt]) * 16 for number in range(BLOCKS)]
    return request_of(request_id, hashes, tokens=TOKENS + 1, block_tokens=BLOCK_TOKENS, status=RequestStatus.WAITING)


@pytest.fixture
def half() -> Iterator[StepLoadingScheduler]:
    region = unnamed_region(ROWS, 4096)
    manager = SpillwayTieringManager(
        make_cpu_tier(ROWS, region, "lru", enable_events=False),
        [],
        ROWS,
        ConnectorConfig.parse({"num_cpu_blocks": ROWS}),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    yield scheduler_half(manager, [attention], num_ranks=2, half=StepLoadingScheduler)
    region.cleanup()


def report(half, completed: dict[int, int], failed: set[int] = frozenset(), blocks: int = 0, seconds: float = 0.0):
    meta = SpillwayWorkerMetadata(
        completed_jobs=dict(completed), failed_jobs=set(failed), loaded_blocks=blocks, loading_seconds=seconds
    )
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def step(half, *requests: tuple[Request, list[int], int]):
    """The metadata of a step. requests: (request, device blocks, tokens computed before)."""
    new = [new_request(request.request_id, blocks, computed=computed) for request, blocks, computed in requests]
    scheduled = {}
    for request, _, computed in requests:
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, computed
        scheduled[request.request_id] = request.num_tokens - computed
    return half.build_connector_meta(step_output(scheduled, new))


def store(half, prompt: int = 0) -> None:
    """Bring a prompt to the CPU tier; its request has finished."""
    request = request_for(f"writer {prompt}", prompt)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    (job,) = step(half, (request, [1, 2, 3, 4, 5], 0)).store_jobs
    report(half, {job: 2})
    request.status = RequestStatus.FINISHED_STOPPED
    half.request_finished(request)


def ask(half, name: str, prompt: int = 0) -> tuple[Request, tuple[int | None, bool]]:
    request = request_for(name, prompt)
    half.on_new_request(request)
    return request, half.get_num_new_matched_tokens(request, 0)


def begin(half, request: Request, tokens: int, blocks: list[int]) -> None:
    given = allocated(blocks)
    for block in given.blocks[0]:
        block._block_hash = b"h"  # vLLM has entered the blocks in its prefix cache by now, as if they had been computed
    half.update_state_after_alloc(request, given, tokens)


def test_a_prefix_in_the_cpu_tier_is_loaded_by_the_step_of_its_request(half):
    store(half)
    request, answer = ask(half, "reader")
    assert answer == (TOKENS, False)
    begin(half, request, TOKENS, [11, 12, 13, 14, 15])
    meta = step(half, (request, [11, 12, 13, 14, 15], TOKENS))
    (load,) = meta.step_loads
    assert (load.request_id, load.transfer_spec[1].block_ids.tolist()) == ("reader", [11, 12, 13, 14])
    assert (list(load.transfer_spec[1].group_sizes), list(load.transfer_spec[1].block_indices)) == ([4], [0])
    assert not meta.load_jobs and not half._jobs, "nothing waits for it"
    assert len(half.manager.primary_tier._readers) == BLOCKS
    report(half, {load.job_id: 1})
    assert half.loads_within_steps({14, 99}) and not half.loads_within_steps({10, 15})
    assert len(half.manager.primary_tier._readers) == BLOCKS, "another rank still reads the rows"
    report(half, {load.job_id: 1})
    assert not half.manager.primary_tier._readers
    assert not half._step_loads and not half._step_requests and not half.loads_within_steps({14})


def test_a_prompt_of_whole_blocks_computes_its_last_one(half):
    store(half)
    hashes = request_for("reader").block_hashes
    request = request_of("reader", hashes, tokens=TOKENS, block_tokens=BLOCK_TOKENS, status=RequestStatus.WAITING)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (TOKENS - BLOCK_TOKENS, False)


def test_an_answer_that_was_not_taken_leaves_nothing(half):
    """vLLM found no blocks for the request."""
    store(half)
    request, answer = ask(half, "reader")
    assert answer == (TOKENS, False)
    half.build_connector_meta(step_output())
    assert not half._step_loads and not half.manager.primary_tier._readers
    assert half.get_num_new_matched_tokens(request, 0) == (TOKENS, False)


def test_requests_beside_it_wait_no_longer_than_the_bound(half):
    store(half)
    other = request_for("other", prompt=9)
    half.on_new_request(other)
    half.get_num_new_matched_tokens(other, 0)
    (job,) = step(half, (other, [21, 22, 23, 24, 25], 0)).store_jobs
    request, answer = ask(half, "reader")
    assert answer == (TOKENS, True), "how long a load takes is not known yet"
    report(half, {job: 2}, blocks=100, seconds=100 * 0.004)
    assert half.get_num_new_matched_tokens(request, 0) == (TOKENS, False), "16 ms"
    report(half, {}, blocks=10_000, seconds=10_000 * 0.006)
    assert half.get_num_new_matched_tokens(request, 0) == (TOKENS, True), "24 ms"
    other.status = RequestStatus.FINISHED_STOPPED
    half.request_finished(other)
    assert half.get_num_new_matched_tokens(request, 0) == (TOKENS, False), "no request waits for it"


def test_the_loads_of_a_step_add_up(half):
    store(half, 1)
    store(half, 2)
    report(half, {}, blocks=100, seconds=100 * 0.004)
    first, answer = ask(half, "first", 1)
    assert answer == (TOKENS, False)
    begin(half, first, TOKENS, [11, 12, 13, 14, 15])
    _, answer = ask(half, "second", 2)
    assert answer == (TOKENS, True), "32 ms for both"
    step(half, (first, [11, 12, 13, 14, 15], TOKENS))


def test_what_was_computed_with_a_failed_load_is_stored_nowhere(half):
    store(half)
    request, _ = ask(half, "reader")
    request.append_output_token_ids([0] * BLOCK_TOKENS)
    request.block_hashes.append(bytes([77]) * 32)
    begin(half, request, TOKENS, [11, 12, 13, 14, 15, 16])
    meta = step(half, (request, [11, 12, 13, 14, 15, 16], TOKENS))
    (load,), (written,) = meta.step_loads, meta.store_jobs
    report(half, {load.job_id: 1}, failed={load.job_id})
    report(half, {load.job_id: 1, written: 2})
    assert len(half.manager.primary_tier.ready) == BLOCKS, "the block that followed is no hit"
    request.status = RequestStatus.PREEMPTED
    assert half.get_num_new_matched_tokens(request, 0) == (0, False), "it recomputes"
    assert not half._failed_jobs


def test_a_request_whose_load_failed_is_not_offered_it_again(half):
    """Nothing else changes in between, so an answer that was kept would still be current."""
    store(half)
    request, _ = ask(half, "reader")
    begin(half, request, TOKENS, [11, 12, 13, 14, 15])
    (load,) = step(half, (request, [11, 12, 13, 14, 15], TOKENS)).step_loads
    report(half, {load.job_id: 2}, failed={load.job_id})
    request.status = RequestStatus.PREEMPTED
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_reset_keeps_the_rows_until_every_rank_has_read_them(half):
    store(half)
    request, _ = ask(half, "reader")
    begin(half, request, TOKENS, [11, 12, 13, 14, 15])
    (load,) = step(half, (request, [11, 12, 13, 14, 15], TOKENS)).step_loads
    half.weights_changing("the test")
    assert len(half.manager.primary_tier.quarantine) == BLOCKS
    assert load.job_id in half.build_connector_meta(step_output()).jobs_to_flush
    report(half, {load.job_id: 1})
    assert len(half.manager.primary_tier.quarantine) == BLOCKS
    report(half, {load.job_id: 1})
    assert not half.manager.primary_tier.quarantine
    assert not half._step_requests
