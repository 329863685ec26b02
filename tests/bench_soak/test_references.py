from __future__ import annotations

import pytest
from reference_answers.margins import ROUNDING, Scored
from soak.asking import ANSWER_TOKENS
from soak.references import Answer, NotDecisive, Reference, answer_of, learn_pool, noise_of, with_foreign_block
from stack_driver.prompts import BLOCK_TOKENS, make_prompt


def answer_with(*positions: tuple[int, float]) -> Answer:
    """(token, its log-probability); the runner-up is far behind."""
    return Answer(Scored(tuple(token for token, _ in positions), tuple({at: p, 0: -6.0} for at, p in positions)), 0)


def test_noise_is_measured_while_the_answers_are_the_same() -> None:
    one = answer_with((1, -1.0), (2, -1.0), (3, -1.0), (4, -1.0))
    other = answer_with((1, -1.01), (2, -1.02), (9, -5.0), (4, -9.0))
    assert abs(noise_of([one, other]) - 0.02) < 1e-9


def test_an_answer_may_move_by_rounding_and_no_further() -> None:
    reference = Reference(make_prompt("p", 2), None, answer_with((5, -0.5), (6, -0.5)).scored, 0.1, frozenset([0]))
    assert reference.fault(answer_with((5, -0.55), (6, -0.45)).scored) is None
    assert "token 2" in str(reference.fault(answer_with((5, -0.5), (6, -0.7)).scored))
    assert "token 2" in str(reference.fault(answer_with((5, -0.5), (7, -0.5)).scored))
    assert reference.fault(answer_with((5, -0.5)).scored) is not None


class NoisyEngine:
    """Each answer moves by `noise`, in turns up and down."""

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def clear_cache(self) -> None:
        return

    def ask(self, tokens: tuple[int, ...]) -> Answer:
        self._noise = -self._noise
        first, logprob = sum(tokens) % 1000 + 1, -1.0 + self._noise / 2
        return answer_with(*((first + place, logprob) for place in range(ANSWER_TOKENS)))


def test_rounding_that_hides_what_wrong_kv_does_is_refused() -> None:
    quiet = learn_pool(NoisyEngine(0.01), 8, seed=1)
    assert len(quiet.references) == 8 and quiet.sensitive_prompts == 8
    assert all(abs(reference.rounding - 0.08) < 1e-6 for reference in quiet.references)
    with pytest.raises(NotDecisive, match="run with --dtype float32"):
        learn_pool(NoisyEngine(0.6 * ROUNDING), 8, seed=1)


def test_reads_vllms_document() -> None:
    document = {
        "choices": [
            {
                "token_ids": [11, 12],
                "logprobs": {
                    "token_logprobs": [-0.5, -0.7],
                    "top_logprobs": [
                        {"token_id:11": -0.5, "token_id:3": -2.5},
                        {"token_id:12": -0.7, "token_id:4": -0.8},
                    ],
                },
            }
        ],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 256}},
    }
    answer = answer_of(document)
    assert answer.scored.tokens == (11, 12)
    assert answer.cached_tokens == 256


def test_a_foreign_block_changes_that_block_alone() -> None:
    prompt = make_prompt("p", 3)
    changed = with_foreign_block(prompt, 1)
    different = [place for place, (ours, its) in enumerate(zip(prompt.tokens, changed, strict=True)) if ours != its]
    assert min(different) >= BLOCK_TOKENS and max(different) < 2 * BLOCK_TOKENS
    assert len(different) > BLOCK_TOKENS * 0.9
