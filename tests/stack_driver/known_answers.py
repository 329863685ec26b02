"""The right answers to a prompt, one per cached length.

Like is compared with like: on the CPU build a prefill of 800 tokens and one of the last 30 of them round differently
in bfloat16 (other matrix shapes, other blocking), so a greedy answer may differ between a cold run and a hit, on stock
vLLM as well. What must not matter is where the cached blocks came from. Hence the reference for an answer with n cached
tokens is the one that the device's own prefix cache gave with n cached tokens, its blocks computed in the same steps,
and for n = 0 the cold one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .engine_client import Answer, EngineClient
from .prompts import Prompt


@dataclass(slots=True)
class KnownAnswers:
    prompt: Prompt
    by_cached_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, answer: Answer) -> None:
        known = self.by_cached_tokens.setdefault(answer.cached_tokens, answer.tokens)
        assert known == answer.tokens, f"{self.prompt.name}: two references with {answer.cached_tokens} cached tokens"

    def check(self, answer: Answer) -> None:
        """Raises AssertionError when the answer is not the known one of the same cached length."""
        expected = self.by_cached_tokens.get(answer.cached_tokens)
        assert expected is not None, (
            f"{self.prompt.name}: {answer.cached_tokens} tokens were cached, references exist for "
            f"{sorted(self.by_cached_tokens)}; the answer was {answer}"
        )
        assert answer.tokens == expected, (
            f"{self.prompt.name} with {answer.cached_tokens} cached tokens ({answer.source}): {answer.tokens}, "
            f"the reference is {expected}"
        )

    @property
    def rounding_differs(self) -> bool:
        """Do the cold and the cached answer differ, so that a cold reference would have been wrong?"""
        return len(set(self.by_cached_tokens.values())) > 1


def learn(engine: EngineClient, prompt: Prompt) -> KnownAnswers:
    """A cold answer and a device hit. The prompt must be new to the engine and its tiers."""
    known = KnownAnswers(prompt)
    cold = engine.ask(prompt.tokens)
    assert cold.source == "none", f"{prompt.name} is not new here: {cold}"
    hit = engine.ask(prompt.tokens)
    assert (hit.source, hit.cached_tokens) == ("device", prompt.reusable_tokens), f"{prompt.name}: {hit}"
    known.add(cold)
    known.add(hit)
    return known
