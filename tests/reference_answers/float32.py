"""The bundled model in float32 under Hugging Face: what an answer's margins are measured with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .questions import TOKENS_MAX, Measured


def measure(model_folder: Path, questions: Iterable[str]) -> list[Measured]:
    """Greedy chat answers, and how far each of their tokens leads the runner-up."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    with _one_thread():
        return [_answer(model, tokenizer, question) for question in questions]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other in each operation, which takes minutes if other processes have the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _answer(model: torch.nn.Module, tokenizer: AutoTokenizer, question: str) -> Measured:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    tokens: list[int] = []
    margins: list[float] = []
    uncomputed, cache = prompt, None
    while len(tokens) < TOKENS_MAX and (not tokens or tokens[-1] != tokenizer.eos_token_id):
        output = model(torch.tensor([uncomputed]), past_key_values=cache, use_cache=True)
        best = torch.log_softmax(output.logits[0, -1], dim=-1).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        uncomputed, cache = tokens[-1:], output.past_key_values
    return Measured(question, tokenizer.decode(tokens, skip_special_tokens=True), tuple(margins))
