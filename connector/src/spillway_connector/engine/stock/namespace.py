"""The namespace of blocks that vLLM's own worker copied into the CPU tier.

The rows are vLLM's: how its worker fills them follows from its version, the spec's class, the resolved layout of the KV
caches, the groups and the sizes in the OffloadingConfig. Spillway's own worker writes down how its caches lie in memory
(engine/layouts/kv_layout.py); vLLM's does not, so everything its choice follows from counts here, installed kernel
packages included, and a fact that is not known is an error. Engines with Spillway's connector fill rows differently:
what stands in the field "layout" keeps the two apart whatever else is equal.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import OffloadingSpec

from spillway_connector.engine.namespace.adapters import lora_mixes_weights
from spillway_connector.engine.namespace.fields import (
    json_value,
    loses_blocks,
    namespace_facts,
    require_shareable_hashes,
    require_shareable_scales,
)
from spillway_connector.engine.stock.engine_objects import EngineObjects
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ChunkGeometry

# Distributions whose presence or version changes which attention kernel vLLM chooses.
_KERNEL_PACKAGES = (
    "aiter",
    "amd-aiter",
    "flash-attn",
    "flash-attn-3",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flashinfer-python",
    "flashmla",
    "triton",
    "triton-ascend",
    "vllm-flash-attn",
    "xformers",
)
_HEADED = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})  # whose blocks are pages of heads, and no more


def stock_namespace(spec: OffloadingSpec, engine: EngineObjects, row_bytes: int) -> Namespace:
    """The namespace of the blocks in `spec`'s CPU tier. Raises ConfigError if sharing them would be unsafe."""
    require_shareable_hashes(engine.vllm_config)
    require_shareable_scales(engine.vllm_config)
    weights_version = spec.extra_config.get("weights_version")
    if weights_version is not None and not isinstance(weights_version, str):
        raise ConfigError(f"kv_connector_extra_config: weights_version: {weights_version!r} is not a text; quote it")
    _require_known_adapters(engine.vllm_config, weights_version)
    config = spec.config
    if config.cache.blocks_per_chunk > 1 and loses_blocks(engine.kv_cache_config):
        raise ConfigError(
            "kv_connector_extra_config: blocks_per_chunk: of a chunk that has lost blocks of a window or states, vLLM "
            "stores some in wrong places, and other engines would load them; set it to 1 (without a block_size), or "
            "remove Spillway's tiers from secondary_tiers"
        )
    geometry = ChunkGeometry(
        rank_block_bytes=config.worker_kv_bytes_per_block,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        num_ranks=config.parallel.world_size,
        one_cell=config.replicated_layout,
    )
    facts = namespace_facts(
        engine.vllm_config,
        engine.kv_cache_config,
        geometry,
        hash_block_size=config.cache.tokens_per_hash,
        layouts=[row_facts(spec, row_bytes)],
        weights_version=weights_version,
    )
    if config.canonical_layout and config.parallel.is_parallelism_agnostic and not config.replicated_layout:
        _name_heads_of_all_ranks(facts, engine.vllm_config.model_config.get_total_num_kv_heads())
    return Namespace.of(facts)


def _name_heads_of_all_ranks(facts: dict[str, Any], heads: int) -> None:
    """Name the heads of all ranks instead of one rank's: canonical rows hold those of all ranks side by side, layer by
    layer.

    Only if they are all of one number, and a row has no room beside them: else sizes differ with the ranks anyway.
    """
    kinds = {group["kind"] for group in facts["groups"]}
    (rank_heads, *others) = {group["spec"].get("num_kv_heads") for group in facts["groups"]}
    if kinds - _HEADED or others or rank_heads * facts["parallel"]["tensor"] != heads:
        return
    for group in facts["groups"]:
        group["spec"]["num_kv_heads"] = heads
        group["page_bytes"] *= heads // rank_heads
    facts["rank_block_bytes"] *= heads // rank_heads
    facts["tensors"] = [{"layers": tensor["layers"]} for tensor in facts["tensors"]]  # without one rank's strides
    facts["parallel"]["tensor"] = facts["config"]["parallel_config"]["tensor_parallel_size"] = 1


def row_facts(spec: OffloadingSpec, row_bytes: int) -> dict[str, Any]:
    """Return what decides how vLLM's worker fills a row. JSON values only. Raises ConfigError."""
    config = spec.config
    if config.kv_cache_layout is None:
        raise ConfigError(
            "vLLM has not said how its KV caches lie in memory (kv_cache_layout), so no other engine could read these "
            "blocks; remove Spillway's tiers from secondary_tiers on this platform"
        )
    return {
        "filled_by": f"{type(spec).__module__}.{type(spec).__qualname__}",
        "row_bytes": row_bytes,
        "kv_cache_layout": config.kv_cache_layout,
        "dtype": config.model.dtype,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "groups": [
            {
                "group": group.group_id,
                "tokens_per_block": group.tokens_per_block,
                "layers": json_value(group.layer_names, "OffloadingGroupConfig.layer_names"),
            }
            for group in config.groups
        ],
        "kernels": dict(kernel_versions()),
    }


def kernel_versions() -> Mapping[str, str]:
    """The versions of the installed packages that vLLM may take attention kernels from."""
    versions = {}
    for name in _KERNEL_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _require_known_adapters(vllm_config: VllmConfig, weights_version: str | None) -> None:
    """vLLM's block keys name a LoRA adapter by its name, since 0.32 with its path: not by the weights found there."""
    if vllm_config.lora_config is not None and weights_version is None:
        raise ConfigError(
            "enable_lora: vLLM's block keys do not tell an adapter's weights, so another engine could load blocks of "
            "other weights; name the state of model and adapters in kv_connector_extra_config (weights_version: a text "
            "that changes whenever one of them does), or remove Spillway's tiers from secondary_tiers"
        )
    if lora_mixes_weights(vllm_config):
        raise ConfigError(
            "enable_lora on a CPU: vLLM computes requests of the base model with an adapter's weights if a batch holds "
            "requests of both, and other engines would load their blocks; remove Spillway's tiers from secondary_tiers"
        )
