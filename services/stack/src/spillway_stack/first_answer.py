"""The last step of `up`: one greedy chat answer through the gateway, streamed and plain, which must agree.

No particular word is expected: rounding decides between two equally likely tokens, and differs between CPUs.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spillway_settings.wire import ENGINE_HEADER
from spillway_stack.chat_answers import ChatAnswer, plain_answer, require_agreement, streamed_answer
from spillway_stack.errors import StackError

# The bundled model's answer has no near tie (tests/reference_answers), so that both answers have the same text.
QUESTION = "Name the capital of France."
ANSWER_TOKENS = 16
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    text: str
    engine: str
    first_token_seconds: float


def check_first_answer(port: int, model: str, bundled: bool) -> FirstAnswer:
    """Raises StackError when an answer is not well-formed, or when the two differ in what must be the same."""
    streamed, engine, first_token_seconds = _ask_streamed(port, model)
    plain = _ask_plain(port, model)
    require_agreement(streamed, plain, same_text=bundled)
    return FirstAnswer(streamed.text, engine, first_token_seconds)


def _ask_streamed(port: int, model: str) -> tuple[ChatAnswer, str, float]:
    started = time.monotonic()
    arrivals: list[float] = []
    with _asked(port, model, {"stream": True, "stream_options": {"include_usage": True}}) as response:
        answer = streamed_answer(response, ANSWER_TOKENS, lambda: arrivals.append(time.monotonic()))
        engine = response.headers.get(ENGINE_HEADER, "?")
    return answer, engine, arrivals[0] - started


def _ask_plain(port: int, model: str) -> ChatAnswer:
    with _asked(port, model, {}) as response:
        return plain_answer(json.loads(response.read()), ANSWER_TOKENS)


@contextmanager
def _asked(port: int, model: str, more: dict[str, object]) -> Iterator[http.client.HTTPResponse]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": ANSWER_TOKENS,
        "temperature": 0,
        **more,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise StackError(f"the first chat was answered with status {response.status}: {response.read(500)!r}")
        yield response
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StackError(f"the first chat through the gateway failed: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
