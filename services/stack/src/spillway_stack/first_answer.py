"""The proof that ends `up`: one streamed greedy chat answer through the gateway."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass

from spillway_stack.errors import StackError

QUESTION = "What is the capital of France?"
BUNDLED_ANSWER = "Paris"


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    text: str
    engine: str
    first_token_seconds: float
    total_seconds: float


def ask_streamed(port: int, model: str, question: str = QUESTION, timeout_seconds: float = 120.0) -> StreamedAnswer:
    """Raises StackError when the answer is no event stream of chat chunks."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_completion_tokens": 16,
            "temperature": 0,
            "stream": True,
        }
    )
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        engine = response.headers.get("x-spillway-engine", "?")
        if response.status != 200:
            raise StackError(f"the first chat was answered with status {response.status}: {response.read(500)!r}")
        for line in response:
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise StackError(f"the first chat ended with an error: {event['error']}")
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.monotonic() - started
                pieces.append(piece)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StackError(f"the first chat through the gateway failed: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    total_seconds = time.monotonic() - started
    return StreamedAnswer("".join(pieces), engine, first if first is not None else total_seconds, total_seconds)


def check_first_answer(port: int, model: str, bundled: bool) -> StreamedAnswer:
    """Raises StackError when the answer is empty, or wrong where the right one is known."""
    answer = ask_streamed(port, model)
    if not answer.text.strip():
        raise StackError(f"the first chat answer of {model} is empty")
    if bundled and BUNDLED_ANSWER not in answer.text:
        raise StackError(f"{QUESTION!r} was answered {answer.text!r}, which lacks {BUNDLED_ANSWER!r}")
    return answer
