"""Everything that changes the bytes or the meaning of a stored chunk, collected from vLLM's configuration.

All of the configuration counts except the fields that config_fields.py excludes, each for a reason; so do the
model's own configuration as vLLM resolved it, the weights, the versions, the chip and the layout of the KV caches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

from spillway_connector.engine.namespace.config_fields import (
    ARCHITECTURES_BY_LENGTH,
    CONFIG_FIELDS,
    ENVIRONMENT_LEFT_OUT,
    ENVIRONMENT_LEFT_OUT_ADDED,
    ENVIRONMENT_PREFIX_OF_PLUGINS,
    HF_CONFIG_LEFT_OUT,
    ROPE_TYPES_OF_ANY_LENGTH,
)
from spillway_connector.engine.namespace.weights_identity import weights_facts
from spillway_connector.errors import ConfigError
from spillway_connector.plan.geometry import ChunkGeometry

NAMESPACE_VERSION = 3  # of the document's fields
LAYOUT_VERSION = 1  # of how a row is filled (copy_layout in each generation's handlers.py)
_LAYOUT_VERSION_OF_PARTS = 2  # of chunks of which a row may hold a part (engine/scheduler/partial_chunks.py)
_REPRODUCIBLE_HASHES = ("sha256", "sha256_cbor")
# Credentials change no byte, and every reader of the store can read the document.
_SECRET = re.compile(r"secret|password|credential|(api|access)_?key|(api|auth|access|hf)_?token", re.IGNORECASE)
# Variables of a plugin for the place of a process and for what it writes.
_OF_A_PLACE = re.compile(r"_(PORT|IP|HOST|PATH|DIR|RANK|LOG[A-Z]*)(_|$)")
# Their resampling and decoding differ between versions.
_MEDIA_PACKAGES = (
    "av",
    "decord",
    "librosa",
    "mistral_common",
    "opencv-python",
    "opencv-python-headless",
    "pillow",
    "soundfile",
    "soxr",
    "timm",
    "torchaudio",
    "torchcodec",
    "torchvision",
)
_PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


def require_shareable_hashes(vllm_config: VllmConfig) -> None:
    """Raises ConfigError when two engines could not agree on, or could be tricked about, a block's key."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in _REPRODUCIBLE_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo: {algorithm!r} is not collision-safe, and a shared tier trusts keys; "
            "set --prefix-caching-hash-algo sha256_cbor"
        )
    if hash_seed() is None:
        raise ConfigError(
            "PYTHONHASHSEED is not set, so this engine's block keys are random and no other engine could find its "
            "blocks; set PYTHONHASHSEED=0 on every engine"
        )


def hash_seed() -> str | None:
    """The input of the first block's hash; None: at random. Since 0.30 vLLM has a fixed one for sha256."""
    return os.environ.get("PYTHONHASHSEED", getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None))


def require_shareable_scales(vllm_config: VllmConfig) -> None:
    """Raises ConfigError if the scales of a quantised cache come from the first request that an engine computes."""
    cache = vllm_config.cache_config
    calculated = getattr(cache, "calculate_kv_scales", False)  # 0.30 has no such setting
    if calculated and cache.cache_dtype not in ("auto", "bfloat16", "float16", "half"):
        raise ConfigError(
            f"calculate_kv_scales with kv_cache_dtype {cache.cache_dtype!r} takes the scales of the KV cache from the "
            "first request of each engine, so no engine can read another one's blocks; use a checkpoint with scales, "
            "or turn the shared tiers off"
        )


def namespace_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: ChunkGeometry,
    *,
    hash_block_size: int,
    layouts: Sequence[Mapping[str, Any]],
    weights_version: str | None = None,
) -> dict[str, Any]:
    """JSON values only. Engines share blocks exactly when these are equal.

    layouts: of the registered KV caches, by rank (kv_layout.py). weights_version: what an operator calls the weights;
    their bytes are then not read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = json_value(vllm_config, "VllmConfig")
    # If all ranks (of a stage) hold the same KV, their row equals the row of one rank byte for byte, whatever their
    # number.
    tensor_ranks = 1 if geometry.one_cell else parallel.tensor_parallel_size
    config["parallel_config"]["tensor_parallel_size"] = tensor_ranks
    has_parts = geometry.blocks_per_chunk > 1 and loses_blocks(kv_cache_config)
    facts = {
        "namespace_version": NAMESPACE_VERSION,
        "layout_version": _LAYOUT_VERSION_OF_PARTS if has_parts else LAYOUT_VERSION,
        **weights_facts(vllm_config, pinned=weights_version is not None),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_tokens": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "layers": list(group.layer_names),
                "spec": json_value(group.kv_cache_spec, "KV cache spec"),
            }
            for group in kv_cache_config.kv_cache_groups
        ],
        "tensors": [_placement(tensor, kv_cache_config.num_blocks) for tensor in kv_cache_config.kv_cache_tensors],
        "physical_layout": _physical_layout(vllm_config),
        "layout": [dict(one) for one in layouts],
        "rank_block_bytes": geometry.rank_block_bytes,
        "blocks_per_chunk": geometry.blocks_per_chunk,
        "tokens_per_hash": hash_block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": hash_seed() or "",
        "parallel": {
            "tensor": tensor_ranks,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
        },
        "config": config,
        **context_length_facts(model),
        "environment": environment_facts(os.environ),
        "versions": version_facts() | (media_versions() if model.multimodal_config is not None else {}),
    }
    if weights_version is not None:
        facts["weights_version"] = weights_version
    return facts


def loses_blocks(config: KVCacheConfig) -> bool:
    """Whether a KV group gives up blocks of a request that runs, so that a chunk of several can lack some."""
    lossy = SlidingWindowSpec | MambaSpec | ChunkedLocalAttentionSpec
    return any(isinstance(group.kv_cache_spec, lossy) for group in config.kv_cache_groups)


def _placement(tensor: Any, num_blocks: int) -> Any:
    """Describe which layers share the bytes of a KVCacheTensor's block, and how; not what follows from the block
    count."""
    if hasattr(tensor, "shared_by"):
        return list(tensor.shared_by)
    placement = {"layers": list(tensor.layers), "block_stride": tensor.block_stride}
    if tensor.block_stride * num_blocks == tensor.size:  # a block holds all layers
        placement |= {"layer_stride": tensor.layer_stride, "offset": tensor.offset}
    return placement


def context_length_facts(model: Any) -> dict[str, Any]:
    """`max_model_len`, for models whose KV may depend on it.

    With the length come other factors of the rotation, and processors may fit media to it.
    """
    kinds = set(_rope_types(json_value(getattr(model.hf_text_config, "rope_parameters", None), "rope_parameters")))
    architectures = set(getattr(model, "architectures", None) or ())
    by_length = kinds - ROPE_TYPES_OF_ANY_LENGTH or architectures & ARCHITECTURES_BY_LENGTH
    if not by_length and getattr(model, "multimodal_config", None) is None:
        return {}
    return {"max_model_len": model.max_model_len}


def _rope_types(parameters: Any) -> list[str]:
    """The RoPE types of all layers; models with several kinds of attention have one set of parameters for each."""
    if isinstance(parameters, list):
        return [kind for one in parameters for kind in _rope_types(one)]
    if not isinstance(parameters, dict):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return nested + [str(parameters[name]) for name in ("rope_type", "type") if parameters.get(name) is not None]


def environment_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, known to vLLM, and not left out in config_fields.py. Secrets never."""
    from vllm import envs

    known = envs.compile_factors().keys() - ENVIRONMENT_LEFT_OUT - ENVIRONMENT_LEFT_OUT_ADDED
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in known or (name.startswith(ENVIRONMENT_PREFIX_OF_PLUGINS) and not _OF_A_PLACE.search(name)))
        and not _SECRET.search(name)
    }


