from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from spillway_connector.engine.layouts.equal_ranks import ranks_hold_the_same
from spillway_connector.testing.vllm_parts import part_of

_COMMON: dict[str, Any] = {"block_size": 128, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
LATENT, HEADS = MLAAttentionSpec(**_COMMON), FullAttentionSpec(**_COMMON)
OF_WINDOW = SlidingWindowMLASpec(**_COMMON, sliding_window=256)
EACH = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={"layer 0": LATENT, "layer 1": LATENT})
MIXED = UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs={"layer 0": LATENT, "drafter": HEADS})


def held_by(
    groups: list[KVCacheSpec],
    *,
    use_mla: bool = True,
    tensor: int = 8,
    pipeline: int = 1,
    context: int = 1,
    decode: int = 1,
) -> bool:
    parallel = ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        prefill_context_parallel_size=context,
        decode_context_parallel_size=decode,
        distributed_executor_backend="mp",
    )
    config = part_of(VllmConfig, parallel_config=parallel, model_config=part_of(ModelConfig, use_mla=use_mla))
    caches = KVCacheConfig(1, [], [KVCacheGroupSpec([f"layer {at}"], group) for at, group in enumerate(groups)])
    return ranks_hold_the_same(config, caches)


@pytest.mark.parametrize("groups", [[LATENT], [LATENT, LATENT], [EACH], [LATENT, OF_WINDOW]])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_latents_are_the_same_on_all_ranks_of_a_stage(groups, pipeline):
    assert held_by(groups, pipeline=pipeline)


@pytest.mark.parametrize(
    ("groups", "split"),
    [
        ([HEADS], {"use_mla": False}),
        ([LATENT, HEADS], {}),
        ([MIXED], {}),
        ([LATENT], {"tensor": 1}),
        ([LATENT], {"tensor": 1, "pipeline": 2}),
        ([LATENT], {"context": 2}),
        ([LATENT], {"decode": 2}),
    ],
)
def test_what_ranks_have_of_their_own_is_stored_by_rank(groups, split):
    assert not held_by(groups, **split)
