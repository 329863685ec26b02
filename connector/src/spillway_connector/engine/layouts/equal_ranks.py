"""Whether all ranks of a pipeline stage hold the same KV, byte for byte, so that one copy serves all of them."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, SlidingWindowMLASpec, UniformTypeKVCacheSpecs


def ranks_hold_the_same(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether all ranks hold the same KV: True for MLA under tensor parallelism, with or without pipeline stages.
    kv_cache_config: of this process, whose layers are those of one stage.

    Every rank computes the whole latent, of all tokens or of a window, from hidden states that an all-reduce has made
    equal; so it does with the states that DeepSeek V4 compresses latents with. Layers of another kind,
    such as a drafter's, have heads of their own on each rank; context parallelism splits tokens. Without a pipeline
    vLLM 0.30 and later decide by the same conditions (`OffloadingConfig.replicated_layout`).
    """
    parallel = vllm_config.parallel_config
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in (
            group.kv_cache_spec.kv_cache_specs.values()
            if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            else [group.kv_cache_spec]
        )
    ]
    return (
        parallel.tensor_parallel_size > 1
        and parallel.world_size == parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        and parallel.decode_context_parallel_size == 1
        and vllm_config.model_config.use_mla
        and all(isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) for spec in specs)
    )
