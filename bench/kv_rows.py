"""Bytes of KV that a prompt takes in each tier, beside what its KV groups need. No engine, no device.

    python bench/kv_rows.py [--tokens 32768]

The layers have the shapes of published models. vLLM's own functions make KV groups and device blocks of them. `needed`
counts the chunks that the prompt's prefix is loaded by: all of full attention, the last window, the last state, without
padding. `rows_all` and `rows_last` are what the CPU tier takes with windowChunks: all and last, a row for each chunk;
`payloads_last` is what those chunks hold without the rows' padding. Of states there is one for each step of the
prefill. One rank, one device block to a chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
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

from spillway_connector.engine.features.window_stores import Window, last_end_tokens

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    _LAYOUT: Any = KVCacheLayout.BLHNC  # a block holds the pages of all layers side by side
except ImportError:  # vLLM 0.23
    _LAYOUT = None

STEP_TOKENS = 8192  # of a prefill; a state is kept at the end of each
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


def qwen3_next() -> Specs:
    """48 layers, every fourth with attention. vLLM raises the block until a page holds a state."""
    shapes = ((3, 2 * 16 * 128 + 32 * 128), (32, 128, 128))
    state: dict[str, Any] = {"shapes": shapes, "dtypes": (torch.bfloat16, torch.float32), "mamba_cache_mode": "align"}
    state_bytes = MambaSpec(block_size=16, **state).page_size_bytes
    of_heads: dict[str, Any] = {"num_kv_heads": 2, "head_size": 256, "dtype": torch.bfloat16}
    token_bytes = FullAttentionSpec(block_size=1, **of_heads).page_size_bytes
    block_tokens = -(-state_bytes // (16 * token_bytes)) * 16
    page_bytes = block_tokens * token_bytes
    return {
        f"layer.{n}": MambaSpec(block_size=block_tokens, page_size_padded=page_bytes, **state)
        if (n + 1) % 4
        else FullAttentionSpec(block_size=block_tokens, **of_heads)
        for n in range(48)
    }


def deepseek_v4() -> Specs:
    """43 layers: two with a window alone, the others in turns with one entry for 4 tokens, and an index, or for 128."""
    aligned: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    latent: dict[str, Any] = {
        **aligned, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }  # fmt: skip
    state: dict[str, Any] = {**aligned, "dtype": torch.float32}
    specs: Specs = {}
    for n in range(43):
        specs[f"layer.{n}.window"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **latent)
        if n < 2:
            continue
        ratio = 128 if n % 2 else 4
        specs[f"layer.{n}"] = MLAAttentionSpec(block_size=256, compress_ratio=ratio, **latent)
        specs[f"layer.{n}.state"] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=(4 if ratio == 4 else 2) * 512,
            sliding_window=8 if ratio == 4 else 128,
            **state,
        )
        if ratio == 4:
            specs[f"layer.{n}.index"] = MLAAttentionSpec(
                block_size=256, head_size=132, dtype=torch.uint8, compress_ratio=4, **aligned
            )
            specs[f"layer.{n}.index_state"] = SlidingWindowMLASpec(
                block_size=4, head_size=4 * 128, sliding_window=8, **state
            )
    return specs


MODELS: dict[str, Callable[[], Specs]] = {
    "Gemma 3, tiny": lambda: windowed(6, 3, heads=2, head_size=32, window=96, block_tokens=32),
    "Gemma 3 27B": lambda: windowed(62, 6, heads=16, head_size=128, window=1024, block_tokens=16),
    "gpt-oss 20B": lambda: windowed(24, 2, heads=8, head_size=64, window=128, block_tokens=16),
    "Qwen3-Next 80B": qwen3_next,
    "DeepSeek V4 Flash": deepseek_v4,
}


@dataclass(frozen=True, slots=True)
class Group:
    spec: KVCacheSpec  # of one layer
    layers: int
    block_bytes: int  # of all its layers, without padding

    def stored_chunks(self, tokens: int, alignment_tokens: int, *, last: bool) -> int:
        """Count those of a prompt. alignment_tokens: of a chunk of full attention. last: as the connector chooses."""
        blocks = tokens // self.spec.block_size
        if isinstance(self.spec, MambaSpec):
            return -(-tokens // max(STEP_TOKENS, self.spec.block_size))
        if not isinstance(self.spec, SlidingWindowSpec):
            return blocks
        window, segment = self._window_chunks, alignment_tokens // self.spec.block_size
        begin = 0
        if last:
            end_tokens = last_end_tokens(tokens, alignment_tokens)
            begin = max(0, Window.of(self.spec, 0, self.spec.block_size).first_chunk(end_tokens))
        # vLLM leaves out what lies within a chunk of full attention, but for the window before its end.
        return sum(chunk % segment >= segment - window for chunk in range(begin, blocks))

    def needed_chunks(self, tokens: int) -> int:
        if isinstance(self.spec, MambaSpec):
            return 1
        if isinstance(self.spec, SlidingWindowSpec):
            return min(self._window_chunks, tokens // self.spec.block_size)
        return tokens // self.spec.block_size

    @property
    def _window_chunks(self) -> int:
        assert isinstance(self.spec, SlidingWindowSpec)
        return -(-self.spec.sliding_window // self.spec.block_size)


def groups_of(specs: Specs) -> tuple[list[Group], int]:
    """The groups that this vLLM makes, and the bytes of a device block."""
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
    sizes = [tensor.size for tensor in caches.kv_cache_tensors]
    device_bytes = sum(sizes) if hasattr(caches.kv_cache_tensors[0], "shared_by") else sizes[0]
    groups = []
    for group in made:
        of_layers = list(_specs_of(group))
        groups.append(Group(of_layers[0], len(of_layers), sum(map(_plain_bytes, of_layers))))
    return groups, device_bytes // caches.num_blocks


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
    groups, row_bytes = groups_of(specs)
    alignment_tokens = max(group.spec.block_size for group in groups)
    every, last = (
        [group.stored_chunks(tokens, alignment_tokens, last=last) for group in groups] for last in (False, True)
    )
    needed = sum(group.needed_chunks(tokens) * group.block_bytes for group in groups)
    payloads = sum(chunks * group.block_bytes for chunks, group in zip(last, groups, strict=True))
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
    parser.add_argument("--tokens", type=int, default=32_768, help="of the prompt")
    wanted = parser.parse_args(arguments)
    for name, specs in MODELS.items():
        try:
            of_model = specs()
        except TypeError as error:  # vLLM 0.32 describes compressed layers otherwise
            print(json.dumps({"model": name, "vllm": vllm.__version__, "skipped": str(error)}))
            continue
        print(json.dumps(measured(name, of_model, wanted.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
