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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.plan.kv_groups import KvGroup, read_chunks, stored_chunks

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    _LAYOUT: Any = KVCacheLayout.BLHNC  # a block holds the pages of all layers side by side
except ImportError:  # vLLM 0.23
    _LAYOUT = None

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


def deepseek_v4(_block_tokens: int = 256) -> Specs:
    """43 layers: two with a window alone, the others in turns with one entry for 4 tokens, and an index, or for 128.
    Their kernels take one size of blocks."""
    aligned: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    latent: dict[str, Any] = {
        **aligned, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }  # fmt: skip
    ratio_name = "compress_ratio"
    if "tokens_per_state" in {field.name for field in fields(MLAAttentionSpec)}:  # vLLM 0.32
        ratio_name, latent["state_content_bytes"] = "tokens_per_state", 584
    state: dict[str, Any] = {**aligned, "dtype": torch.float32}
    specs: Specs = {}
    for n in range(43):
        specs[f"layer.{n}.window"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent)
        if n < 2:
            continue
        ratio = 128 if n % 2 else 4
        specs[f"layer.{n}"] = MLAAttentionSpec(block_size=256, **{ratio_name: ratio}, **latent)
        specs[f"layer.{n}.state"] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=(4 if ratio == 4 else 2) * 512,
            sliding_window=8 if ratio == 4 else 128,
            **state,
        )
        if ratio == 4:
            specs[f"layer.{n}.index"] = MLAAttentionSpec(
                block_size=256, head_size=132, dtype=torch.uint8, **{ratio_name: 4}, **aligned
            )
            specs[f"layer.{n}.index_state"] = SlidingWindowMLASpec(
                block_size=4, head_size=4 * 128, sliding_window=8, **state
            )
    return specs


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
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: _LAYOUT,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace()),
    )
    made = get_kv_cache_groups(config, specs)
    caches = get_kv_cache_config_from_groups(config, made, 64 << 30)
    groups = []
    for group in made:
        of_layers = list(_specs_of(group))
        groups.append(Group(of_layers[0], len(of_layers), sum(map(_plain_bytes, of_layers))))
    return groups, _row_block_bytes(caches)


def _row_block_bytes(caches: Any) -> int:
    if _LAYOUT is None:
        from spillway_connector.engine.v023.spec import group_block_bytes  # noqa: PLC0415

        return group_block_bytes(caches)
    # Each tensor describes a place in one allocation.
    return int(caches.kv_cache_tensors[0].size // caches.num_blocks)


def _specs_of(group: Any) -> Iterator[KVCacheSpec]:
    spec = group.kv_cache_spec
    for layer in group.layer_names:
        yield spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _plain_bytes(spec: KVCacheSpec) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.real_page_size_bytes)
    assert isinstance(spec, MambaSpec)
    return replace(spec, page_size_padded=None).page_size_bytes


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
        "rows_all_to_needed": round(rows_all / needed, 2),
        "rows_last_to_needed": round(rows_last / needed, 2),
        "payloads_last_to_needed": round(payloads / needed, 2),
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
