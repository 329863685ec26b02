"""Random KV caches of every kind the connector copies, as vLLM or the Ascend code hands them to it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches

KINDS = ("one-tensor", "keys-and-values", "latent", "quantised", "groups", "states", "padded")


@dataclass(frozen=True)
class Caches:
    """`canonical`, and an independent model of the same memory."""

    kind: str
    canonical: CanonicalKVCaches
    # Per group, the parts of a block: (first byte of block 0 in `memory`, bytes from block to block, bytes copied,
    # first byte in one block's share of a row, bytes that share takes there).
    groups: list[list[tuple[int, int, int, int, int]]]
    memory: torch.Tensor  # all of the device's, one dimension of int8
    block_bytes: int  # a block's share of a row, all parts


def random_caches(rng: random.Random, num_blocks: int) -> Caches:
    kind = rng.choice(KINDS)
    if kind == "groups":
        return _shared(rng, num_blocks, kind, groups=rng.randint(2, 3))
    if kind == "states":  # attention pages and, in the same memory, states that fill less of them
        return _shared(rng, num_blocks, kind, groups=2, smaller=True)
    parts: list[int] = []
    for _ in range(rng.randint(1, 3)):  # layers
        head = rng.randint(1, 12)
        parts += {
            "one-tensor": [2 * head],
            "keys-and-values": [head, head],
            "latent": [8 * head, head],
            "quantised": [head, head, max(1, head // 2), 2],  # keys, values, indexer keys, their scales
            "padded": [head],
        }[kind]
    slack = [rng.choice([0, 0, 5]) if kind == "padded" else 0 for _ in parts]
    return _separate(rng, num_blocks, kind, parts, slack)


def _separate(rng: random.Random, num_blocks: int, kind: str, parts: list[int], slack: list[int]) -> Caches:
    """A separate allocation for each part; the stride of blocks may exceed their length."""
    starts, end = [], 0
    for part, more in zip(parts, slack, strict=True):
        end += rng.randint(0, 7)  # gap between allocations
        starts.append(end)
        end += (part + more) * num_blocks
    memory = _random_bytes(rng, end)
    tensors, offsets, group, in_row = [], [], [], 0
    for start, part, more in zip(starts, parts, slack, strict=True):
        view = memory.as_strided((num_blocks, part), (part + more, 1), start)
        tensors.append(CanonicalKVCacheTensor(view, part))
        offsets.append(in_row)
        group.append((start, part + more, part, in_row, part))
        in_row += part
    refs = [[CanonicalKVCacheRef(index, part) for index, part in enumerate(parts)]]
    return Caches(kind, PlacedKVCaches(tensors, refs, offsets), [group], memory, in_row)


def _shared(rng: random.Random, num_blocks: int, kind: str, groups: int, smaller: bool = False) -> Caches:
    """Layers of several groups in the same tensors; a block belongs to one group at a time."""
    pages = [rng.randint(4, 20) for _ in range(rng.randint(1, 3))]
    memory = _random_bytes(rng, sum(pages) * num_blocks)
    tensors, starts, start = [], [], 0
    for page in pages:
        tensors.append(CanonicalKVCacheTensor(memory.as_strided((num_blocks, page), (page, 1), start), page))
        starts.append(start)
        start += page * num_blocks
    refs: list[list[CanonicalKVCacheRef]] = []
    parts_of_groups: list[list[tuple[int, int, int, int, int]]] = []
    for number in range(groups):
        used = range(len(pages)) if number == 0 else range(rng.randint(1, len(pages)))
        refs.append([])
        parts_of_groups.append([])
        for index in used:
            size = rng.randint(1, pages[index]) if smaller and number else pages[index]
            refs[-1].append(CanonicalKVCacheRef(index, size))
            parts_of_groups[-1].append((starts[index], pages[index], size, sum(pages[:index]), pages[index]))
    return Caches(kind, CanonicalKVCaches(tensors, refs), parts_of_groups, memory, sum(pages))


def _random_bytes(rng: random.Random, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.int8)
