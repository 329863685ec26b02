"""A small model with random weights whose answers depend on all of the prompt, for machines without a real one.

    python -m system.random_model FROM TO

FROM has config.json and a tokenizer; TO gets the same configuration with fewer layers and a smaller width, the
tokenizer, and weights. Those that vLLM makes by itself (`--load-format dummy`) are so small that every token is as
likely as any other: then no answer is better than another one, and wrong KV is not seen.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
WIDTH = 0.03  # of the weights' normal distribution: a product keeps about the size of its input at 1,024 inputs
SHARP = 0.5  # norms of queries and keys: attention is broad, so the rounding of float16 stays small
SURE = 4.0  # times the weights of the last layer: a few tokens are likely, the others are not


def make(source: Path, target: Path) -> None:
    """Write the model's folder."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, target)
    document = json.loads((source / "config.json").read_text(encoding="utf-8")) | SHAPE
    (target / "config.json").write_text(json.dumps(document), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target), dtype=torch.float16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0.0, WIDTH * (SURE if name.startswith("lm_head") else 1.0))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(SHARP)
    model.save_pretrained(target)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__)
        return 2
    make(Path(arguments[0]), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
