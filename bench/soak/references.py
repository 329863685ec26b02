"""Right answers, learnt from an engine without any offload, and how sure they are.

A CPU kernel rounds differently for another number of rows: by how much of a prompt is cached, and by what other
requests share its engine steps. On a near tie another token wins, on stock vLLM as well. Under concurrent load no
reference can be asked for in the same company, so the answers themselves must not hang on rounding. Each prompt is
asked cold, after a shared beginning, as a whole hit, and in company; the largest difference of one token's
log-probability between these is the noise. An answer is kept up to the first token whose lead over the runner-up is
below `SAFETY` times the noise, and a prompt is used only if that leaves `CHECKED_LEAST` tokens. What remains is the
answer at *every* cached length, those never learnt included, so every answer is checked and none needs an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from stack_driver.prompts import BLOCK_TOKENS, Prompt, make_group, make_prompt

from soak.asking import ANSWER_TOKENS, REQUEST_SECONDS, request_body

# Two log-probabilities move against each other: twice the noise can turn a lead. And the noise was only sampled.
SAFETY = 8.0
LEAD_LEAST = 1e-3  # natural logarithm; below it nothing counts as decided, however quiet the kernels are
CHECKED_LEAST = 6
SHARED_BLOCKS, OWN_BLOCKS, GROUP_PROMPTS = 2, 2, 4


class NotDecisive(Exception):
    """Too few prompts have answers that rounding cannot turn."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer: tokens, each one's log-probability and its lead over the runner-up."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """tokens: the beginning of the answer that rounding cannot turn. lengths: cached lengths it was heard with."""

    prompt: Prompt
    salt: str | None
    tokens: tuple[int, ...]
    lengths: frozenset[int]

    def accepts(self, answer: Sequence[int]) -> bool:
        return len(answer) == ANSWER_TOKENS and tuple(answer[: len(self.tokens)]) == self.tokens


@dataclass(frozen=True, slots=True)
class Pool:
    """noise: largest difference seen, natural logarithm. sensitive: prompts whose answer one foreign block changes."""

    references: tuple[Reference, ...]
    noise: float
    refused_prompts: int
    sensitive_prompts: int


class PlainEngine:
    """An engine without offload, asked for tokens and their log-probabilities."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=REQUEST_SECONDS)
        self._model = model

    def close(self) -> None:
        self._http.close()

    def forget(self) -> None:
        self._http.post("/reset_prefix_cache").raise_for_status()

    def hear(self, tokens: Sequence[int]) -> Heard:
        body = {**request_body(self._model, tokens, None), "logprobs": 2, "return_tokens_as_token_ids": True}
        response = self._http.post("/v1/completions", json=body)
        response.raise_for_status()
        return heard(response.json())


def heard(document: dict[str, Any]) -> Heard:
    """From vLLM's completion document with `logprobs: 2`."""
    choice = document["choices"][0]
    details = (document.get("usage") or {}).get("prompt_tokens_details") or {}
    leads = []
    for position in choice["logprobs"]["top_logprobs"]:
        best = sorted(position.values(), reverse=True)
        leads.append(best[0] - best[1])
    return Heard(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        tuple(leads),
        int(details.get("cached_tokens") or 0),
    )


def noise_of(answers: Sequence[Heard]) -> float:
    """Largest difference of a token's log-probability between answers that are the same up to and including it."""
    largest = 0.0
    first = answers[0]
    for other in answers[1:]:
        for ours, theirs, mine, its in zip(first.tokens, other.tokens, first.logprobs, other.logprobs, strict=True):
            if ours != theirs:
                break
            largest = max(largest, abs(mine - its))
    return largest


def decided_tokens(answers: Sequence[Heard], lead_least: float) -> tuple[int, ...]:
    """The beginning on which all answers agree and which every one of them leads by `lead_least`."""
    decided: list[int] = []
    for position, token in enumerate(answers[0].tokens):
        if any(answer.tokens[position] != token or answer.leads[position] < lead_least for answer in answers):
            break
        decided.append(token)
    return tuple(decided)


def learn_pool(engine: PlainEngine, prompts: int, seed: int) -> Pool:
    """`prompts` references in groups with shared beginnings, every other group with a cache salt of its own.

    Raises NotDecisive. The salt is the tiers' affair alone: it changes keys, never answers.
    """
    answers: dict[str, list[Heard]] = {}
    drawn: dict[str, tuple[Prompt, str | None]] = {}
    for number in range(-(-prompts // GROUP_PROMPTS) + 2):  # two groups to spare
        group = make_group(f"soak {seed} group {number}", GROUP_PROMPTS, SHARED_BLOCKS, OWN_BLOCKS)
        salt = f"tenant {number}" if number % 2 else None
        for prompt, spoken in zip(group, _ask_in_every_way(engine, group), strict=True):
            answers[prompt.name], drawn[prompt.name] = spoken, (prompt, salt)
    noise = max(noise_of(spoken) for spoken in answers.values())
    lead_least = max(LEAD_LEAST, SAFETY * noise)
    kept: list[Reference] = []
    for name, spoken in answers.items():
        tokens = decided_tokens(spoken, lead_least)
        if len(tokens) >= CHECKED_LEAST:
            kept.append(Reference(*drawn[name], tokens, frozenset(answer.cached_tokens for answer in spoken)))
    if len(kept) < min(prompts, max(4, prompts // 2)):
        raise NotDecisive(
            f"{len(kept)} of {len(answers)} prompts have answers that rounding (up to {noise:.2g}) cannot turn, "
            f"{max(4, prompts // 2)} are needed; run with --dtype float32"
        )
    references = tuple(kept[:prompts])
    return Pool(references, noise, len(answers) - len(kept), _sensitive(engine, references))


def _ask_in_every_way(engine: PlainEngine, group: Sequence[Prompt]) -> list[list[Heard]]:
    """Per prompt: in company, then alone cold, whole hit, and after the shared beginning."""
    engine.forget()
    with ThreadPoolExecutor(len(group)) as company:
        spoken = [[answer] for answer in company.map(lambda prompt: engine.hear(prompt.tokens), group)]
    for place, prompt in enumerate(group):
        engine.forget()
        spoken[place] += [engine.hear(prompt.tokens), engine.hear(prompt.tokens)]
        engine.forget()
        engine.hear(prompt.tokens[: prompt.shared_tokens + 1])
        spoken[place].append(engine.hear(prompt.tokens))
    return spoken


def _sensitive(engine: PlainEngine, references: Iterable[Reference]) -> int:
    """How many answers change when one block of the prompt is another: would a wrong block be noticed?"""
    changed = 0
    for number, reference in enumerate(references):
        answer = engine.hear(with_foreign_block(reference.prompt, number % reference.prompt.blocks))
        changed += not reference.accepts(answer.tokens)
    return changed


def with_foreign_block(prompt: Prompt, block: int) -> tuple[int, ...]:
    foreign = make_prompt(f"{prompt.name} foreign", 1).tokens[:BLOCK_TOKENS]
    begin = block * BLOCK_TOKENS
    return prompt.tokens[:begin] + foreign + prompt.tokens[begin + BLOCK_TOKENS :]
