"""The groups that the memory arithmetic counts are those that vLLM makes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig
from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from spillway_connector.engine.layouts.packed_blocks import first_spec, row_block_bytes
from spillway_connector.plan.kv_groups import KvGroup
from spillway_connector.testing.kv_caches import counted_block_bytes, deepseek_v4, kv_cache_config
from spillway_connector.testing.vllm_parts import part_of
from spillway_engine.drafters import with_drafter
from spillway_engine.model_shape import ModelShape, read_model_shape

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before vLLM 0.33
    from vllm.v1.core import kv_cache_utils as planning
try:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    LAYOUT: Any = KVCacheLayout.LBHNC
except ImportError:  # vLLM 0.23
    LAYOUT = None

SHAPE = ModelShape(1, 2, 64, None, "bfloat16", None, 0)


def test_layers_of_two_kinds_are_grouped_alike() -> None:
    chosen = random.Random(30)
    heads = {"num_kv_heads": SHAPE.kv_heads, "head_size": SHAPE.head_dim, "dtype": torch.bfloat16}
    for _ in range(300):
        full, sliding = chosen.randrange(1, 70), chosen.randrange(1, 70)
        specs: dict[str, KVCacheSpec] = {f"f{n}": FullAttentionSpec(block_size=16, **heads) for n in range(full)}
        specs |= {f"s{n}": SlidingWindowSpec(block_size=16, sliding_window=64, **heads) for n in range(sliding)}
        groups = planning._get_kv_cache_groups_uniform_page_size(specs)
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
    config = VllmConfig(scheduler_config=SchedulerConfig.default_factory(disable_hybrid_kv_cache_manager=True))
    [group] = planning.get_kv_cache_groups(config, specs)
    llama_4 = {
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12,
    }  # fmt: skip
    shape = read_model_shape(llama_4)

    assert (len(group.layer_names), 1) == (shape.group_layers, shape.kv_groups)


@cache
def engine_config() -> VllmConfig:
    """vLLM's configuration of one worker, whose model is known by its length alone."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig.default_factory(
            max_num_batched_tokens=8192, disable_hybrid_kv_cache_manager=False
        )
    )
    own: dict[str, Any] = {"hf_config": PretrainedConfig(), "hf_text_config": PretrainedConfig()}
    own |= {"max_model_len": 1024, "original_max_model_len": None}
    if hasattr(ModelConfig, "supports_kv_cache_grouping"):  # since vLLM 0.33
        own["supports_kv_cache_grouping"] = False
    object.__setattr__(config, "model_config", part_of(ModelConfig, **own))
    if LAYOUT is not None:
        object.__setattr__(config.cache_config, "get_resolved_kv_cache_layout", lambda: LAYOUT)
    return config


def configured(specs: dict[str, KVCacheSpec], memory_bytes: int) -> Any:
    """The KV cache configuration that vLLM makes for one worker with these layers."""
    config = engine_config()
    groups_of = getattr(planning, "get_global_kv_cache_groups", None)  # apart since vLLM 0.33
    groups = () if groups_of is None else (groups_of(config, [specs]),)
    (found,) = planning.get_kv_cache_configs(config, [specs], [memory_bytes], *groups)
    return found


