"""The answers of an engine without offload, for every cached length that the tests of tiers use."""

from __future__ import annotations

import os

from .engine_client import EngineClient
from .known_answers import KnownAnswers
from .prompts import Prompt
from .running_stack import BLOCKS_MOST

PROMPTS_ENV = "SPILLWAY_IDENTITY_PROMPTS"  # 200 for the full proof, which takes a quarter of an hour longer
FAST_PROMPTS, SLOW_PROMPTS = 40, 10


def identity_prompts(usual_blocks: int) -> int:
    """Number of prompts: as asked, or as many as this machine computes in about a minute."""
    asked = os.environ.get(PROMPTS_ENV, "").strip()
    if asked:
        return int(asked)
    return FAST_PROMPTS if usual_blocks == BLOCKS_MOST else SLOW_PROMPTS


def reference_answers(engine: EngineClient, prompts: list[Prompt]) -> dict[str, KnownAnswers]:
    """Each prompt as it comes (the first of a group cold, the others after their shared beginning) and once more with
    all of its blocks cached, from the device alone; in the order in which the tests use them."""
    answers = {prompt.name: KnownAnswers(prompt) for prompt in prompts}
    beginnings: set[tuple[int, ...]] = set()
    for prompt in prompts:
        beginning = prompt.tokens[: prompt.shared_tokens]
        first, again = engine.ask(prompt.tokens), engine.ask(prompt.tokens)
        assert first.cached_tokens == (prompt.shared_tokens if beginning in beginnings else 0), (
            f"{prompt.name}: {first}"
        )
        assert again.cached_tokens == prompt.reusable_tokens, f"{prompt.name}: {again}"
        beginnings.add(beginning)
        answers[prompt.name].add(first)
        answers[prompt.name].add(again)
    return answers
