"""The check against a scripted model: what it asks, and what it refuses with which words."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from spillway_connector.setting_names import SettingNames
from spillway_engine.in_process import Ask, Reply
from spillway_engine.pod_channel import PodBrief
from spillway_engine.reference_likelihood import REFERENCE_TEXTS, REFERENCES, TEXTS
from spillway_engine.self_check import DECODED_TOKENS, SelfCheckFailed, run_self_check

KNOWN = "smollm2-135m-instruct-b179c9523d0e-2"
UNKNOWN_MODEL = PodBrief(served_name="m", dtype="bfloat16", eager=True, vocabulary=50_000)
MAKE = SettingNames(
    others="ENGINE_SET={path}", separator="=", names={"model.dtype": "DTYPE", "lifecycle.selfCheck": "SELF_CHECK"}
)


def replies(model: Any) -> Ask:
    async def ask(path: str, body: Mapping[str, Any]) -> Reply:
        assert path == "/v1/completions"
        return Reply(200, json.dumps(model.complete(body)))

    return ask


def brief(**fields: Any) -> PodBrief:
    return PodBrief(**{**{name: getattr(UNKNOWN_MODEL, name) for name in UNKNOWN_MODEL.__slots__}, **fields})


async def refusal(ask: Ask, pod_brief: PodBrief = UNKNOWN_MODEL) -> str:
    with pytest.raises(SelfCheckFailed) as refused:
        await run_self_check(ask, pod_brief)
    return str(refused.value)


async def test_a_healthy_model_passes_and_the_log_has_its_figures(bigram_model: Callable[..., Any]) -> None:
    report = await run_self_check(replies(bigram_model()), UNKNOWN_MODEL)

    assert (
        report == "mean negative log-likelihood 1.0000, 1.0000 (shuffled: 6.3529, 6.2500), decode steps within 0.0000"
    )


async def test_every_request_is_greedy_and_meets_no_cached_prefix(bigram_model: Callable[..., Any]) -> None:
    model = bigram_model()
    await run_self_check(replies(model), UNKNOWN_MODEL)

    assert len({request["cache_salt"] for request in model.requests}) == len(model.requests)
    assert {(request["temperature"], request["repetition_penalty"]) for request in model.requests} == {(0, 1)}
    assert [request["prompt"] for request in model.requests[:3]] == [TEXTS[0], TEXTS[1], TEXTS[0]]


async def test_decode_steps_are_scored_again_as_a_prompt(bigram_model: Callable[..., Any]) -> None:
    model = bigram_model()
    await run_self_check(replies(model), UNKNOWN_MODEL)
    (decode,) = [request for request in model.requests if request.get("logprobs") is not None]
    again = model.requests[model.requests.index(decode) + 1]

    assert decode["max_tokens"] == DECODED_TOKENS and "prompt_logprobs" not in decode
    assert again["prompt"][: len(decode["prompt"])] == decode["prompt"]
    assert len(again["prompt"]) == len(decode["prompt"]) + DECODED_TOKENS


@pytest.mark.parametrize(
    ("broken", "report"),
    [
        (
            {"plain_nats": 10.0, "shuffled_nats": 11.0},
            "plain sentences is 10.000, at most 5.410 is expected of a model",
        ),
        ({"shuffled_nats": 1.5}, "plain sentences is 1.000 and of their words shuffled 1.379, at least 1 more"),
        ({"decode_error_nats": 0.2}, "16 generated tokens differ by 0.200 on average"),
        ({"drift_nats": 0.1}, "is 1.100 and then 1.300, the same within 0.15 is expected"),
        ({"last_logprob": math.nan}, "are not finite: -1, -1, -1, -1, -1, -1, ..."),
        ({"last_logprob": -math.inf}, "are not finite"),
    ],
)
async def test_what_no_healthy_model_does_is_refused(
    bigram_model: Callable[..., Any], broken: dict[str, float], report: str
) -> None:
    assert report in await refusal(replies(bigram_model(**broken)))


async def test_rounding_of_the_dtype_is_no_reason(bigram_model: Callable[..., Any]) -> None:
    slightly_off = replies(bigram_model(decode_error_nats=0.1))

    await run_self_check(slightly_off, UNKNOWN_MODEL)
    assert "at most 0.01 is expected in float32" in await refusal(slightly_off, brief(dtype="float32"))


async def test_a_quantised_kv_cache_rounds_more(bigram_model: Callable[..., Any]) -> None:
    slightly_off = replies(bigram_model(decode_error_nats=0.2))

    await run_self_check(slightly_off, brief(quantised_kv=True))


async def test_logits_are_not_compared(bigram_model: Callable[..., Any]) -> None:
    model = bigram_model(decode_error_nats=50.0)

    assert "decode steps not compared" in await run_self_check(replies(model), brief(generates_logits=True))


async def test_a_known_model_must_answer_as_it_did_in_float32(bigram_model: Callable[..., Any]) -> None:
    pod_brief = brief(reference=KNOWN)

    assert "has the tokens 0, 1, 2, 3, 4, 5, ..., 504, 3575, 282, 4649, 314, 7042, ... are expected" in await refusal(
        replies(bigram_model()), pod_brief
    )


class KnownModel:
    """Answers the texts of the reference like the reference, all others with seven nats a token."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.texts = dict(zip(REFERENCE_TEXTS, REFERENCES[KNOWN].texts, strict=True))

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        self.asked.append(prompt)
        known = self.texts.get(prompt) if isinstance(prompt, str) else None
        token_ids = known.token_ids if known else prompt if isinstance(prompt, list) else range(len(prompt.split()))
        logprobs = known.logprobs if known else [-7.0] * (len(token_ids) - 1)
        return {
            "choices": [
                {
                    "prompt_token_ids": list(token_ids),
                    "prompt_logprobs": [None, *({str(t): {"logprob": v}} for t, v in zip(token_ids[1:], logprobs))],
                    "token_ids": [5] * request["max_tokens"],
                    "logprobs": {"token_logprobs": [-7.0] * request["max_tokens"]},
                }
            ]
        }


