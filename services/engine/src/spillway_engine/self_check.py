"""One greedy question before the pod says that it is ready.

A wrong pair of dtype and kernels does not fail, it answers fluently and wrongly: on AVX2 cores a compiled bfloat16
graph answered "L'Etoile, la Marseillaise" to the capital of France. The question goes through the server's own
application, so the whole path is checked: template, scheduler, kernels, sampler, detokeniser.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from spillway_engine.in_flight import AsgiApp, Message, Scope
from spillway_engine.pod_channel import PodBrief

QUESTION = "What is the capital of France?"
OPENING = "The capital of France is the city of"
ANSWER_TOKENS = 12

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]  # (path, request body) -> response body


class SelfCheckFailed(Exception):
    """The engine answers, but not like the model it claims to be; the text says what to change."""


async def run_self_check(ask: Ask, brief: PodBrief) -> str:
    """Returns the answer that passed. Raises SelfCheckFailed."""
    try:
        async with asyncio.timeout(brief.self_check_timeout_seconds):
            if brief.expected_answer is not None:
                return await _check_known_answer(ask, brief, brief.expected_answer)
            return await _check_sanity(ask, brief)
    except TimeoutError as error:
        raise SelfCheckFailed(
            f"no answer within {brief.self_check_timeout_seconds:g} seconds; raise "
            f"{brief.door.name('lifecycle.selfCheckTimeoutSeconds')} when this machine is that slow"
        ) from error


async def _check_known_answer(ask: Ask, brief: PodBrief, expected: str) -> str:
    answer = await ask(
        "/v1/chat/completions",
        {
            "model": brief.served_name,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_completion_tokens": ANSWER_TOKENS,
            "temperature": 0,
        },
    )
    text = str(answer["choices"][0]["message"]["content"])
    if expected.lower() not in text.lower():
        raise SelfCheckFailed(f"{QUESTION!r} was answered {text!r}, which lacks {expected!r}; {_remedy(brief)}")
    return text


async def _check_sanity(ask: Ask, brief: PodBrief) -> str:
    request = {
        "model": brief.served_name,
        "prompt": OPENING,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 1,
    }
    first, second = await ask("/v1/completions", request), await ask("/v1/completions", request)
    choice, again = first["choices"][0], second["choices"][0]
    logprobs = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
    tokens = choice["logprobs"]["tokens"]
    if not logprobs or not all(math.isfinite(value) for value in logprobs):
        raise SelfCheckFailed(f"log probabilities of {OPENING!r} are not finite: {logprobs}; {_remedy(brief)}")
    if choice["text"] != again["text"]:
        raise SelfCheckFailed(
            f"{OPENING!r} was continued greedily as {choice['text']!r} and then as {again['text']!r}; {_remedy(brief)}"
        )
    if len(tokens) >= ANSWER_TOKENS and len(set(tokens)) == 1:
        raise SelfCheckFailed(f"{OPENING!r} was continued with {tokens[0]!r} alone; {_remedy(brief)}")
    return str(choice["text"])


def _remedy(brief: PodBrief) -> str:
    door = brief.door
    running = f"it runs in {brief.dtype}, {'eager' if brief.eager else 'compiled'}"
    changes = []
    if not brief.eager:
        changes.append(f"add --enforce-eager to {door.name('extraArgs')}")
    if brief.dtype != "float32":
        changes.append(f"set {door.given('model.dtype', 'float32')}")
    return f"{running}; {' or '.join(changes) if changes else 'check the files of the model'}"


def ask_through(app: AsgiApp, lifespan_scope: Mapping[str, Any]) -> Ask:
    """An `Ask` that calls the ASGI application in process; the port need not be open yet."""

    async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        payload = json.dumps(body).encode()
        inbox: list[Message] = [{"type": "http.request", "body": payload, "more_body": False}]
        never = asyncio.Event()
        status = 0
        parts: list[bytes] = []

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await never.wait()  # the caller never disconnects
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            elif message["type"] == "http.response.body":
                parts.append(bytes(message.get("body", b"")))

        await app(_request_scope(path, len(payload), lifespan_scope), receive, send)
        text = b"".join(parts).decode(errors="replace")
        if status != 200:
            raise SelfCheckFailed(f"{path} answered status {status}: {text[:500]}")
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer

    return ask


def _request_scope(path: str, length: int, lifespan_scope: Mapping[str, Any]) -> Scope:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    api_key = _own_api_key(sys.argv, os.environ)
    if api_key:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        **{key: lifespan_scope[key] for key in ("app", "state") if key in lifespan_scope},
    }


def _own_api_key(arguments: list[str], environment: Mapping[str, str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == "--api-key" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("--api-key="):
            return argument.partition("=")[2]
    return environment.get("VLLM_API_KEY")
