"""Answers to documents with a question, asked twice: the second time their prefix comes from the CPU tier."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spillway_engine.ascend_acceptance.client import EngineClient
from spillway_engine.near_ties import Scored, compared_tokens, difference

_NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Hugo", "Irene", "Jonas")
_PLACES = ("the harbour", "the market", "the library", "the mill", "the station", "the old bridge", "the school")
_THINGS = ("books", "apples", "lamps", "chairs", "letters", "bottles", "coats", "keys")


@dataclass(frozen=True, slots=True)
class Answers:
    first: Sequence[Scored]
    again: Sequence[Scored]
    cached_tokens: int  # of all prompts, the second time


def document(seed: int, sentences: int) -> str:
    """Plain sentences, no two documents alike from the first one on, and a question to go on from."""
    dice = random.Random(f"document {seed}")  # noqa: S311 - a text, no secret
    lines = [
        f"On day {day}, {dice.choice(_NAMES)} carried {dice.randint(2, 90)} {dice.choice(_THINGS)} "
        f"from {dice.choice(_PLACES)} to {dice.choice(_PLACES)}."
        for day in range(1, sentences + 1)
    ]
    return "\n".join([f"Register {seed}.", *lines, f"On day {sentences + 1},"])


def prompts(engine: EngineClient, count: int, tokens: int) -> list[list[int]]:
    """Token ids, `tokens` each."""
    return [engine.tokens(document(seed, tokens // 8))[:tokens] for seed in range(count)]


def asked_twice(engine: EngineClient, asked: Iterable[list[int]], answer_tokens: int) -> Answers:
    prompts = list(asked)
    first = [engine.answer(prompt, answer_tokens)[0] for prompt in prompts]
    again = [engine.answer(prompt, answer_tokens) for prompt in prompts]
    return Answers(first, [answer for answer, _ in again], sum(cached for _, cached in again))


def compared(reference: Sequence[Scored], answers: Answers) -> tuple[list[str], int, int]:
    """Return the differences beyond near ties, the number of compared tokens, and the number of tokens asked for."""
    different, seen, asked = [], 0, 0
    for name, given in (("computed", answers.first), ("loaded", answers.again)):
        for number, (one, other) in enumerate(zip(reference, given, strict=True), start=1):
            seen += compared_tokens(one, other)
            asked += len(one.tokens)
            if (moved := difference(one, other)) is not None:
                different.append(f"prompt {number}, {name}: {moved}")
    return different, seen, asked