async def test_a_known_model_is_compared_on_every_text_of_its_reference() -> None:
    model = KnownModel()
    report = await run_self_check(replies(model), brief(dtype="float32", reference=KNOWN))

    assert report == (
        "mean negative log-likelihood 1.3016, 3.9575, 6.0390 (shuffled: 7.0000, 7.0000), decode steps within 0.0000, "
        "tokens within 0.0000 of the reference"
    )
    assert set(REFERENCE_TEXTS) <= {prompt for prompt in model.asked if isinstance(prompt, str)}


async def test_a_known_model_is_refused_for_the_words_that_only_it_is_asked() -> None:
    model = KnownModel()
    words = model.texts[REFERENCE_TEXTS[-1]]
    model.texts[REFERENCE_TEXTS[-1]] = dataclasses.replace(
        words, logprobs=tuple(value + (0.3 if index % 2 else -0.3) for index, value in enumerate(words.logprobs))
    )

    assert "differ from those of SmolLM2-135M-Instruct by 0.193 on average" in await refusal(
        replies(model), brief(reference=KNOWN)
    )


async def test_a_text_of_ones_own_is_measured_instead(bigram_model: Callable[..., Any]) -> None:
    model = bigram_model()
    pod_brief = brief(self_check_text=TEXTS[1], reference=KNOWN)

    await run_self_check(replies(model), pod_brief)
    assert not any(request["prompt"] == TEXTS[0] for request in model.requests)


async def test_a_refusal_ends_with_what_to_change_at_this_door(bigram_model: Callable[..., Any]) -> None:
    broken = replies(bigram_model(decode_error_nats=9.0))

    assert (await refusal(broken)).endswith(
        "; the engine runs in bfloat16, eager; set model.dtype: float32, or set lifecycle.selfCheckText to sentences "
        "that this model predicts well, or check the files of the model; lifecycle.selfCheck: off serves it as it is"
    )
    assert (await refusal(broken, brief(names=MAKE, eager=False))).endswith(
        "; the engine runs in bfloat16, compiled; add --enforce-eager to ENGINE_SET=extraArgs, or set DTYPE=float32, "
        "or set ENGINE_SET=lifecycle.selfCheckText to sentences that this model predicts well, or check the files of "
        "the model; SELF_CHECK=off serves it as it is"
    )


@pytest.mark.parametrize(
    ("reply", "report"),
    [
        (Reply(500, "broken"), "/v1/completions answered status 500: broken; the engine runs"),
        (Reply(200, "<html>"), "/v1/completions answered no JSON"),
        (Reply(200, '{"choices": []}'), "with no log-probabilities of its prompt (IndexError"),
        (
            Reply(200, '{"choices": [{"prompt_token_ids": [1], "prompt_logprobs": [null]}]}'),
            "with one token, which nothing comes before",
        ),
    ],
)
async def test_a_reply_that_is_none_is_refused(reply: Reply, report: str) -> None:
    async def ask(_path: str, _body: Mapping[str, Any]) -> Reply:
        return reply

    assert report in await refusal(ask)


async def test_an_engine_that_never_answers_is_refused_in_time() -> None:
    async def ask(_path: str, _body: Mapping[str, Any]) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    pod_brief = brief(self_check_timeout_seconds=0.01)

    assert "no answer within 0.01 seconds; raise lifecycle.selfCheckTimeoutSeconds" in await refusal(ask, pod_brief)


def pooling(*vectors: Any, path: str = "/v1/embeddings") -> Ask:
    """Serves `path` alone; one vector per request."""
    left = list(vectors)

    async def ask(asked: str, _body: Mapping[str, Any]) -> Reply:
        if asked != path:
            return Reply(404, '{"error": {"message": "Not Found"}}')
        return Reply(200, json.dumps({"data": [{"embedding" if path == "/v1/embeddings" else "data": left.pop(0)}]}))

    return ask


@pytest.mark.parametrize(
    ("ask", "report"),
    [
        (pooling([1.0, 2.0], [1.0, 2.001]), "/v1/embeddings answered 2 finite numbers, twice the same"),
        (pooling([[1.0], [2.0]], [[1.0], [2.0]], path="/pooling"), "/pooling answered 2 finite numbers"),
        (pooling(path="/transcriptions"), "nothing measured: neither /v1/completions nor /v1/embeddings nor /pooling"),
    ],
)
async def test_a_pooling_model_is_asked_twice(ask: Ask, report: str) -> None:
    assert report in await run_self_check(ask, UNKNOWN_MODEL)


@pytest.mark.parametrize(
    ("ask", "report"),
    [
        (pooling([1.0, None], [1.0, 2.0]), "its numbers are not finite"),
        (pooling([0.0, 0.0], [0.0, 0.0]), "all its numbers are zero"),
        (pooling([1.0, 2.0], [2.0, 1.0]), "two answers to one text are 0.632 of their length apart, at most 0.02"),
        (pooling([], []), "with no numbers"),
    ],
)
async def test_a_broken_pooling_model_is_refused(ask: Ask, report: str) -> None:
    assert report in await refusal(ask)
