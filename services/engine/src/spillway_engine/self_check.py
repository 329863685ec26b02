"""The check before an engine is ready: does it compute the model that it serves?

Log-probabilities of fixed text are measured through the server's own application (tokenizer, scheduler, kernels,
sampler) and compared with a reference, or with bounds that no healthy model breaks. A greedy answer is no measure:
if two tokens are nearly as likely, rounding decides between them, and a healthy engine answers otherwise.

vLLM reads no prefix cache for a request with `prompt_logprobs`, and a cache salt of its own keeps every request from
meeting the KV of another one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spillway_engine.in_process import Ask, Reply
from spillway_engine.likelihood import (
    Decoded,
    Expected,
    Measured,
    Scored,
    Unmeasurable,
    problem_of,
    read_generated,
    read_scored,
    read_vector,
    shuffled,
    summary,
    vector_problem,
)
from spillway_engine.pod_channel import PodBrief
from spillway_engine.reference_likelihood import REFERENCE_TEXTS, REFERENCES, TEXTS

DECODED_TOKENS = 16
# Greedy, and nothing of a model's generation_config.json, which vLLM takes as defaults.
PLAIN_SAMPLING = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
COMPLETIONS = "/v1/completions"
POOLING_PATHS = ("/v1/embeddings", "/pooling")


class SelfCheckFailed(Exception):
    """The engine's answers are not those of the model that it serves; the message names what to change."""


async def check_ranks(asks: Sequence[Ask], brief: PodBrief) -> str:
    """The check of every data parallel rank, at the same time: those of a mixture of experts step together.

    asks: one for each. Returns what was measured of each, in one sentence. Raises SelfCheckFailed.
    """
    if len(asks) == 1:
        return await run_self_check(asks[0], brief)
    # All of them end, each within its time, before one is judged: no request of a check is left behind.
    found = await asyncio.gather(*(run_self_check(ask, brief) for ask in asks), return_exceptions=True)
    for rank, each in enumerate(found):
        if isinstance(each, SelfCheckFailed):
            raise SelfCheckFailed(f"data parallel rank {rank}: {each}") from each
        if isinstance(each, BaseException):
            raise each
    return "; ".join(f"data parallel rank {rank}: {each}" for rank, each in enumerate(found))


async def run_self_check(ask: Ask, brief: PodBrief) -> str:
    """Returns what was measured, in one sentence. Raises SelfCheckFailed."""
    try:
        async with asyncio.timeout(brief.self_check_timeout_seconds):
            return await _check(ask, brief)
    except TimeoutError as error:
        raise SelfCheckFailed(
            f"no answer within {brief.self_check_timeout_seconds:g} seconds; raise "
            f"{brief.names.name('lifecycle.selfCheckTimeoutSeconds')} when this machine is that slow"
        ) from error


async def _check(ask: Ask, brief: PodBrief) -> str:
    texts = (brief.self_check_text,) if brief.self_check_text else TEXTS
    first = await _score(ask, brief, texts[0])
    if first is None:
        return await _check_pooling(ask, brief, texts[0])
    plain = [first, *[await _score_again(ask, brief, text) for text in texts[1:]]]
    expected = expected_of(brief)
    rest = () if expected.reference is None else REFERENCE_TEXTS[len(texts) :]
    measured = Measured(
        plain=tuple(plain),
        words=tuple([await _score_again(ask, brief, text) for text in rest]),
        again=await _score_again(ask, brief, texts[0]),
        shuffled=tuple([await _score_again(ask, brief, shuffled(text)) for text in texts]),
        decoded=None if brief.generates_logits else await _decode(ask, brief, first),
    )
    problem = problem_of(measured, expected)
    if problem is not None:
        raise SelfCheckFailed(f"{problem}; {_remedy(brief)}")
    return summary(measured, expected)


def expected_of(brief: PodBrief) -> Expected:
    """A configured text has no reference."""
    known = REFERENCES.get(brief.reference) if brief.reference is not None and not brief.self_check_text else None
    return Expected(brief.dtype, brief.quantised_kv, brief.vocabulary, known)


