"""Bytes of a row that a block takes if vLLM packs layers with pages of several sizes into it (DeepSeek V4).

vLLM rounds each page up to what kernels align (37,376 bytes to 37,440, 1,168 to 1,728) and counts blocks by that. A row
holds the pages without it, so its size follows from each layer's spec. Workers know these; the scheduler's process has
the spec of one layer of each group, and reads from the rows what the workers have found (stages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

NOT_KNOWN_HERE = 0
# A block of all layers moves as one piece in vLLM 0.30 and later, and without the padding as one for each layer. That
# costs an H200 15 % of the copy's time, so it must save something.
_SAVED_AT_LEAST = 0.01


def is_packed(config: KVCacheConfig) -> bool:
    """Whether groups share blocks of aligned pages of several sizes. The same in all processes of a replica.

    vLLM-Ascend's specs do not say what its parts hold, so vLLM's count holds there.
    """
    if len(config.kv_cache_groups) < 2 or current_platform.device_type == "npu":
        return False
    if all(getattr(first_spec(group), "alignment", None) is None for group in config.kv_cache_groups):
        return False
    return pages_differ(config)


def pages_differ(config: KVCacheConfig) -> bool:
    """Whether layers have pages of several sizes. The same in all processes of a replica."""
    # Before vLLM 0.30 a tensor holds the pages of one place in each group; later it describes where a group's layers
    # with one page lie.
    tensors: list[Any] = config.kv_cache_tensors
    return len({tensor.size if hasattr(tensor, "shared_by") else tensor.layer_stride for tensor in tensors}) > 1


def row_block_bytes(config: KVCacheConfig, counted_bytes: int) -> int:
    """Bytes of a row for a block of any group, of one rank; NOT_KNOWN_HERE if only the workers can tell.

    counted_bytes: the same as vLLM counts it, with the padding of pages.
    """
    if not is_packed(config):
        return counted_bytes
    if not any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in config.kv_cache_groups):
        return NOT_KNOWN_HERE
    held = max(sum(plain_page_bytes(spec) for _, spec in layer_specs(group)) for group in config.kv_cache_groups)
    return held if held <= counted_bytes * (1 - _SAVED_AT_LEAST) else counted_bytes


def first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The one that the scheduler's process has."""
    spec = group.kv_cache_spec
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    """The layers of a group that have a cache of their own."""
    spec = group.kv_cache_spec
    for layer in group.layer_names:
        # A layer that reads another one's cache is in the group, but not always among its specs.
        of_layer = spec.kv_cache_specs.get(layer) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        if of_layer is not None:
            yield layer, of_layer


def plain_page_bytes(spec: KVCacheSpec) -> int:
    """The bytes of a page without its padding."""
    if not isinstance(spec, AttentionSpec | MambaSpec):
        return int(spec.page_size_bytes)
    without: dict[str, Any] = {"page_size_padded": None}
    if getattr(spec, "alignment", None) is not None:
        without["alignment"] = None
    return int(replace(spec, **without).page_size_bytes)
