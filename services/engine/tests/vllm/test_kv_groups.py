"""The groups that the memory arithmetic counts are those that vLLM makes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size, get_kv_cache_groups
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from spillway_engine.model_shape import ModelShape, read_model_shape

SHAPE = ModelShape(1, 2, 64, None, "bfloat16", None, 0)


def test_layers_of_two_kinds_are_grouped_alike() -> None:
    chosen = random.Random(30)
    heads = {"num_kv_heads": SHAPE.kv_heads, "head_size": SHAPE.head_dim, "dtype": torch.bfloat16}
    for _ in range(300):
        full, sliding = chosen.randrange(1, 70), chosen.randrange(1, 70)
        specs: dict[str, KVCacheSpec] = {f"f{n}": FullAttentionSpec(block_size=16, **heads) for n in range(full)}
        specs |= {f"s{n}": SlidingWindowSpec(block_size=16, sliding_window=64, **heads) for n in range(sliding)}
        groups = _get_kv_cache_groups_uniform_page_size(specs)
        shape = replace(SHAPE, layers=full + sliding, sliding_layers=sliding)

        assert len(groups) == shape.kv_groups
        # vLLM pads every group to the largest.
        assert max(len(group.layer_names) for group in groups) <= shape.group_layers
        page = next(iter(specs.values())).page_size_bytes
        assert shape.bytes_per_token_of_rank("bfloat16", 1) * 16 == shape.group_layers * page


def test_layers_in_chunks_are_one_group_with_the_others() -> None:
    """VllmConfig turns groups of several kinds off for a model with attention_chunk_size."""
    heads = {"num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    specs: dict[str, KVCacheSpec] = {f"f{n}": FullAttentionSpec(block_size=16, **heads) for n in range(12)}
    specs |= {f"c{n}": ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=8192, **heads) for n in range(36)}
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=True)
    [group] = get_kv_cache_groups(SimpleNamespace(scheduler_config=scheduler), specs)  # type: ignore[arg-type]
    llama_4 = {
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12,
    }  # fmt: skip
    shape = read_model_shape(llama_4)

    assert (len(group.layer_names), 1) == (shape.group_layers, shape.kv_groups)
