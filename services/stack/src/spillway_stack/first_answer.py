"""The last step of `up`: one greedy chat answer through the gateway, streamed and plain, which must agree.

No particular word is expected: rounding decides between two equally likely tokens, and differs between CPUs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from spillway_engine.chat_answers import (
    ANSWER_TOKENS,
    QUESTION,
    ChatAnswer,
    MalformedAnswer,
    event_data,
    plain_chat,
    streamed_chat,
)
from spillway_settings.wire import ENGINE_HEADER
from spillway_stack.errors import StackError
from spillway_stack.local_http import exchange

# The bundled model's answer has no near tie (tests/reference_answers), so that both answers have the same text.
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    text: str
    engine: str
    first_token_seconds: float


def check_first_answer(port: int, model: str, bundled: bool) -> FirstAnswer:
    """Ask twice. Raises StackError if an answer is malformed, or if the two differ in what must be the same."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": ANSWER_TOKENS,
        "temperature": 0,
    }
    as_stream = {"stream": True, "stream_options": {"include_usage": True}}
    path, arrivals = "/v1/chat/completions", list[float]()
    started = time.monotonic()
    try:
        with exchange(port, "POST", path, body | as_stream, timeout_seconds=TIMEOUT_SECONDS) as response:
            streamed = streamed_chat(event_data(response), lambda: arrivals.append(time.monotonic()))
            engine = response.headers.get(ENGINE_HEADER, "?")
        with exchange(port, "POST", path, body, timeout_seconds=TIMEOUT_SECONDS) as response:
            require_agreement(streamed, plain_chat(json.loads(response.read())), same_text=bundled)
    except MalformedAnswer as failed:
        raise StackError(f"the first chat through the gateway: {failed}") from failed
    return FirstAnswer(streamed.text, engine, arrivals[0] - started)


def require_agreement(streamed: ChatAnswer, plain: ChatAnswer, same_text: bool) -> None:
    """Compare two answers to one question. Raises MalformedAnswer with the difference.

    same_text: no token of the answer is a near tie. Otherwise two engines, or one engine with and
    without a cached prefix, may rightly continue with different words.
    """
    names = ["model", "prompt_tokens"]
    if same_text:
        names += ["text", "finish_reason", "completion_tokens"]
    for name in names:
        one, other = getattr(streamed, name), getattr(plain, name)
        if one != other:
            raise MalformedAnswer(
                f"the streamed and the plain answer to one question differ in {name}: {one!r}, {other!r}"
            )
