"""A small model for stacks whose tests rest on no text: random weights, the architecture and tokenizer of the bundled
model. An engine starts with it and answers in a fraction of the time that SmolLM2-135M takes on two slow cores."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine_matrix.models import Model, build, model

from spillway_stack import bundled_model

# 1 MiB for each block of 128 tokens, so that a few prompts fill a small store.
SIZES = {"num_hidden_layers": 8, "head_dim": 64, "max_position_embeddings": 8192}
VOCABULARY = 49_152  # of the tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# The check of an engine's start measures how likely text is, which random weights do not know.
SMALL_MODEL_OVERRIDES = ("lifecycle.selfCheck=off",)


def small_model(folder: Path) -> Path:
    """Write the model below `folder` and return its own folder."""
    llama = model("llama")
    sizes = {**llama.settings, **SIZES, "vocab_size": VOCABULARY}
    made = build(Model("small-llama", llama.layout, llama.model_type, sizes), folder)
    bundled = bundled_model.prepare(lambda line: None)
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled / name, made / name)
    return made
