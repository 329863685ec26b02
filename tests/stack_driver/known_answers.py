"""The right answers to a prompt, one per cached length.

Answers of equal computations are compared: on the CPU build a prefill of 800 tokens and one of the last 30 of them
round differently in bfloat16 (other matrix shapes, other blocking), so log-probabilities differ between a cold run and
a hit, on stock vLLM as well. What must not matter is where the cached blocks came from. Hence the reference for an
answer with n cached tokens is the one that the device's own prefix cache gave with n cached tokens, its blocks computed
in the same steps, and for n = 0 the cold one. Two answers are the same by reference_answers.margins: nothing rests on a
near tie.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reference_answers.margins import ROUNDING_OF_EQUALS, Scored, difference

from .engine_client import Answer, EngineClient
from .prompts import Prompt


@dataclass(slots=True)
class KnownAnswers:
    prompt: Prompt
    by_cached_tokens: dict[int, Scored] = field(default_factory=dict)

    def add(self, answer: Answer) -> None:
        reference = self.by_cached_tokens.setdefault(answer.cached_tokens, answer.scored)
        wrong = difference(reference, answer.scored, ROUNDING_OF_EQUALS)
        assert wrong is None, f"{self.prompt.name}: two references with {answer.cached_tokens} cached tokens: {wrong}"

    def check(self, answer: Answer) -> None:
        """Raises AssertionError when the answer differs from the reference of the same cached length."""
        expected = self.by_cached_tokens.get(answer.cached_tokens)
        assert expected is not None, (
            f"{self.prompt.name}: {answer.cached_tokens} tokens were cached, references exist for "
            f"{sorted(self.by_cached_tokens)}; the answer was {answer}"
        )
        wrong = difference(expected, answer.scored, ROUNDING_OF_EQUALS)
        assert wrong is None, (
            f"{self.prompt.name} with {answer.cached_tokens} cached tokens ({answer.source}): {wrong}; "
            f"{answer.scored.tokens}, the reference is {expected.tokens}"
        )

    @property
    def rounding_differs(self) -> bool:
        """Whether the cold and the cached answer have different tokens."""
        return len({answer.tokens for answer in self.by_cached_tokens.values()}) > 1


def compute_references(engine: EngineClient, prompt: Prompt) -> KnownAnswers:
    """A cold answer and a device hit. The prompt must be new to the engine and its tiers."""
    answers = KnownAnswers(prompt)
    cold = engine.ask(prompt.tokens)
    assert cold.source == "none", f"{prompt.name} is not new here: {cold}"
    hit = engine.ask(prompt.tokens)
    assert (hit.source, hit.cached_tokens) == ("device", prompt.reusable_tokens), f"{prompt.name}: {hit}"
    answers.add(cold)
    answers.add(hit)
    return answers
