"""The layers of a model whose pages have several sizes, as vLLM describes them, and what vLLM makes of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

try:
    from vllm.v1.core import kv_cache_planning as planning  # type: ignore[attr-defined]
except ImportError:  # before vLLM 0.33
    planning = kv_cache_utils

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    BLOCKS_OUTERMOST: Any = KVCacheLayout.BLHNC  # a block holds the pages of all layers side by side
except ImportError:  # vLLM 0.23
    BLOCKS_OUTERMOST = None


def deepseek_v4(_block_tokens: int = 256) -> dict[str, KVCacheSpec]:
    """DeepSeek-V4-Flash: 43 layers, two with a window alone, the others in turns with one entry for 4 tokens, and an
    index, or for 128. Their kernels take one size of blocks."""
    aligned: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    latent: dict[str, Any] = {
        **aligned, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }  # fmt: skip
    ratio_name = "compress_ratio"
    if "tokens_per_state" in {field.name for field in fields(MLAAttentionSpec)}:  # vLLM 0.32
        ratio_name, latent["state_content_bytes"] = "tokens_per_state", 584
    state: dict[str, Any] = {**aligned, "dtype": torch.float32}
    specs: dict[str, KVCacheSpec] = {}
    for n in range(43):
        specs[f"layer.{n}.window"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent)
        if n < 2:
            continue
        ratio = 128 if n % 2 else 4
        specs[f"layer.{n}"] = MLAAttentionSpec(block_size=256, **latent | {ratio_name: ratio})
        specs[f"layer.{n}.state"] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=(4 if ratio == 4 else 2) * 512,
            sliding_window=8 if ratio == 4 else 128,
            **state,
        )
        if ratio == 4:
            index = aligned | {"head_size": 132, "dtype": torch.uint8, ratio_name: 4}
            specs[f"layer.{n}.index"] = MLAAttentionSpec(block_size=256, **index)
            specs[f"layer.{n}.index_state"] = SlidingWindowMLASpec(
                block_size=4, head_size=4 * 128, sliding_window=8, **state
            )
    return specs


def kv_cache_config(specs: Mapping[str, KVCacheSpec], memory_bytes: int) -> KVCacheConfig:
    """Return the KV cache configuration of a worker of this vLLM with these layers."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: BLOCKS_OUTERMOST,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace()),
    )
    groups = planning.get_kv_cache_groups(config, dict(specs))
    made: KVCacheConfig = planning.get_kv_cache_config_from_groups(config, groups, memory_bytes)
    return made


def of_scheduler(config: KVCacheConfig) -> KVCacheConfig:
    """Return the scheduler's view of the configuration: the spec of one layer of each group."""
    made: KVCacheConfig = kv_cache_utils.generate_scheduler_kv_cache_config([copy.deepcopy(config)])
    return made


def counted_block_bytes(config: KVCacheConfig) -> int:
    """Return the bytes that vLLM counts for a block of any group in a row, with the padding of pages."""
    if BLOCKS_OUTERMOST is None:
        from spillway_connector.engine.v023.spec import group_block_bytes  # noqa: PLC0415

        return group_block_bytes(config)
    # Each tensor describes a place in one allocation.
    return int(config.kv_cache_tensors[0].size // config.num_blocks)
