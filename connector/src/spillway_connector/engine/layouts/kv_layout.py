"""Memory layout of a rank's KV caches, as its worker registered them, sent to the scheduler's process.

Backend, shape, strides, format and scales are known only in the workers, which have the attention layers; the namespace
is made in the scheduler's process. Both map the CPU tier's rows, and when the scheduler's connector is built, all
workers have registered their caches and no row is in use: each rank writes its description into its part of row 0.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from spillway_connector.errors import ConfigError

LayerCache = torch.Tensor | Sequence[torch.Tensor]
LAYOUT_AT_MOST_BYTES = 1 << 20  # of a description; a longer one is replaced by its digest
_MARK = b"SPILLKVL"
_HEAD = struct.Struct("<8sI16s")  # mark, bytes of the document, its blake3


def layout_facts(kv_caches: Mapping[str, LayerCache], vllm_config: VllmConfig, num_blocks: int) -> dict[str, Any]:
    """JSON values. kv_caches: as vLLM registers them, by layer, one tensor or several."""
    modules = vllm_config.compilation_config.static_forward_context
    layers: dict[str, list[str]] = {}
    for name, cache in kv_caches.items():
        tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
        facts = _module_facts(modules.get(name)) | {"tensors": [_tensor_facts(one, num_blocks) for one in tensors]}
        layers.setdefault(json.dumps(facts, sort_keys=True), []).append(name)
    return {
        "chip": str(current_platform.get_device_name()),
        "layers": [json.loads(facts) | {"names": names} for facts, names in layers.items()],
    }


def _module_facts(module: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if (backend := getattr(module, "get_attn_backend", None)) is not None:
        facts["backend"] = backend().get_name()
    for label, attribute in (("key_scale", "_k_scale_float"), ("value_scale", "_v_scale_float")):
        if isinstance(scale := getattr(module, attribute, None), float):
            facts[label] = scale
    return facts


def _tensor_facts(tensor: torch.Tensor, num_blocks: int) -> dict[str, Any]:
    """The facts of a tensor without those that follow from an engine's memory: the number of blocks, and strides that
    cross blocks."""
    size_bytes = tensor.element_size()
    blocks = _block_dimension(tensor, num_blocks)
    stride_bytes = [stride * size_bytes for stride in tensor.stride()]
    facts: dict[str, Any] = {
        "dtype": str(tensor.dtype),
        "shape": ["blocks" if dim == blocks else size for dim, size in enumerate(tensor.shape)],
        "stride_bytes": [
            stride if dim == blocks or stride < stride_bytes[blocks] else "across blocks"
            for dim, stride in enumerate(stride_bytes)
        ],
    }
    if tensor.shape[blocks] % num_blocks == 0 and tensor.shape[blocks] != num_blocks:
        facts["kernel_blocks_per_block"] = tensor.shape[blocks] // num_blocks
    if (memory_format := _memory_format(tensor)) is not None:
        facts["format"] = memory_format
    return facts


def _memory_format(tensor: torch.Tensor) -> int | None:
    """Number of a tensor's memory format on an NPU (ACL_FORMAT_*: ND, FRACTAL_NZ or another), which strides do not
    show."""
    if tensor.device.type != "npu":
        return None
    return int(importlib.import_module("torch_npu").get_npu_format(tensor))


def _block_dimension(tensor: torch.Tensor, num_blocks: int) -> int:
    """The position of the dimension that counts blocks: before or behind that of K and V, or that of the layers."""
    sizes = list(tensor.shape)
    for dim, size in enumerate(sizes):
        if size == num_blocks:
            return dim
    for dim, size in enumerate(sizes):
        if size % num_blocks == 0:
            return dim
    return sizes.index(max(sizes))  # vLLM-Ascend may have more blocks than vLLM manages


def write_layout(
    rows: memoryview,
    cell_offset: int,
    cell_bytes: int,
    facts: Mapping[str, Any],
    always: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """rows: flat writable bytes of the CPU tier. A cell that is too small for all of it gets its digest, and what is
    needed `always`."""
    document = json.dumps({**facts, **always}, sort_keys=True).encode()
    if _HEAD.size + len(document) > min(cell_bytes, LAYOUT_AT_MOST_BYTES):
        digest = blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest(16)
        document = json.dumps({"digest": digest, **always}, sort_keys=True).encode()
    assert _HEAD.size + len(document) <= cell_bytes, f"a cell of {cell_bytes} bytes holds no description of its layout"
    head = _HEAD.pack(_MARK, len(document), blake3(document).digest(16))
    rows[cell_offset : cell_offset + _HEAD.size + len(document)] = head + document


def read_layouts(rows: memoryview, cell_bytes: int, num_ranks: int, stages: int = 1) -> list[dict[str, Any]]:
    """Each rank's description, in the order of ranks; or one description for each pipeline stage if its ranks' are
    equal.

    Raises ConfigError if a rank's is missing.
    """
    found: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        cell = bytes(rows[rank * cell_bytes : (rank + 1) * cell_bytes])
        mark, length, digest = _HEAD.unpack_from(cell) if len(cell) >= _HEAD.size else (b"", 0, b"")
        document = cell[_HEAD.size : _HEAD.size + length]
        if mark != _MARK or blake3(document).digest(16) != digest:
            raise ConfigError(
                f"rank {rank} of {num_ranks} has not reported the memory layout of its KV caches, so it is unknown "
                "which blocks fit it; a replica must run on one machine, or turn its shared tiers off"
            )
        found.append(json.loads(document))
    of_stages = [found[start : start + num_ranks // stages] for start in range(0, num_ranks, num_ranks // stages)]
    return [ranks[0] for ranks in of_stages] if all(one == ranks[0] for ranks in of_stages for one in ranks) else found