def version_facts() -> dict[str, str]:
    """Versions of what computes: vLLM, torch, transformers (models without vLLM's own code, processors), and what is
    plugged into vLLM. Spillway's own does not count."""
    import vllm

    versions = {"vllm": vllm.__version__, "torch": torch.__version__, **_versions_of("transformers")}
    for group in _PLUGIN_GROUPS:
        for entry in importlib.metadata.entry_points(group=group):
            if entry.dist is not None and not entry.dist.name.startswith("spillway"):
                versions[entry.dist.name] = entry.dist.version
    if current_platform.device_type == "npu":
        versions |= _versions_of("torch_npu", "vllm_ascend")
    return versions


def media_versions() -> dict[str, str]:
    """Versions of what decodes images, video and sound for a model: a block's key holds only what the client sent."""
    return _versions_of(*_MEDIA_PACKAGES)


def _versions_of(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def json_value(value: Any, path: str) -> Any:
    """The value as JSON without credentials, so that different values never look alike.

    Raises ConfigError naming what has no such form.
    """
    match value:
        case None | bool() | str() | int() if not isinstance(value, enum.Enum):
            return value
        case float():
            return value if math.isfinite(value) else repr(value)
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case torch.dtype() | torch.device() | Path():
            return str(value)
        case bytes():
            return value.hex()
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case Mapping():
            if all(isinstance(name, str) for name in value):
                return {
                    name: json_value(inner, f"{path}.{name}")
                    for name, inner in value.items()
                    if not _SECRET.search(name)
                }
            return [[json_value(name, path), json_value(inner, f"{path}.{name}")] for name, inner in value.items()]
        case AbstractSet():
            return sorted((json_value(inner, path) for inner in value), key=repr)
        case list() | tuple():
            return [json_value(inner, f"{path}[{position}]") for position, inner in enumerate(value)]
        case functools.partial():
            return [json_value(part, path) for part in (value.func, list(value.args), value.keywords)]
    # transformers' PretrainedConfig with every override in it: a dataclass, too, but not all it holds are fields.
    if hasattr(value, "to_dict"):
        inner = {name: one for name, one in value.to_dict().items() if name not in HF_CONFIG_LEFT_OUT}
        return json_value(inner, path)
    if dataclasses.is_dataclass(value):
        fields = CONFIG_FIELDS.get(type(value).__name__)
        left_out = fields.left_out if fields is not None else frozenset()
        return {
            field.name: json_value(getattr(value, field.name, None), f"{path}.{field.name}")
            for field in dataclasses.fields(value)
            if field.name not in left_out
            and not _SECRET.search(field.name)
            # The text part of a model that has no other part is the whole once more.
            and not (field.name == "hf_text_config" and _is_the_whole(value))
        }
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise ConfigError(
        f"{path}: a {type(value).__name__} cannot be compared with other engines', so their KV must not be shared; "
        "use plain values, or turn the shared tiers off"
    )


def _is_the_whole(model: Any) -> bool:
    return model.hf_text_config is model.hf_config


def _physical_layout(vllm_config: VllmConfig) -> str:
    """The arrangement of a block's bytes by the platform's attention kernels, as one word; `layout` describes it
    fully."""
    cache = vllm_config.cache_config
    # Since 0.30 vLLM resolves a layout and says so; before, a variable may choose one.
    resolved = getattr(cache, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT", "default")
    if not current_platform.is_cpu():
        return f"{current_platform.device_name}:{resolved}"
    # The CPU kernels pack keys differently for each instruction set, so the same file serves only like machines.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    assert isinstance(model.dtype, torch.dtype)  # resolved when the model was loaded
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"cpu:{isa}:{platform.machine()}:{resolved}"
