"""The scheduler half on the part of vLLM's configuration that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.kv_cache_interface import KVCacheSpec

from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.tiering import SpillwayTieringManager


def scheduler_half(
    manager: SpillwayTieringManager, groups: Sequence[KVCacheSpec], num_ranks: int = 1
) -> SpillwayConnectorScheduler:
    """For KV groups of equal block size, one device block to a chunk."""
    block_tokens = groups[0].block_size
    spec = SimpleNamespace(
        gpu_block_size=(block_tokens,) * len(groups),
        hash_block_size=block_tokens,
        block_size_factor=1,
        offload_prompt_only=True,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=group) for group in groups]),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=num_ranks),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
        ),
        get_manager=lambda: manager,
    )
    return SpillwayConnectorScheduler(cast(Any, spec))
