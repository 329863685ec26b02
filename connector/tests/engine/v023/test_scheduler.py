"""Behaviour of the scheduler half in vLLM 0.23 alone."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.testing.generation import SpillwayTieringManager, make_cpu_tier, scheduler_half, step_output
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import new_request, request_of

BLOCKS, BLOCK_TOKENS = 4, 16
TOKENS = BLOCKS * BLOCK_TOKENS


def test_a_reset_preempts_without_a_word_and_its_stores_end_first() -> None:
    """vLLM reports requests that `schedule` preempts; those that a reset preempts are not reported, and their blocks
    are free."""
    region = unnamed_region(2 * BLOCKS, 4096)
    manager = SpillwayTieringManager(
        make_cpu_tier(2 * BLOCKS, region, "lru", enable_events=False),
        [],
        2 * BLOCKS,
        ConnectorConfig.parse({"num_cpu_blocks": 2 * BLOCKS}),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    half = scheduler_half(manager, [attention])
    request = request_of(
        "writer", [bytes([number]) * 32 for number in range(BLOCKS)], tokens=TOKENS, block_tokens=BLOCK_TOKENS
    )
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    new = [new_request("writer", [1, 2, 3, 4])]
    (job,) = half.build_connector_meta(step_output({"writer": TOKENS}, new)).store_jobs
    assert half.build_connector_meta(step_output()).jobs_to_flush == set()
    request.status = RequestStatus.PREEMPTED
    assert half.build_connector_meta(step_output()).jobs_to_flush == {job}
    report = SpillwayWorkerMetadata(completed_jobs={job: 1})
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert half.build_connector_meta(step_output()).jobs_to_flush == set()
    region.cleanup()
