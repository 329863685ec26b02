"""The bounds alone: what a known model may differ from its reference, and how words are shuffled."""

import dataclasses
from collections.abc import Callable

import pytest

from spillway_engine.likelihood import (
    ROUNDING_NATS,
    Decoded,
    Expected,
    Measured,
    Scored,
    problem_of,
    shuffled,
    token_difference,
)
from spillway_engine.reference_likelihood import REFERENCE_TEXTS, REFERENCES, TEXTS

(REFERENCE,) = REFERENCES.values()
EXPECTED = Expected("bfloat16", quantised_kv=False, vocabulary=49_152, reference=REFERENCE)


def scored(move: Callable[[int, float], float]) -> tuple[Scored, ...]:
    """The reference with every log-probability moved: (index, value) -> value."""
    return tuple(
        Scored(text, known.token_ids, tuple(move(index, value) for index, value in enumerate(known.logprobs)))
        for text, known in zip(REFERENCE_TEXTS, REFERENCE.texts, strict=True)
    )


def problem(plain: tuple[Scored, ...], expected: Expected = EXPECTED) -> str | None:
    nonsense = tuple(dataclasses.replace(text, logprobs=tuple(-9.0 for _ in text.logprobs)) for text in plain)
    return problem_of(Measured(plain[:2], plain[2:], plain[0], nonsense, Decoded((-1.0,), (-1.0,))), expected)


def test_the_reference_itself_is_healthy_in_every_dtype() -> None:
    for dtype in ROUNDING_NATS:
        assert problem(scored(lambda _, value: value), dataclasses.replace(EXPECTED, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", ROUNDING_NATS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_mean_may_move_by_what_the_dtype_rounds(dtype: str, sign: int) -> None:
    expected, allowed = dataclasses.replace(EXPECTED, dtype=dtype), ROUNDING_NATS[dtype]

    assert problem(scored(lambda _, value: value + sign * 0.9 * allowed), expected) is None
    message = problem(scored(lambda _, value: value + sign * 1.1 * allowed), expected)
    assert message is not None and f"1.302 +- {allowed:g} is expected of SmolLM2-135M-Instruct in {dtype}" in message


def test_tokens_may_not_move_to_and_fro_under_an_unmoved_mean() -> None:
    """Two layers swapped in the middle of the model: the mean moves by hundredths, every token by more."""
    message = problem(scored(lambda index, value: value + (0.2 if index % 2 else -0.2)))

    assert (
        message is not None
        and "differ from those of SmolLM2-135M-Instruct by 0.200 on average, at most 0.15" in message
    )


def test_a_dtype_nobody_measured_is_allowed_what_the_coarsest_is() -> None:
    assert problem(scored(lambda _, value: value + 0.14), dataclasses.replace(EXPECTED, dtype="float8")) is None


def test_other_tokens_are_another_tokenizer() -> None:
    plain = scored(lambda _, value: value)
    other = dataclasses.replace(plain[1], token_ids=(1, *plain[1].token_ids[1:]))

    assert "has the tokens 1, 36411, 418" in (problem((plain[0], other, plain[2])) or "")


def test_without_a_vocabulary_nothing_is_compared_with_the_uniform_distribution() -> None:
    dear = scored(lambda _index, _value: -7.5)

    assert "at most 5.401" in (problem(dear, dataclasses.replace(EXPECTED, reference=None)) or "")
    assert problem(dear, dataclasses.replace(EXPECTED, reference=None, vocabulary=None)) is None


def test_the_token_difference_is_a_mean_over_all_texts() -> None:
    one_moved = scored(lambda index, value: value + (3.4 if index == 0 else 0.0))

    assert token_difference(one_moved, REFERENCE) == pytest.approx(3 * 3.4 / 95)


@pytest.mark.parametrize("text", [*TEXTS, "水在一百摄氏度沸腾。法国的首都是巴黎。"])
def test_shuffling_keeps_the_words_and_not_their_order(text: str) -> None:
    nonsense = shuffled(text)

    assert nonsense != text and nonsense == shuffled(text)
    assert sorted(nonsense.split()) == sorted(text.split()) if " " in text else sorted(nonsense) == sorted(text)


def test_a_message_quotes_the_beginning_of_a_long_text() -> None:
    message = problem(scored(lambda _, value: value - 1.0))

    assert message is not None and message.startswith(
        "the mean negative log-likelihood of 'The capital of France is Paris. The capi...' is 2.302, 1.302 +- 0.15"
    )
