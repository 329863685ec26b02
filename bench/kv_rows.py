"""Bytes of KV that a prompt takes in each tier, beside what its KV groups need. No engine, no device.

    python bench/kv_rows.py [--tokens 32800] [--block-tokens 16]

The layers have the shapes of published models. vLLM's own functions make KV groups and device blocks of them; chunks
are counted by the connector's plan/kv_groups.py, as in `spillway plan` and the chart. `needed` counts the chunks that
the prompt's prefix is loaded by: all of full attention, the last window, the last state, without padding. A prompt of
a model with states that ends with a chunk leaves one state more: the default length is no multiple of usual blocks.
`rows_all` and `rows_last` are what the CPU tier takes with windowChunks: all and last, a row for each chunk;
`payloads_last` is what those chunks hold without the rows' padding. One rank, one device block to a chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from spillway_connector.engine.layouts.packed_blocks import layer_specs, plain_page_bytes, row_block_bytes
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.plan.kv_groups import KvGroup, read_chunks, stored_chunks
from spillway_connector.testing.kv_caches import counted_block_bytes, deepseek_v4, kv_cache_config

Specs = dict[str, KVCacheSpec]


def windowed(layers: int, pattern: int, *, heads: int, head_size: int, window: int, block_tokens: int) -> Specs:
    """Every `pattern`-th layer has full attention, the others a window."""
    of_heads: dict[str, Any] = {
        "block_size": block_tokens, "num_kv_heads": heads, "head_size": head_size, "dtype": torch.bfloat16,
    }  # fmt: skip
    return {
        f"layer.{n}": SlidingWindowSpec(**of_heads, sliding_window=window)
        if (n + 1) % pattern
        else FullAttentionSpec(**of_heads)
        for n in range(layers)
    }


def qwen3_next(block_tokens: int) -> Specs:
    """48 layers, every fourth with attention. vLLM raises the block until a page holds a state of the model's dtype."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4)
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", "auto")
    state: dict[str, Any] = {"shapes": shapes, "dtypes": dtypes, "mamba_cache_mode": "align"}
    state_bytes = MambaSpec(block_size=block_tokens, **state).page_size_bytes
    of_heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 256, "dtype": torch.bfloat16}
    token_bytes = FullAttentionSpec(block_size=1, **of_heads).page_size_bytes
    block_tokens *= -(-state_bytes // (block_tokens * token_bytes))
    page_bytes = block_tokens * token_bytes
    return {
        f"layer.{n}": MambaSpec(block_size=block_tokens, page_size_padded=page_bytes, **state)
        if (n + 1) % 4
        else FullAttentionSpec(block_size=block_tokens, **of_heads)
        for n in range(48)
    }


MODELS: dict[str, Callable[[int], Specs]] = {
    "Gemma 3, tiny": lambda block: windowed(6, 3, heads=2, head_size=32, window=96, block_tokens=2 * block),
    "Gemma 3 27B": lambda block: windowed(62, 6, heads=16, head_size=128, window=1024, block_tokens=block),
    "gpt-oss 20B": lambda block: windowed(24, 2, heads=8, head_size=64, window=128, block_tokens=block),
    "Qwen3-Next 80B": qwen3_next,
    "DeepSeek V4 Flash": deepseek_v4,
}


@dataclass(frozen=True, slots=True)
class Group:
    spec: KVCacheSpec  # of one layer
    layers: int
    block_bytes: int  # of all its layers, without padding

    @property
    def counted(self) -> KvGroup:
        window = self.spec.sliding_window if isinstance(self.spec, SlidingWindowSpec) else 0
        return KvGroup(self.spec.block_size, window, isinstance(self.spec, MambaSpec))


def groups_of(specs: Specs) -> tuple[list[Group], int]:
    """The groups that this vLLM makes, and how many bytes of a row a block takes."""
    config = kv_cache_config(specs, 64 << 30)
    groups = []
    for group in config.kv_cache_groups:
        of_layers = [spec for _, spec in layer_specs(group)]
        groups.append(Group(of_layers[0], len(of_layers), sum(map(plain_page_bytes, of_layers))))
    return groups, row_block_bytes(config, counted_block_bytes(config))


def measured(name: str, specs: Specs, tokens: int) -> dict[str, Any]:
    groups, block_bytes = groups_of(specs)
    row_bytes = ChunkGeometry(block_bytes, blocks_per_chunk=1, num_ranks=1).row_bytes
    counted = [group.counted for group in groups]
    every, last = (stored_chunks(counted, tokens, every_window=every) for every in (True, False))
    sizes = [group.block_bytes for group in groups]
    needed, payloads = (
        sum(chunks * size for chunks, size in zip(chosen, sizes, strict=True))
        for chosen in (read_chunks(counted, tokens), last)
    )
    rows_all, rows_last = sum(every) * row_bytes, sum(last) * row_bytes
    return {
        "model": name,
        "vllm": vllm.__version__,
        "needed_bytes_per_token": round(needed / tokens),
        "rows_all_bytes_per_token": round(rows_all / tokens),
        "rows_last_bytes_per_token": round(rows_last / tokens),
        "payloads_last_bytes_per_token": round(payloads / tokens),
        "rows_all_to_needed": round(rows_all / needed, 3),
        "rows_last_to_needed": round(rows_last / needed, 3),
        "payloads_last_to_needed": round(payloads / needed, 3),
        "row_bytes": row_bytes,
        "groups": [
            {
                "kind": type(group.spec).__name__,
                "layers": group.layers,
                "chunk_tokens": group.spec.block_size,
                "chunk_bytes": group.block_bytes,
                "chunks_all": chunks_all,
                "chunks_last": chunks_last,
            }
            for group, chunks_all, chunks_last in zip(groups, every, last, strict=True)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_800, help="of the prompt")
    parser.add_argument("--block-tokens", type=int, default=16, help="what vLLM is given as --block-size")
    wanted = parser.parse_args(arguments)
    for name, specs in MODELS.items():
        try:
            of_model = specs(wanted.block_tokens)
        except TypeError as error:  # vLLM 0.32 describes compressed layers otherwise
            print(json.dumps({"model": name, "vllm": vllm.__version__, "skipped": str(error)}))
            continue
        print(json.dumps(measured(name, of_model, wanted.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
