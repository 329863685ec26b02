"""A layer's KV cache as runs of bytes: one run in every block, taken by address, stride and shape, never by storage.

vLLM-Ascend registers a layer as several tensors ((k, v), (nope, rope), with a sparse indexer up to four), each an
allocation of its own that is moved to a 2 MiB boundary, so its storage offset is not 0 and its storage is longer than
its blocks; it has more blocks than vLLM manages, and kernel blocks that are a fraction of a managed block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches

from spillway_connector.errors import ConfigError

LayerCache = torch.Tensor | Sequence[torch.Tensor]


@dataclass
class PlacedKVCaches(CanonicalKVCaches):
    """Canonical caches whose places in a row are given, instead of following from the order of the tensors.

    Parts of different groups may share bytes of a row: a row holds the blocks of one group, and a group never uses the
    same bytes twice.
    """

    row_offsets: list[int]  # of each tensor, in bytes from the start of one block's bytes
    parts_of: dict[str, int] = field(default_factory=dict)  # how many of a group's references a layer has

    def segments_of(self, layers: Sequence[str]) -> list[int]:
        """Count the group's references that each of these layers of one group has."""
        return [self.parts_of.get(layer, 0) for layer in layers]


@dataclass(frozen=True, slots=True)
class Part:
    """One run of bytes in every block: block b lies at base + b * stride."""

    tensor: torch.Tensor  # of the storage it lies in
    base: int
    stride_bytes: int
    page_bytes: int


def views_of(cache: LayerCache) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def layer_parts(layer: str, cache: LayerCache, spec: KVCacheSpec, num_blocks: int) -> list[Part]:
    views = views_of(cache)
    if not isinstance(spec, AttentionSpec | MambaSpec):
        raise unsupported(layer, cache, f"{type(spec).__name__} is neither attention nor Mamba")
    for view in views:
        if not is_dense(view[0]):
            raise unsupported(layer, cache, "the bytes of a block are not one run")
    if len({view.shape[0] for view in views}) > 1:
        # vllm-ascend under decode context parallelism, where each rank has the indexer's keys of all of them.
        raise unsupported(layer, cache, "its parts do not have equally many blocks")
    factor = _kernel_blocks(layer, views, spec, num_blocks)
    parts: list[Part] = []
    for view in views:
        block_bytes, stride_bytes = _block_bytes(view), view.stride(0) * view.element_size()
        if factor > 1 and block_bytes != stride_bytes:
            raise unsupported(layer, cache, f"the {factor} kernel blocks of a block do not touch")
        part = Part(view, view.data_ptr(), stride_bytes * factor, block_bytes * factor)
        before = parts[-1] if parts else None
        if (
            before is not None
            and before.stride_bytes == part.stride_bytes
            and before.base + before.page_bytes == part.base
            and before.page_bytes + part.page_bytes <= part.stride_bytes
        ):
            parts[-1] = Part(before.tensor, before.base, before.stride_bytes, before.page_bytes + part.page_bytes)
        else:
            parts.append(part)
    return parts


def _kernel_blocks(layer: str, views: list[torch.Tensor], spec: AttentionSpec | MambaSpec, num_blocks: int) -> int:
    """Return how many entries of the first dimension make one block that vLLM manages."""
    if isinstance(spec, MambaSpec):
        candidates = [1]
    else:
        # Count by bytes if the cache has the dtype that the spec counts with, else (a quantised cache) by count.
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
    raise unsupported(layer, views, f"that is not {num_blocks} blocks of {spec.block_size} tokens")


def _block_bytes(view: torch.Tensor) -> int:
    return view[0].numel() * view.element_size()


def is_dense(block: torch.Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order the dimensions lie."""
    expected = 1
    for stride, size in sorted((block.stride(dim), block.shape[dim]) for dim in range(block.dim())):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def as_bytes(part: Part, num_blocks: int) -> torch.Tensor:
    """(num_blocks, page) int8 on the same memory."""
    storage = part.tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.int8, device=part.tensor.device)
    size, stride = (num_blocks, part.page_bytes), (part.stride_bytes, 1)
    return view.set_(storage, part.base - storage.data_ptr(), size, stride)


def unsupported(layer: str, cache: LayerCache, why: str) -> ConfigError:
    shapes = ", ".join(f"{tuple(view.shape)} {view.dtype} strides {view.stride()}" for view in views_of(cache))
    return ConfigError(
        f"the KV cache of layer {layer} ({shapes}) cannot be offloaded: {why}; turn offload off for this model"
    )
