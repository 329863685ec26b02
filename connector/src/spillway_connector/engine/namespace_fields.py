"""What changes the bytes or the meaning of a stored chunk, collected from vLLM's configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from spillway_connector.errors import ConfigError
from spillway_connector.model_identity import folder_identity
from spillway_connector.plan.geometry import ChunkGeometry

LAYOUT_VERSION = 1  # of how a row is filled (engine/handlers.py: copy_layout)
_REPRODUCIBLE_HASHES = ("sha256", "sha256_cbor")


def require_shareable_hashes(vllm_config: VllmConfig) -> None:
    """Raises ConfigError when two engines could not agree on, or could be tricked about, a block's key."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _REPRODUCIBLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo: {algorithm!r} is not collision-safe, and a shared tier trusts keys; "
            "set --prefix-caching-hash-algo sha256_cbor"
        )
    if "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            "PYTHONHASHSEED is not set, so this engine's block keys are random and no other engine could find its "
            "blocks; set PYTHONHASHSEED=0 on every engine"
        )


def namespace_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, geometry: ChunkGeometry, hash_block_size: int
) -> dict[str, Any]:
    """JSON values only. Engines share blocks exactly when these are equal."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "layout_version": LAYOUT_VERSION,
        "weights": weights_identity(vllm_config),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "rope": repr(getattr(model.hf_text_config, "rope_parameters", None)),  # --hf-overrides may change it
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_tokens": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "layers": list(group.layer_names),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
        "physical_layout": _physical_layout(vllm_config),
        "rank_block_bytes": geometry.rank_block_bytes,
        "blocks_per_chunk": geometry.blocks_per_chunk,
        "tokens_per_hash": hash_block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "parallel": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
        },
    }


def weights_identity(vllm_config: VllmConfig) -> str:
    """A digest of a model folder, or the immutable revision of a model fetched from a hub. Raises ConfigError."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:{model.model}:seed{model.seed}"
    folder = Path(model.model)
    if folder.is_dir():
        return folder_identity(folder)
    from huggingface_hub import try_to_load_from_cache

    config_file = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if not isinstance(config_file, str):
        raise ConfigError(
            f"model {model.model!r} is neither a folder nor in the hub's cache, so its weights cannot be told from "
            "others' and its KV must not be shared; give a folder, or turn the shared tier off"
        )
    return f"hub:{model.model}@{Path(config_file).parent.name}"


def _physical_layout(vllm_config: VllmConfig) -> str:
    """How the platform's attention kernels arrange a block's bytes."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_name}:{os.environ.get('VLLM_KV_CACHE_LAYOUT', 'HND')}"
    # The CPU kernels pack keys differently for each instruction set, so the same file serves only like machines.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    assert isinstance(model.dtype, torch.dtype)  # resolved when the model was loaded
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"cpu:{isa}"
