"""The rule that chooses the chunks of windows to store: the connector's, or vLLM's own, which 0.32 has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.features.window_stores import WindowStores
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.testing.generation import make_cpu_tier, scheduler_half
from spillway_connector.testing.memory import unnamed_region

ROWS, ROW_BYTES, BLOCK_TOKENS = 8, 4096, 16
FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=32
)
STATES = MambaSpec(block_size=BLOCK_TOKENS, shapes=((2, 2),), dtypes=(torch.bfloat16,))


@pytest.fixture
def manager() -> Iterator[SpillwayTieringManager]:
    region = unnamed_region(ROWS, ROW_BYTES)
    config = ConnectorConfig.parse({"num_cpu_blocks": ROWS})
    cpu_tier = make_cpu_tier(ROWS, region, "lru", enable_events=False)
    yield SpillwayTieringManager(cpu_tier, [], ROWS, config, chunk_tokens=BLOCK_TOKENS, chunk_bytes=ROW_BYTES)
    region.cleanup()


@pytest.mark.parametrize(
    ("groups", "given", "of_vllm", "of_the_connector"),
    [
        ([FULL, WINDOW], None, None, True),
        ([FULL, WINDOW], 0, None, True),  # vLLM's default
        ([FULL, WINDOW], 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, False),
        ([WINDOW], 0, None, False),
        ([FULL, STATES], 0, None, True),
    ],
)
def test_one_rule_chooses_the_chunks_of_windows(
    manager: SpillwayTieringManager,
    groups: list[KVCacheSpec],
    given: int | None,
    of_vllm: int | None,
    of_the_connector: bool,
) -> None:
    half = scheduler_half(manager, groups, retention_interval=given)
    assert half.config.retention_interval == of_vllm
    assert (half.window_stores is not None) == of_the_connector


def test_a_window_is_as_long_as_drafts_of_several_modules_need() -> None:
    longer = dataclasses.replace(WINDOW, extra_retained_tokens=2)
    stores = WindowStores.of([FULL, longer], [BLOCK_TOKENS, BLOCK_TOKENS], 1, 8 * BLOCK_TOKENS, drafts=True)
    assert stores is not None
    (window,) = stores._windows
    assert window.chunks == 3 + 1  # 34 tokens, and one chunk more for the draft's layers
