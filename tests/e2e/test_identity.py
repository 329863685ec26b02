"""Tiers on or off, the same answers: greedy ones to many prompts with shared beginnings, compared with an engine that
has no offload at all. stack_driver/known_answers.py defines "the same" and the references."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from stack_driver.engine_client import Answer, EngineClient
from stack_driver.known_answers import KnownAnswers
from stack_driver.running_stack import RunningStack

HIT_SECONDS = 30.0  # a lookup that misses its deadline on a busy machine costs the hit, never the answer


@pytest.mark.tiers("bundled")
def test_identical_with_and_without_tiers(
    stack: RunningStack, references: dict[str, KnownAnswers], record_property: pytest.Function
) -> None:
    hits: Counter[str] = Counter()
    beginning: tuple[int, ...] = ()
    for known in references.values():
        if known.prompt.tokens[: known.prompt.shared_tokens] != beginning:
            beginning = known.prompt.tokens[: known.prompt.shared_tokens]
            stack.store.make_room()  # blocks of other groups are not needed again
        stored = stack.stored()
        answer = stack.a.ask(known.prompt.tokens)
        known.check(answer)
        hits[answer.source] += 1
        own_blocks = known.prompt.blocks - answer.cached_tokens // 128
        stack.wait_stored(stored + own_blocks, stack.a)
        hits["cpu"] += _hit(stack.a, known, "cpu")
        hits["shared"] += _hit(stack.b, known, "shared")
    for source, count in hits.items():
        record_property(source, count)
    rounded = sum(known.rounding_differs for known in references.values())
    record_property("prompts whose cold and cached answers differ by rounding", rounded)
    total = len(references)
    missed = max(1, total // 20)
    assert hits["cpu"] >= total - missed, hits
    assert hits["shared"] >= total - missed, hits


def _hit(engine: EngineClient, known: KnownAnswers, source: str) -> bool:
    """Ask until one full hit of `source`; every answer is checked."""
    answer: Answer | None = None
    deadline = time.monotonic() + HIT_SECONDS
    while answer is None or time.monotonic() < deadline:
        engine.reset_prefix_cache(cpu_tier=source == "shared")
        answer = engine.ask(known.prompt.tokens)
        if answer.cached_tokens in known.by_cached_tokens:
            known.check(answer)
        if (answer.source, answer.cached_tokens) == (source, known.prompt.reusable_tokens):
            return True
    return False
