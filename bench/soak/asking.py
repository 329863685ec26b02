"""One greedy completion, straight from an engine or streamed through the gateway: an answer, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from reference_answers.margins import REQUEST, Scored, scored

ANSWER_TOKENS = 12
REQUEST_SECONDS = 120.0  # far beyond what any deadline inside adds up to: longer is a hang


@dataclass(frozen=True, slots=True)
class Reply:
    scored: Scored
    cached_tokens: int
    engine: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """explained: the client got an error in OpenAI's shape. tokens: how many it had received by then."""

    reason: str
    explained: bool
    tokens: int
    engine: str | None


def request_body(model: str, prompt: Sequence[int], salt: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **REQUEST,
    }
    return body if salt is None else {**body, "cache_salt": salt}


def ask_engine(client: httpx.Client, url: str, engine: str, body: dict[str, Any]) -> Reply | Failure:
    """Ask an engine without streaming. A broken connection means that the engine is gone; no error body is expected of
    it."""
    try:
        response = client.post(f"{url}/v1/completions", json=body)
        if response.status_code != 200:
            return Failure(f"status_{response.status_code}", _is_error(_json(response.content)), 0, engine)
        document = response.json()
    except httpx.TimeoutException:
        return Failure("timeout", False, 0, engine)
    except (httpx.HTTPError, ValueError) as error:
        return Failure(type(error).__name__, False, 0, engine)
    return Reply(scored(document["choices"][0]), _cached(document.get("usage")), engine)


def ask_gateway(client: httpx.Client, url: str, body: dict[str, Any]) -> Reply | Failure:
    """Streamed, so that an engine may die between two tokens."""
    received = Scored((), ())
    engine: str | None = None
    cached, done, error = 0, False, None
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.stream("POST", f"{url}/v1/completions", json=streamed) as response:
            engine = response.headers.get("x-spillway-engine")
            if response.status_code != 200:
                return Failure(f"status_{response.status_code}", _is_error(_json(response.read())), 0, engine)
            for line in response.iter_lines():
                data = line[5:].strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    error = event if "error" in event else error
                    cached = _cached(event.get("usage")) or cached
                    for choice in event.get("choices", []):
                        if choice.get("token_ids"):
                            received += scored(choice)
    except httpx.TimeoutException:
        return Failure("timeout", False, len(received.tokens), engine)
    except (httpx.HTTPError, ValueError) as broken:
        return Failure(type(broken).__name__, False, len(received.tokens), engine)
    if error is not None:
        return Failure("stream_error", _is_error(error), len(received.tokens), engine)
    if not done:
        return Failure("stream_without_end", False, len(received.tokens), engine)
    return Reply(received, cached, engine)


def _cached(usage: dict[str, Any] | None) -> int:
    return int(((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _is_error(document: Any) -> bool:
    """Whether this is OpenAI's error shape, with words for people."""
    error = document.get("error") if isinstance(document, dict) else None
    return isinstance(error, dict) and bool(error.get("message")) and "type" in error
