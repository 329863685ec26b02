"""Log-probabilities of fixed text, and the bounds that every healthy engine keeps. Pure: replies in, problems out.

All values are natural logarithms (nats). A mean negative log-likelihood is taken over the tokens of a text except the
first one, which has nothing before it to be predicted from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillway_engine.reference_likelihood import Reference

# What rounding may move: a text's mean from the reference, and the mean of all tokens' distances from it (per token).
# Measured at most, with SmolLM2-135M-Instruct: bfloat16 0.046 (a mean, AMX) and 0.060 (tokens), float16 0.009, float32
# below 0.0001; docs/reliability.md lists them.
ROUNDING_NATS = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.15}
# A quantised KV cache rounds keys and values to 8 bits or fewer on top of it: tokens 0.19 (e4m3), 0.35 (e5m2), and in
# vLLM 0.24 (fp8).
QUANTISED_KV_NATS = 0.6
# A uniform distribution costs ln(vocabulary) per token. SmolLM2-135M: 2.4 of 10.8 for plain sentences.
SHARE_OF_UNIFORM_MAX = 0.5
# Plain sentences against their own words shuffled. SmolLM2-135M: 2.4 against 7.8.
SHUFFLED_MARGIN_NATS = 1.0
# Relative distance of two embeddings of one text.
EMBEDDING_DISTANCE_MAX = 0.02

# Fewer words than this are taken as one of the scripts that put no spaces between them: characters are shuffled then.
WORDS_MIN = 8

QUOTED_CHARACTERS = 40  # of a text in a message


class Unmeasurable(Exception):
    """A reply lacks what was requested; the text names it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One text with the log-probability of each of its tokens given those before it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of token_ids[1:]

    @property
    def mean_nll(self) -> float:
        return -math.fsum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Generated tokens: log-probabilities as they were generated, and of the same tokens as part of a prompt."""

    generated: tuple[float, ...]
    as_prompt: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    plain: tuple[Scored, ...]
    words: tuple[Scored, ...]  # the rest of REFERENCE_TEXTS; empty: the model has no reference
    again: Scored  # plain[0] once more
    shuffled: tuple[Scored, ...]
    decoded: Decoded | None  # None: the engine shows no log-probabilities of generated tokens


@dataclass(frozen=True, slots=True)
class Expected:
    """The settings of the engine that decide how a healthy one answers."""

    dtype: str
    quantised_kv: bool
    vocabulary: int | None  # tokens; None: not known, so that nothing is compared with the uniform distribution
    reference: Reference | None

    @property
    def rounding_nats(self) -> float:
        nats = ROUNDING_NATS.get(self.dtype, max(ROUNDING_NATS.values()))
        return max(nats, QUANTISED_KV_NATS) if self.quantised_kv else nats


def shuffled(text: str) -> str:
    """The same words in another order, the same one each time; characters if there are few words, as in Chinese."""
    words = text.split()
    units, space = (words, " ") if len(words) >= WORDS_MIN else (list(text.strip()), "")
    random.Random(0).shuffle(units)  # noqa: S311  a fixed order, no secret
    return space.join(units)


def read_scored(text: str, body: Mapping[str, Any]) -> Scored:
    """A reply of /v1/completions with `prompt_logprobs`. Raises Unmeasurable."""
    try:
        choice = body["choices"][0]
        token_ids = tuple(int(token) for token in choice["prompt_token_ids"])
        rows = choice["prompt_logprobs"][1:]
        logprobs = tuple(_number(row[str(token)]["logprob"]) for token, row in zip(token_ids[1:], rows, strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unmeasurable(f"no log-probabilities of its prompt ({type(error).__name__}: {error})") from error
    if not logprobs:
        raise Unmeasurable("one token, which nothing comes before")
    return Scored(text, token_ids, logprobs)


def read_generated(body: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and log-probabilities of what /v1/completions generated. Raises Unmeasurable."""
    try:
        choice = body["choices"][0]
        token_ids = tuple(int(token) for token in choice["token_ids"])
        logprobs = tuple(_number(value) for value in choice["logprobs"]["token_logprobs"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unmeasurable(f"no log-probabilities of its tokens ({type(error).__name__}: {error})") from error
    if not token_ids or len(token_ids) != len(logprobs):
        raise Unmeasurable(f"{len(token_ids)} tokens and {len(logprobs)} log-probabilities")
    return token_ids, logprobs


def read_vector(body: Mapping[str, Any]) -> tuple[float, ...]:
    """Every number of the first item of /v1/embeddings or /pooling, in order. Raises Unmeasurable."""
    try:
        item = body["data"][0]
        vector = tuple(_flattened(item["embedding"] if "embedding" in item else item["data"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unmeasurable(f"no numbers ({type(error).__name__}: {error})") from error
    if not vector:
        raise Unmeasurable("no numbers")
    return vector


def problem_of(measured: Measured, expected: Expected) -> str | None:
    """Return the fault of the measured likelihoods against the expected ones; None: there is none."""
    for scored in (*measured.plain, *measured.words, measured.again, *measured.shuffled):
        if not all(map(math.isfinite, scored.logprobs)):
            return f"log-probabilities of {_quoted(scored.text)} are not finite: {_shown(scored.logprobs)}"
    return (
        _reference_problem((*measured.plain, *measured.words), expected)
        or _repetition_problem(measured, expected)
        or _uniform_problem(measured.plain, expected)
        or _shuffled_problem(measured)
        or (_decode_problem(measured.decoded, expected) if measured.decoded is not None else None)
    )


def vector_problem(first: Sequence[float], second: Sequence[float]) -> str | None:
    """The same for a pooling model, whose numbers have no scale of their own."""
    if not all(map(math.isfinite, (*first, *second))):
        return "its numbers are not finite"
    if not any(first):
        return "all its numbers are zero"
    distance = _distance(first, second)
    if distance > EMBEDDING_DISTANCE_MAX:
        return (
            f"two answers to one text are {distance:.3g} of their length apart, at most {EMBEDDING_DISTANCE_MAX:g} "
            "are expected"
        )
    return None


def summary(measured: Measured, expected: Expected) -> str:
    """Describe a healthy start for the log."""
    texts = (*measured.plain, *measured.words)
    parts = [
        f"mean negative log-likelihood {_means(texts)} (shuffled: {_means(measured.shuffled)})",
        "decode steps not compared"
        if measured.decoded is None
        else f"decode steps within {decode_difference(measured.decoded):.4f}",
    ]
    if expected.reference is not None:
        parts.append(f"tokens within {token_difference(texts, expected.reference):.4f} of the reference")
    return ", ".join(parts)


def _means(texts: Sequence[Scored]) -> str:
    return ", ".join(f"{scored.mean_nll:.4f}" for scored in texts)


def token_difference(texts: Sequence[Scored], reference: Reference) -> float:
    """Mean over all tokens of |log-probability - the reference's|."""
    pairs = [
        abs(ours - theirs)
        for scored, text in zip(texts, reference.texts, strict=True)
        for ours, theirs in zip(scored.logprobs, text.logprobs, strict=True)
    ]
    return math.fsum(pairs) / len(pairs)


def decode_difference(decoded: Decoded) -> float:
    """Mean over the generated tokens of |log-probability as generated - as prompt|."""
    pairs = [abs(one - other) for one, other in zip(decoded.generated, decoded.as_prompt, strict=True)]
    return math.fsum(pairs) / len(pairs)


def _reference_problem(texts: Sequence[Scored], expected: Expected) -> str | None:
    reference, allowed = expected.reference, expected.rounding_nats
    if reference is None:
        return None
    for scored, text in zip(texts, reference.texts, strict=True):
        if scored.token_ids != text.token_ids:
            return (
                f"{_quoted(scored.text)} has the tokens {_shown(scored.token_ids)}, {_shown(text.token_ids)} are "
                f"expected of {reference.model}"
            )
        if not abs(scored.mean_nll - text.mean_nll) <= allowed:
            return (
                f"the mean negative log-likelihood of {_quoted(scored.text)} is {scored.mean_nll:.3f}, "
                f"{text.mean_nll:.3f} +- {allowed:g} is expected of {reference.model} in {expected.dtype}"
            )
    difference = token_difference(texts, reference)
    if not difference <= allowed:
        return (
            f"log-probabilities of the texts' tokens differ from those of {reference.model} by {difference:.3f} on "
            f"average, at most {allowed:g} is expected in {expected.dtype}"
        )
    return None


def _repetition_problem(measured: Measured, expected: Expected) -> str | None:
    first, again, allowed = measured.plain[0], measured.again, expected.rounding_nats
    if first.token_ids == again.token_ids and abs(first.mean_nll - again.mean_nll) <= allowed:
        return None
    return (
        f"the mean negative log-likelihood of {_quoted(first.text)} is {first.mean_nll:.3f} and then "
        f"{again.mean_nll:.3f}, the same within {allowed:g} is expected"
    )


def _uniform_problem(plain: Sequence[Scored], expected: Expected) -> str | None:
    if expected.vocabulary is None:
        return None
    uniform, cost = math.log(expected.vocabulary), _mean_nll(plain)
    if cost <= SHARE_OF_UNIFORM_MAX * uniform:
        return None
    return (
        f"the mean negative log-likelihood of plain sentences is {cost:.3f}, at most "
        f"{SHARE_OF_UNIFORM_MAX * uniform:.3f} is expected of a model trained on their language (all "
        f"{expected.vocabulary} tokens equally likely: {uniform:.3f})"
    )


def _shuffled_problem(measured: Measured) -> str | None:
    plain, jumbled = _mean_nll(measured.plain), _mean_nll(measured.shuffled)
    if jumbled - plain >= SHUFFLED_MARGIN_NATS:
        return None
    return (
        f"the mean negative log-likelihood of plain sentences is {plain:.3f} and of their words shuffled "
        f"{jumbled:.3f}, at least {SHUFFLED_MARGIN_NATS:g} more is expected"
    )


def _decode_problem(decoded: Decoded, expected: Expected) -> str | None:
    if not all(map(math.isfinite, (*decoded.generated, *decoded.as_prompt))):
        return f"log-probabilities of generated tokens are not finite: {_shown(decoded.generated)}"
    difference, allowed = decode_difference(decoded), expected.rounding_nats
    if difference <= allowed:
        return None
    return (
        f"log-probabilities of {len(decoded.generated)} generated tokens differ by {difference:.3f} on average from "
        f"those of the same tokens in a prompt, at most {allowed:g} is expected in {expected.dtype}"
    )


def _mean_nll(texts: Sequence[Scored]) -> float:
    return -math.fsum(value for text in texts for value in text.logprobs) / sum(len(text.logprobs) for text in texts)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) != len(second):
        return math.inf
    return math.dist(first, second) / max(math.hypot(*first), math.hypot(*second))


def _number(value: Any) -> float:
    """JSON has no NaN: a server writes null or the word."""
    return math.nan if value is None else float(value)


def _flattened(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flattened(item)]
    return [_number(value)]


def _quoted(text: str) -> str:
    return repr(text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}...")


def _shown(values: Sequence[float]) -> str:
    head = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:6])
    return f"{head}, ..." if len(values) > 6 else head
