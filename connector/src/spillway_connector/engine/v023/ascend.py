"""vLLM-Ascend's KV layouts as the rest of the connector wants them: blocks of bytes at a base and a stride.

vLLM 0.23 expects one tensor a layer that begins where its storage begins. vLLM-Ascend (0.23) has several
(engine/layouts/kv_parts.py), and hybrid models whose attention layer (K slice, then V slice) and Mamba layer (states)
share one raw tensor. Therefore every part is located by its own address, stride and shape, never by its storage.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor

from spillway_connector.engine.layouts.kv_parts import (
    LayerCache,
    PlacedKVCaches,
    as_bytes,
    layer_parts,
    unsupported,
    views_of,
)
from spillway_connector.engine.layouts.packed_blocks import layer_specs
from spillway_connector.errors import ConfigError


def has_ascend_layout(kv_caches: Mapping[str, LayerCache]) -> bool:
    """Whether vLLM-Ascend registered these caches: only it registers tuples. Its purely Mamba models have lists, as in
    vLLM."""
    return any(isinstance(cache, tuple) or views_of(cache)[0].device.type == "npu" for cache in kv_caches.values())


def canonical_kv_caches(kv_caches: Mapping[str, LayerCache], config: KVCacheConfig) -> PlacedKVCaches:
    """Raises ConfigError naming the layer whose layout cannot be copied block by block."""
    specs = {layer: spec for group in config.kv_cache_groups for layer, spec in layer_specs(group)}
    tensors: list[CanonicalKVCacheTensor] = []
    row_offsets: list[int] = []
    index_of: dict[tuple[int, int, int, int], int] = {}
    refs: dict[str, list[CanonicalKVCacheRef]] = {}
    slot_offset = 0
    for slot in config.kv_cache_tensors:
        slot_bytes = slot.size // config.num_blocks
        for layer in slot.shared_by:
            if layer not in specs:
                continue
            offset = slot_offset
            refs[layer] = []
            for part in layer_parts(layer, kv_caches[layer], specs[layer], config.num_blocks):
                # Storage does not tell them apart: K and V are slices of one storage in hybrid models, and V would be
                # lost.
                key = (part.base, part.stride_bytes, part.page_bytes, offset)
                if key not in index_of:
                    index_of[key] = len(tensors)
                    tensors.append(CanonicalKVCacheTensor(as_bytes(part, config.num_blocks), part.page_bytes))
                    row_offsets.append(offset)
                refs[layer].append(CanonicalKVCacheRef(index_of[key], part.page_bytes))
                offset += part.page_bytes
            if offset - slot_offset > slot_bytes:
                raise unsupported(
                    layer, kv_caches[layer], f"its parts take {offset - slot_offset} bytes a block, not {slot_bytes}"
                )
        slot_offset += slot_bytes
    without_memory = specs.keys() - refs.keys()
    if without_memory:
        raise ConfigError(f"no KV cache tensor holds the layers {sorted(without_memory)}; they cannot be offloaded")
    groups = [[ref for layer in group.layer_names for ref in refs[layer]] for group in config.kv_cache_groups]
    return PlacedKVCaches(tensors, groups, row_offsets, {layer: len(parts) for layer, parts in refs.items()})
