"""Specs that vLLM builds in the engines of slow_tier.py: its own tiering and Spillway's, over disks slower than the
machine's. Importing this slows down the loads of every tier of the process to $BENCH_TIER_BYTES_PER_SECOND.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.kv_offload.tiering.fs import manager as upstream
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from spillway_connector.engine.shared_tiers import open_shared_tier
from spillway_connector.engine.spec import SpillwayOffloadingSpec
from spillway_connector.testing.faults import Throttle, ThrottledTier
from spillway_connector.transfer.stats import Operation

__all__ = ["SpillwayOffloadingSpec", "UpstreamSpec"]

_throttle = Throttle(float(os.environ["BENCH_TIER_BYTES_PER_SECOND"]))
_open_tier, _load_block = open_shared_tier.open_tier, upstream.load_block


class UpstreamSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec under a name that vLLM does not know, so that it imports this module."""


def _open_slow_tier(*arguments: Any) -> Any:
    return ThrottledTier(_open_tier(*arguments), _throttle, [Operation.LOAD])


def _load_block_slowly(source_path: str, view: memoryview, offset: int, block_size: int) -> None:
    _throttle.wait(block_size)
    _load_block(source_path, view, offset, block_size)


open_shared_tier.open_tier = _open_slow_tier
upstream.load_block = _load_block_slowly
