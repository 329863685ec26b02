"""Figures of how far rounding, and how far one damaged layer, moves the log-probabilities of the check's texts.

`python -m self_check.figures`, under Hugging Face's transformers: rounding in each dtype, by several ways to compute,
then damage in float32, so that the damage alone is measured, and how much of it each tolerance refuses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from spillway_engine.likelihood import ROUNDING_NATS, Scored, token_difference
from spillway_engine.reference_likelihood import REFERENCE_TEXTS, REFERENCES, Reference
from spillway_stack.bundled_model import prepare

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FACTOR = 1.5
ATTENTION = ("sdpa", "eager")
STEPS = (1000, 7, 1)  # tokens computed at once behind those that are cached


def main() -> None:
    argparse.ArgumentParser(
        prog="self_check.figures", description="Rounding and damage, by the check's texts."
    ).parse_args()
    folder = prepare(print)
    reference = REFERENCES[folder.name]
    with torch.inference_mode():
        _rounding(folder, reference)
        _damage(folder, reference)


def _rounding(folder: Path, reference: Reference) -> None:
    for dtype in ROUNDING_NATS:
        for attention in ATTENTION:
            model = _load(folder, dtype, attention)
            for step in STEPS:
                scored = _score(model, reference, step)
                means = [text.mean_nll for text in scored]
                shown = ", ".join(f"{mean:.4f}" for mean in means)
                moved = token_difference(scored, reference)
                print(f"{dtype}, {attention}, {step} tokens at once: means {shown}, tokens {moved:.4f}", flush=True)


def _damage(folder: Path, reference: Reference) -> None:
    model = _load(folder, "float32", "sdpa")
    layers = model.model.layers
    moves: dict[str, list[float]] = {"one projection x 1.5": [], "two adjacent layers swapped": []}
    for number, layer in enumerate(layers):
        for name in PROJECTIONS:
            weight = (layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp).get_submodule(name).weight
            kept = weight.data
            weight.data = kept * FACTOR
            moves["one projection x 1.5"].append(token_difference(_score(model, reference), reference))
            weight.data = kept
            print(f"{name} of layer {number} x 1.5: {moves['one projection x 1.5'][-1]:.4f}", flush=True)
    for number in range(len(layers) - 1):
        layers[number], layers[number + 1] = layers[number + 1], layers[number]
        moves["two adjacent layers swapped"].append(token_difference(_score(model, reference), reference))
        layers[number], layers[number + 1] = layers[number + 1], layers[number]
        print(f"layers {number} and {number + 1} swapped: {moves['two adjacent layers swapped'][-1]:.4f}", flush=True)
    for damage, values in moves.items():
        for dtype, allowed in ROUNDING_NATS.items():
            print(f"{damage}: {sum(value > allowed for value in values)} of {len(values)} refused in {dtype}")


def _load(folder: Path, dtype: str, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()


def _score(model: Any, reference: Reference, step: int = 1000) -> list[Scored]:
    scored = []
    for text, reference_text in zip(REFERENCE_TEXTS, reference.texts, strict=True):
        token_ids = torch.tensor([reference_text.token_ids])
        cache, parts = None, []
        for first in range(0, token_ids.shape[1], step):
            output = model(token_ids[:, first : first + step], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        logprobs = torch.log_softmax(torch.cat(parts, dim=1)[0, :-1].float(), dim=-1)
        of_tokens = logprobs.gather(1, token_ids[0, 1:, None])[:, 0]
        scored.append(Scored(text, reference_text.token_ids, tuple(of_tokens.tolist())))
    return scored


if __name__ == "__main__":
    main()
