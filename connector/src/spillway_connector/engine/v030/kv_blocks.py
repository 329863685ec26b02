"""Places of the blocks of vLLM 0.30's KV caches, on the device and in a row.

Every KVCacheTensor describes a placement within one allocation, so its `size` is the whole of it, and what a layer's
block holds is taken from the registered views. There are two kinds of layout (vllm/v1/kv_cache_layout.py):

* layers outermost (LBHNC): in each layer's region the blocks follow one another, with or without padding;
* blocks outermost (BLHNC and others): a block holds the pages of all layers side by side, and moves as one piece. If a
  row has no room for the padding of its pages (layouts/packed_blocks.py), a group moves as one piece if it fits with
  it, else layer by layer.

A row holds the blocks of one KV group, so every group fills it from its start: groups that overlay each other on the
device do so in the row, and groups of unequal pages need no more than the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
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
from spillway_connector.engine.layouts.packed_blocks import layer_specs


def place_kv_caches(
    kv_caches: Mapping[str, LayerCache],
    config: KVCacheConfig,
    group_ids: Sequence[int],
    room_bytes: int | None = None,
) -> PlacedKVCaches:
    """Choose the place of each part of a block in a row.

    Args:
        kv_caches: As vLLM registers them, by layer.
        config: vLLM's.
        group_ids: The groups that are offloaded, in the order of jobs.
        room_bytes: What a row has for a block; None: for a whole one.

    Raises:
        ConfigError: A layer's layout cannot be copied block by block; it names the layer.
    """
    groups = [config.kv_cache_groups[group_id] for group_id in group_ids]
    block = _whole_block(kv_caches, config, groups)
    if block is not None and (room_bytes is None or block.page_bytes <= room_bytes):
        tensor = CanonicalKVCacheTensor(as_bytes(block, config.num_blocks), block.page_bytes)
        return PlacedKVCaches([tensor], [[CanonicalKVCacheRef(0, block.page_bytes)] for _ in groups], [0])
    tensors: list[CanonicalKVCacheTensor] = []
    row_offsets: list[int] = []
    index_of: dict[tuple[int, int, int, int], int] = {}  # base, stride, page, offset in a row
    refs: list[list[CanonicalKVCacheRef]] = []
    parts_of: dict[str, int] = {}
    for group in groups:
        offset = 0
        seen: set[tuple[int, int, int]] = set()
        refs.append([])
        for layer, part in _group_parts(group, kv_caches, config.num_blocks, block, room_bytes):
            place = part.base, part.stride_bytes, part.page_bytes
            if place in seen:  # a layer that reads the cache of another one
                continue
            seen.add(place)
            parts_of[layer] = parts_of.get(layer, 0) + 1
            index = index_of.setdefault((*place, offset), len(tensors))
            if index == len(tensors):
                tensors.append(CanonicalKVCacheTensor(as_bytes(part, config.num_blocks), part.page_bytes))
                row_offsets.append(offset)
            refs[-1].append(CanonicalKVCacheRef(index, part.page_bytes))
            offset += part.page_bytes
    return PlacedKVCaches(tensors, refs, row_offsets, parts_of)


def block_bytes(placed: PlacedKVCaches) -> int:
    """The bytes of a row that one block takes, in every group."""
    tensors = zip(placed.row_offsets, placed.tensors, strict=True)
    return max((offset + tensor.page_size_bytes for offset, tensor in tensors), default=0)


def _group_parts(
    group: KVCacheGroupSpec,
    kv_caches: Mapping[str, LayerCache],
    num_blocks: int,
    block: Part | None,
    room_bytes: int | None,
) -> list[tuple[str, Part]]:
    """Return the parts of a group's block, by layer. A part that layers share is named after the first one. block: of
    all layers, if they lie side by side."""
    parts = [
        (layer, part)
        for layer, spec in layer_specs(group)
        for part in _parts(layer, kv_caches[layer], spec, num_blocks)
    ]
    if block is None or room_bytes is None or not parts:
        return parts
    used_bytes = max(part.base + part.page_bytes for _, part in parts) - block.base
    return [(parts[0][0], replace(block, page_bytes=used_bytes))] if used_bytes <= room_bytes else parts


def _whole_block(
    kv_caches: Mapping[str, LayerCache], config: KVCacheConfig, groups: Sequence[KVCacheGroupSpec]
) -> Part | None:
    """The part that is a block of all layers; None if there is none, as with the layers outermost."""
    placed = {layer: (tensor, at) for tensor in config.kv_cache_tensors for at, layer in enumerate(tensor.layers)}
    layers = [layer for group in groups for layer, _ in layer_specs(group) if layer in placed]
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
