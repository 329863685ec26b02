"""Where the blocks of vLLM 0.30's KV caches lie on the device, and in a row.

Every KVCacheTensor describes a placement within one allocation, so its `size` is the whole of it, and what a layer's
block holds is taken from the registered views. There are two kinds of layout (vllm/v1/kv_cache_layout.py):

* layers outermost (LBHNC): in each layer's region the blocks follow one another, with or without padding;
* blocks outermost (BLHNC and others): a block holds the pages of all layers side by side, and moves as one piece.

A row holds the blocks of one KV group, so every group fills it from its start: groups that overlay each other on the
device do so in the row, and groups of unequal pages need no more than the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor

from spillway_connector.engine.layouts.kv_parts import (
    LayerCache,
    Part,
    PlacedKVCaches,
    as_bytes,
    is_dense,
    layer_parts,
    unsupported,
    views_of,
)


def place_kv_caches(
    kv_caches: Mapping[str, LayerCache], config: KVCacheConfig, group_ids: Sequence[int]
) -> PlacedKVCaches:
    """kv_caches: as vLLM registers them, by layer. group_ids: the groups that are offloaded, in the order of jobs.

    Raises ConfigError naming the layer whose layout cannot be copied block by block.
    """
    groups = [config.kv_cache_groups[group_id] for group_id in group_ids]
    block = _whole_block(kv_caches, config, groups)
    if block is not None:
        tensor = CanonicalKVCacheTensor(as_bytes(block, config.num_blocks), block.page_bytes)
        return PlacedKVCaches([tensor], [[CanonicalKVCacheRef(0, block.page_bytes)] for _ in groups], [0])
    tensors: list[CanonicalKVCacheTensor] = []
    row_offsets: list[int] = []
    index_of: dict[tuple[int, int, int, int], int] = {}  # base, stride, page, offset in a row
    refs: list[list[CanonicalKVCacheRef]] = []
    for group in groups:
        offset = 0
        seen: set[tuple[int, int, int]] = set()
        refs.append([])
        for layer, spec in _layers(group):
            for part in _parts(layer, kv_caches[layer], spec, config.num_blocks):
                place = part.base, part.stride_bytes, part.page_bytes
                if place in seen:  # a layer that reads the cache of another one
                    continue
                seen.add(place)
                index = index_of.setdefault((*place, offset), len(tensors))
                if index == len(tensors):
                    tensors.append(CanonicalKVCacheTensor(as_bytes(part, config.num_blocks), part.page_bytes))
                    row_offsets.append(offset)
                refs[-1].append(CanonicalKVCacheRef(index, part.page_bytes))
                offset += part.page_bytes
    return PlacedKVCaches(tensors, refs, row_offsets)


def block_bytes(placed: PlacedKVCaches) -> int:
    """How many bytes of a row one block takes, of whichever group."""
    tensors = zip(placed.row_offsets, placed.tensors, strict=True)
    return max((offset + tensor.page_size_bytes for offset, tensor in tensors), default=0)


def _layers(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    for layer in group.layer_names:
        # A layer that reads another one's cache is in the group, but not always among its specs.
        of_layer = spec.kv_cache_specs.get(layer) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        if of_layer is not None:
            yield layer, of_layer


def _whole_block(
    kv_caches: Mapping[str, LayerCache], config: KVCacheConfig, groups: Sequence[KVCacheGroupSpec]
) -> Part | None:
    """The part that is a block of all layers; None if there is none, as with the layers outermost."""
    placed = {layer: (tensor, at) for tensor in config.kv_cache_tensors for at, layer in enumerate(tensor.layers)}
    layers = [layer for group in groups for layer, _ in _layers(group) if layer in placed]
    if not layers or len(layers) != len({*layers}):
        return None
    found = None
    for layer in layers:
        tensor, at = placed[layer]
        cache = kv_caches[layer]
        if not isinstance(cache, torch.Tensor) or tensor.block_stride * config.num_blocks != tensor.size:
            return None
        base = cache.data_ptr() - tensor.offset - at * tensor.layer_stride
        part = Part(cache, base, tensor.block_stride, tensor.block_stride)
        if found is not None and (found.base, found.stride_bytes) != (base, tensor.block_stride):
            return None  # an allocation for each group: then their layers are copied by themselves
        found = part
    return found


def _parts(layer: str, cache: LayerCache, spec: KVCacheSpec, num_blocks: int) -> list[Part]:
    view = views_of(cache)[0]
    if not isinstance(cache, torch.Tensor) or view.device.type == "npu":
        return layer_parts(layer, cache, spec, num_blocks)
    kernel_blocks, rest = divmod(view.shape[0], num_blocks)
    if rest or not kernel_blocks:
        raise unsupported(layer, cache, f"its first dimension is no multiple of {num_blocks} blocks")
    if not is_dense(view[0]):
        raise unsupported(layer, cache, "the bytes of a block are not one run")
    size_bytes = view[0].numel() * view.element_size()
    stride_bytes = view.stride(0) * view.element_size()
    if kernel_blocks > 1 and size_bytes != stride_bytes:
        raise unsupported(layer, cache, f"the {kernel_blocks} kernel blocks of a block do not touch")
    return [Part(view, view.data_ptr(), stride_bytes * kernel_blocks, size_bytes * kernel_blocks)]