async def _score(ask: Ask, brief: PodBrief, prompt: str | list[int]) -> Scored | None:
    """Score a prompt; None: this server completes no text."""
    reply = await ask(COMPLETIONS, {**_request(brief), "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0})
    if reply.status == 404:
        return None
    shown = prompt if isinstance(prompt, str) else f"{len(prompt)} tokens"
    try:
        return read_scored(shown, _body(COMPLETIONS, reply, brief))
    except Unmeasurable as error:
        raise SelfCheckFailed(f"{COMPLETIONS} answered {shown!r} with {error}; {_remedy(brief)}") from error


async def _score_again(ask: Ask, brief: PodBrief, prompt: str | list[int]) -> Scored:
    scored = await _score(ask, brief, prompt)
    if scored is None:
        raise SelfCheckFailed(f"{COMPLETIONS} answered status 404, after it had answered; {_remedy(brief)}")
    return scored


async def _decode(ask: Ask, brief: PodBrief, scored: Scored) -> Decoded:
    """Continue the first half of a text, then score the same tokens as a prompt: decode against prefill."""
    opening = list(scored.token_ids[: len(scored.token_ids) // 2 + 1])
    request = {**_request(brief), "prompt": opening, "max_tokens": DECODED_TOKENS, "logprobs": 0, "ignore_eos": True}
    body = _body(COMPLETIONS, await ask(COMPLETIONS, request), brief)
    try:
        token_ids, generated = read_generated(body)
    except Unmeasurable as error:
        raise SelfCheckFailed(f"{COMPLETIONS} answered {len(opening)} tokens with {error}; {_remedy(brief)}") from error
    whole = await _score_again(ask, brief, [*opening, *token_ids])
    return Decoded(generated, whole.logprobs[-len(token_ids) :])


async def _check_pooling(ask: Ask, brief: PodBrief, text: str) -> str:
    for path in POOLING_PATHS:
        request = {"model": brief.served_name, "input": text, "cache_salt": uuid.uuid4().hex}
        first = await ask(path, request)
        if first.status == 404:
            continue
        try:
            vectors = [
                read_vector(_body(path, reply, brief))
                for reply in (first, await ask(path, {**request, "cache_salt": uuid.uuid4().hex}))
            ]
        except Unmeasurable as error:
            raise SelfCheckFailed(f"{path} answered {text!r} with {error}; {_remedy(brief)}") from error
        problem = vector_problem(*vectors)
        if problem is not None:
            raise SelfCheckFailed(f"{path} of {text!r}: {problem}; {_remedy(brief)}")
        return f"{path} answered {len(vectors[0])} finite numbers, twice the same"
    return f"nothing measured: neither {COMPLETIONS} nor {' nor '.join(POOLING_PATHS)} is served"


def _request(brief: PodBrief) -> dict[str, Any]:
    return {
        "model": brief.served_name,
        **PLAIN_SAMPLING,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
    }


def _body(path: str, reply: Reply, brief: PodBrief) -> Mapping[str, Any]:
    if reply.status != 200:
        raise SelfCheckFailed(f"{path} answered status {reply.status}: {reply.text[:500]}; {_remedy(brief)}")
    try:
        return reply.json()
    except ValueError as error:
        raise SelfCheckFailed(f"{path} answered no JSON ({error}); {_remedy(brief)}") from error


def _remedy(brief: PodBrief) -> str:
    names = brief.names
    remedies = []
    if not brief.eager:
        remedies.append(f"add --enforce-eager to {names.name('extraArgs')}")
    if brief.dtype != "float32":
        remedies.append(f"set {names.given('model.dtype', 'float32')}")
    if brief.self_check_text or brief.reference is None:
        remedies.append(f"set {names.name('lifecycle.selfCheckText')} to sentences that this model predicts well")
    remedies.append("check the files of the model")
    return (
        f"the engine runs in {brief.dtype}, {'eager' if brief.eager else 'compiled'}; {', or '.join(remedies)}; "
        f"{names.given('lifecycle.selfCheck', 'off')} serves it as it is"
    )
