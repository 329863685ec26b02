"""A model folder from which vLLM makes a configuration; its weights are one dummy tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


def write_tiny_llama(folder: Path, weights: bytes = b"\1" * 64, **settings: Any) -> Path:
    """A new folder. weights: the bytes of its one tensor. settings: of config.json, besides TINY_LLAMA."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **settings}))
    tensor = {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}
    header = json.dumps({"a": tensor}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return folder
