"""vLLM-Ascend's KV layouts as the rest of the connector wants them: blocks of bytes at a base and a stride.

Where vLLM 0.23 expects one tensor a layer that begins where its storage begins, vLLM-Ascend (0.23) has

* (k, v), (nope, rope) of MLA, and up to four parts with a sparse indexer, each an allocation of its own that is moved
  to a 2 MiB boundary, so its storage offset is not 0 and its storage is longer than its blocks;
* more blocks than vLLM manages, and kernel blocks that are a fraction of a managed block;
* hybrid models whose attention layer (K slice, then V slice) and Mamba layer (states) share one raw tensor.

So every part is taken by its own address, stride and shape, never by its storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from spillway_connector.errors import ConfigError

LayerCache = torch.Tensor | Sequence[torch.Tensor]


@dataclass
class AscendKVCaches(CanonicalKVCaches):
    """Parts of different layers may share memory on the device, and then share bytes of a row: a row holds the
    blocks of one group, and a group never uses the same device bytes twice."""

    row_offsets: list[int]  # of each tensor, in bytes from the start of one block's bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """One run of bytes in every block: block b lies at base + b * stride."""

    tensor: torch.Tensor  # of the storage it lies in
    base: int
    stride_bytes: int
    page_bytes: int


def has_ascend_layout(kv_caches: Mapping[str, LayerCache]) -> bool:
    """Only vLLM-Ascend registers tuples; its purely Mamba models have lists, as in vLLM."""
    return any(isinstance(cache, tuple) or _views(cache)[0].device.type == "npu" for cache in kv_caches.values())


def canonical_kv_caches(kv_caches: Mapping[str, LayerCache], config: KVCacheConfig) -> AscendKVCaches:
    """Raises ConfigError naming the layer whose layout cannot be copied block by block."""
    specs = _layer_specs(config)
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
            for part in _layer_parts(layer, kv_caches[layer], specs[layer], config.num_blocks):
                # Not by storage: K and V are slices of one storage in hybrid models, and V would be lost.
                key = (part.base, part.stride_bytes, part.page_bytes, offset)
                if key not in index_of:
                    index_of[key] = len(tensors)
                    tensors.append(CanonicalKVCacheTensor(_as_bytes(part, config.num_blocks), part.page_bytes))
                    row_offsets.append(offset)
                refs[layer].append(CanonicalKVCacheRef(index_of[key], part.page_bytes))
                offset += part.page_bytes
            if offset - slot_offset > slot_bytes:
                raise _unsupported(
                    layer, kv_caches[layer], f"its parts take {offset - slot_offset} bytes a block, not {slot_bytes}"
                )
        slot_offset += slot_bytes
    without_memory = specs.keys() - refs.keys()
    if without_memory:
        raise ConfigError(f"no KV cache tensor holds the layers {sorted(without_memory)}; they cannot be offloaded")
    groups = [[ref for layer in group.layer_names for ref in refs[layer]] for group in config.kv_cache_groups]
    return AscendKVCaches(tensors, groups, row_offsets)


def _views(cache: LayerCache) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    specs = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for layer in group.layer_names:
            specs[layer] = spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return specs


def _layer_parts(layer: str, cache: LayerCache, spec: KVCacheSpec, num_blocks: int) -> list[_Part]:
    views = _views(cache)
    if not isinstance(spec, AttentionSpec | MambaSpec):
        raise _unsupported(layer, cache, f"{type(spec).__name__} is neither attention nor Mamba")
    for view in views:
        if not _is_dense(view[0]):
            raise _unsupported(layer, cache, "the bytes of a block are not one run")
    factor = _kernel_blocks(layer, views, spec, num_blocks)
    parts: list[_Part] = []
    for view in views:
        block_bytes, stride_bytes = _block_bytes(view), view.stride(0) * view.element_size()
        if factor > 1 and block_bytes != stride_bytes:
            raise _unsupported(layer, cache, f"the {factor} kernel blocks of a block do not touch")
        part = _Part(view, view.data_ptr(), stride_bytes * factor, block_bytes * factor)
        before = parts[-1] if parts else None
        if (
            before is not None
            and before.stride_bytes == part.stride_bytes
            and before.base + before.page_bytes == part.base
            and before.page_bytes + part.page_bytes <= part.stride_bytes
        ):
            parts[-1] = _Part(before.tensor, before.base, before.stride_bytes, before.page_bytes + part.page_bytes)
        else:
            parts.append(part)
    return parts


def _kernel_blocks(layer: str, views: list[torch.Tensor], spec: AttentionSpec | MambaSpec, num_blocks: int) -> int:
    """How many entries of the first dimension make one block that vLLM manages."""
    if isinstance(spec, MambaSpec):
        candidates = [1]
    else:
        # By bytes where the cache has the dtype that the spec counts with, else (a quantised cache) by count.
        whole, rest = divmod(spec.real_page_size_bytes, sum(_block_bytes(view) for view in views))
        candidates = [whole] if rest == 0 else []
        candidates += [views[0].shape[0] // num_blocks] if views[0].shape[0] % num_blocks == 0 else []
        candidates = [
            factor
            for factor in candidates
            if factor > 0
            and spec.block_size % factor == 0
            # The kernel's block of tokens is the second dimension, or the third behind the heads.
            and all(spec.block_size // factor in view.shape[1:3] for view in views)
        ]
    for factor in candidates:
        if all(view.shape[0] >= num_blocks * factor for view in views):
            return factor
    raise _unsupported(layer, views, f"that is not {num_blocks} blocks of {spec.block_size} tokens")


def _block_bytes(view: torch.Tensor) -> int:
    return view[0].numel() * view.element_size()


def _is_dense(block: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order the dimensions lie."""
    expected = 1
    for stride, size in sorted((block.stride(dim), block.shape[dim]) for dim in range(block.dim())):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _as_bytes(part: _Part, num_blocks: int) -> torch.Tensor:
    """(num_blocks, page) int8 on the same memory."""
    storage = part.tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.int8, device=part.tensor.device)
    size, stride = (num_blocks, part.page_bytes), (part.stride_bytes, 1)
    return view.set_(storage, part.base - storage.data_ptr(), size, stride)


def _unsupported(layer: str, cache: LayerCache, why: str) -> ConfigError:
    shapes = ", ".join(f"{tuple(view.shape)} {view.dtype} strides {view.stride()}" for view in _views(cache))
    return ConfigError(
        f"the KV cache of layer {layer} ({shapes}) cannot be offloaded: {why}; turn offload off for this model"
    )
