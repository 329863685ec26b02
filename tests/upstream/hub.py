"""The one model configuration that vLLM's tests name, where a hub cannot be reached."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = "facebook/opt-125m"  # nothing of it but its sizes is read: no test runs it
_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "activation_function": "relu",
    "torch_dtype": "float16",
}


def offline_hub(folder: Path) -> dict[str, str]:
    """The environment of a process for which `folder` is the hub's cache, and holds MODEL's configuration."""
    model = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = model / "snapshots" / "local"
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text("local")
    (snapshot / "config.json").write_text(json.dumps(_CONFIG))
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
