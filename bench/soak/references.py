"""Right answers, recorded from an engine without any offload, and by how much rounding moves them.

A CPU kernel rounds differently for another number of rows: by how much of a prompt is cached, and by what other
requests share its engine steps. On a near tie another token wins, on stock vLLM as well. Under concurrent load a
reference cannot be asked for beside the same requests, so the comparison must not depend on rounding: it is that of the
log-probabilities of the tokens that were likely at each position, up to a near tie that went the other way
(reference_answers.margins). Each prompt is asked cold, after a shared beginning, as a whole hit, and beside others. The
largest difference of one token's log-probability between these is the noise, and an answer may move by `SAFETY` times
the noise. That holds at *every* cached length, those never recorded included, so every answer is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from reference_answers.margins import ROUNDING, Scored, difference, scored
from stack_driver.prompts import BLOCK_TOKENS, Prompt, make_group, make_prompt

from soak.asking import REQUEST_SECONDS, request_body

SAFETY = 8.0  # the noise was only sampled
ROUNDING_LEAST = 0.02  # natural logarithm; less cannot be distinguished from noise, however quiet the kernels are
SHARED_BLOCKS, OWN_BLOCKS, GROUP_PROMPTS = 2, 2, 4


class NotDecisive(Exception):
    """Rounding moves the answers by as much as wrong KV might."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, and how much of its prompt was cached."""

    scored: Scored
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """rounding: how far a log-probability may move. lengths: cached lengths at which the answer was recorded."""

    prompt: Prompt
    salt: str | None
    scored: Scored
    rounding: float
    lengths: frozenset[int]

    def fault(self, answer: Scored) -> str | None:
        """Return how the answer differs beyond rounding; None if it does not."""
        return difference(self.scored, answer, self.rounding)


@dataclass(frozen=True, slots=True)
class Pool:
    """noise: largest difference seen, natural logarithm. sensitive: prompts whose answer one foreign block changes."""

    references: tuple[Reference, ...]
    noise: float
    sensitive_prompts: int


class PlainEngine:
    """An engine without offload, asked for tokens and their log-probabilities."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=REQUEST_SECONDS)
        self._model = model

    def close(self) -> None:
        self._http.close()

    def clear_cache(self) -> None:
        self._http.post("/reset_prefix_cache").raise_for_status()

    def ask(self, tokens: Sequence[int]) -> Answer:
        response = self._http.post("/v1/completions", json=request_body(self._model, tokens, None))
        response.raise_for_status()
        return answer_of(response.json())


def answer_of(document: dict[str, Any]) -> Answer:
    """Read the answer from vLLM's completion document."""
    details = (document.get("usage") or {}).get("prompt_tokens_details") or {}
    return Answer(scored(document["choices"][0]), int(details.get("cached_tokens") or 0))


def noise_of(answers: Sequence[Answer]) -> float:
    """Largest difference of a chosen token's log-probability between answers that are the same up to and with it."""
    largest = 0.0
    first = answers[0].scored
    for other in (answer.scored for answer in answers[1:]):
        for token, its, top, its_top in zip(first.tokens, other.tokens, first.tops, other.tops, strict=True):
            if token != its:
                break
            largest = max(largest, abs(top[token] - its_top[token]))
    return largest


def learn_pool(engine: PlainEngine, prompts: int, seed: int) -> Pool:
    """`prompts` references in groups with shared beginnings, every other group with a cache salt of its own.

    Raises NotDecisive. The salt is the tiers' affair alone: it changes keys, never answers.
    """
    answers: dict[str, list[Answer]] = {}
    drawn: dict[str, tuple[Prompt, str | None]] = {}
    for number in range(-(-prompts // GROUP_PROMPTS)):
        group = make_group(f"soak {seed} group {number}", GROUP_PROMPTS, SHARED_BLOCKS, OWN_BLOCKS)
        salt = f"tenant {number}" if number % 2 else None
        for prompt, answered in zip(group, _ask_in_every_way(engine, group), strict=True):
            answers[prompt.name], drawn[prompt.name] = answered, (prompt, salt)
    noise = max(noise_of(answered) for answered in answers.values())
    if 2 * noise > ROUNDING:
        raise NotDecisive(
            f"rounding moves log-probabilities by {noise:.2g}; with more than {ROUNDING / 2:.2g}, wrong KV cannot be "
            "distinguished from it: run with --dtype float32"
        )
    rounding = min(ROUNDING, max(ROUNDING_LEAST, SAFETY * noise))
    references = tuple(
        Reference(*drawn[name], answered[0].scored, rounding, frozenset(answer.cached_tokens for answer in answered))
        for name, answered in answers.items()
    )[:prompts]
    return Pool(references, noise, _sensitive(engine, references))


def _ask_in_every_way(engine: PlainEngine, group: Sequence[Prompt]) -> list[list[Answer]]:
    """Ask each prompt beside the others, then alone: cold, whole hit, and after the shared beginning."""
    engine.clear_cache()
    with ThreadPoolExecutor(len(group)) as pool:
        answers = [[answer] for answer in pool.map(lambda prompt: engine.ask(prompt.tokens), group)]
    for place, prompt in enumerate(group):
        engine.clear_cache()
        answers[place] += [engine.ask(prompt.tokens), engine.ask(prompt.tokens)]
        engine.clear_cache()
        engine.ask(prompt.tokens[: prompt.shared_tokens + 1])
        answers[place].append(engine.ask(prompt.tokens))
    return answers


def _sensitive(engine: PlainEngine, references: Iterable[Reference]) -> int:
    """Count the answers that change when one block of the prompt is another: would a wrong block be noticed?"""
    changed = 0
    for number, reference in enumerate(references):
        answer = engine.ask(with_foreign_block(reference.prompt, number % reference.prompt.blocks))
        changed += reference.fault(answer.scored) is not None
    return changed


def with_foreign_block(prompt: Prompt, block: int) -> tuple[int, ...]:
    foreign = make_prompt(f"{prompt.name} foreign", 1).tokens[:BLOCK_TOKENS]
    begin = block * BLOCK_TOKENS
    return prompt.tokens[:begin] + foreign + prompt.tokens[begin + BLOCK_TOKENS :]
