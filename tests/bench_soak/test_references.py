from __future__ import annotations

from soak.asking import ANSWER_TOKENS
from soak.references import Heard, Reference, decided_tokens, heard, noise_of, with_foreign_block
from stack_driver.prompts import BLOCK_TOKENS, make_prompt


def spoken(tokens: list[int], logprobs: list[float], leads: list[float]) -> Heard:
    return Heard(tuple(tokens), tuple(logprobs), tuple(leads), 0)


def test_noise_is_measured_while_the_answers_are_the_same() -> None:
    one = spoken([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0], [1.0] * 4)
    other = spoken([1, 2, 9, 4], [-1.01, -1.02, -5.0, -9.0], [1.0] * 4)
    assert abs(noise_of([one, other]) - 0.02) < 1e-9


def test_decided_up_to_the_first_near_tie_or_difference() -> None:
    one = spoken([1, 2, 3, 4], [-1.0] * 4, [1.0, 1.0, 1.0, 0.001])
    two = spoken([1, 2, 3, 4], [-1.0] * 4, [1.0, 1.0, 0.05, 1.0])
    three = spoken([1, 7, 3, 4], [-1.0] * 4, [1.0] * 4)
    assert decided_tokens([one], 0.1) == (1, 2, 3)
    assert decided_tokens([one, two], 0.1) == (1, 2)
    assert decided_tokens([one, two, three], 0.1) == (1,)


def test_an_answer_must_begin_as_decided_and_be_whole() -> None:
    reference = Reference(make_prompt("p", 2), None, (5, 6, 7), frozenset([0]))
    whole = [5, 6, 7, *range(ANSWER_TOKENS - 3)]
    assert reference.accepts(whole)
    assert not reference.accepts([5, 6, 8, *whole[3:]])
    assert not reference.accepts(whole[:-1])


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
    answer = heard(document)
    assert answer.tokens == (11, 12)
    assert answer.cached_tokens == 256
    assert [round(lead, 3) for lead in answer.leads] == [2.0, 0.1]


def test_a_foreign_block_changes_that_block_alone() -> None:
    prompt = make_prompt("p", 3)
    changed = with_foreign_block(prompt, 1)
    different = [place for place, (ours, its) in enumerate(zip(prompt.tokens, changed, strict=True)) if ours != its]
    assert min(different) >= BLOCK_TOKENS and max(different) < 2 * BLOCK_TOKENS
    assert len(different) > BLOCK_TOKENS * 0.9