def block_bytes(config: Any) -> int:
    """The bytes that a block of all KV groups takes on one worker."""
    if LAYOUT is None:
        return int(sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks)
    return int(config.kv_cache_tensors[0].size // config.num_blocks)  # each describes a place in one allocation


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(0, 70),
    st.integers(0, 70),
    st.sampled_from((16, 32, 128)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((64, 128)),
    st.integers(1, 4096),
    st.integers(1, 2_000_000),
    st.integers(0, 3),
)
def test_groups_and_blocks_of_any_hybrid_model_are_those_that_vllm_configures(
    full: int,
    sliding: int,
    states: int,
    block: int,
    heads: int,
    head_dim: int,
    window: int,
    state_elements: int,
    drafts: int,
) -> None:
    shape = ModelShape(
        full + sliding, heads, head_dim, None, "bfloat16", None, 0, sliding_layers=sliding, window_tokens=window,
        state_layers=states, state_bytes=2 * state_elements if states else 0, draft_layers=drafts,
    )  # fmt: skip
    block_tokens = shape.block_tokens("bfloat16", 1, block)
    of_heads: dict[str, Any] = {
        "block_size": block_tokens, "num_kv_heads": heads, "head_size": head_dim, "dtype": torch.bfloat16,
    }  # fmt: skip
    whole = FullAttentionSpec(**of_heads)
    specs: dict[str, KVCacheSpec] = {f"full.{n}": whole for n in range(full)}
    specs |= {f"drafter.{n}": whole for n in range(drafts)}
    specs |= {f"sliding.{n}": SlidingWindowSpec(**of_heads, sliding_window=window) for n in range(sliding)}
    state = MambaSpec(
        block_size=block_tokens, shapes=((state_elements,),), dtypes=(torch.bfloat16,),
        page_size_padded=whole.page_size_bytes, mamba_cache_mode="align",
    )  # fmt: skip
    specs |= {f"states.{n}": state for n in range(states)}

    found = configured(specs, 2_000 * (full + sliding + states + drafts) * whole.page_size_bytes)

    of_vllm = []
    for group in found.kv_cache_groups:
        spec = group.kv_cache_spec
        seen = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
        of_vllm.append(KvGroup(spec.block_size, seen, isinstance(spec, MambaSpec)))
    counted = shape.groups(block_tokens, blocks_per_chunk=1)
    assert sorted(map(repr, of_vllm)) == sorted(map(repr, counted))
    assert block_bytes(found) == shape.row_block_bytes_of_rank("bfloat16", 1, 1, block)


def test_a_drafter_with_heads_of_its_own_takes_the_room_of_layers_of_the_model(tmp_path: Path) -> None:
    """vLLM puts layers of full attention with pages of several sizes into one group."""
    config = {
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 384,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = json.dumps({"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2})
    shape = with_drafter(replace(SHAPE, layers=8), ["--speculative-config", asked])
    whole = {"block_size": 16, "dtype": torch.bfloat16}
    specs: dict[str, KVCacheSpec] = {
        f"full.{n}": FullAttentionSpec(**whole, num_kv_heads=2, head_size=64)  # type: ignore[arg-type]
        for n in range(8)
    }
    specs |= {f"drafter.{n}": FullAttentionSpec(**whole, num_kv_heads=3, head_size=64) for n in range(2)}  # type: ignore[arg-type]

    taken = block_bytes(configured(specs, 1 << 28))

    assert taken == shape.row_block_bytes_of_rank("bfloat16", 1, 1, 16)


@pytest.mark.parametrize("layers", [1, 3, 7])
def test_layers_of_deepseek_v4_for_later_tokens_lie_in_the_room_of_its_windows(layers: int) -> None:
    """MTP has one, DSpark three. A decoder layer behind the last one keeps a window alone
    (vllm/models/deepseek_v4/attention.py)."""
    specs = deepseek_v4()
    specs |= {f"layer.{43 + number}.window": replace(specs["layer.0.window"]) for number in range(layers)}
    found = kv_cache_config(specs, 1 << 36)
    model = replace(SHAPE, layers=43, packed="deepseek-v4-flash")
    shape = with_drafter(model, ["--speculative-config", '{"method": "mtp"}'], layers)

    row_bytes = row_block_bytes(found, counted_block_bytes(found))
    assert row_bytes == shape.row_block_bytes_of_rank("bfloat16", 1, 1, 256)
    of_vllm = [first_spec(group) for group in found.kv_cache_groups]
    seen = [KvGroup(spec.block_size, getattr(spec, "sliding_window", None) or 0) for spec in of_vllm]
    assert sorted(map(repr, seen)) == sorted(map(repr, shape.groups(256, blocks_per_chunk=1)))
