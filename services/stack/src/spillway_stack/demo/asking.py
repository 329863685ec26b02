"""One streamed greedy chat request, timed to its first content token."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spillway_engine.chat_answers import event_data
from spillway_stack.demo.sizing import ANSWER_TOKENS
from spillway_stack.errors import StackError
from spillway_stack.local_http import exchange

TIMEOUT_SECONDS = 300.0
# The expected fact precedes either; what a small model generates after it is arbitrary.
STOP = (" with", ".")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int  # as the engine reports it in usage
    ttft_seconds: float
    headers: Mapping[str, str]  # lower-case names
    leads: tuple[float, ...] = ()  # of each token over its runner-up, natural logarithm; empty: not reported


def ask(port: int, model: str, messages: list[dict[str, str]]) -> Answer:
    """Send one request. Raises StackError when the answer is not a complete stream with usage."""
    body = {
        "model": model,
        "messages": messages,
        "max_completion_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stop": list(STOP),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # texts can agree though tokens do not
        "logprobs": True,
        "top_logprobs": 2,
    }
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    token_ids: list[int] = []
    leads: list[float] = []
    usage: dict[str, Any] | None = None
    with exchange(port, "POST", "/v1/chat/completions", body, timeout_seconds=TIMEOUT_SECONDS) as response:
        headers = {name.lower(): value for name, value in response.getheaders()}
        for event in map(json.loads, filter(lambda data: data not in ("", "[DONE]"), event_data(response))):
            if "error" in event:
                raise StackError(f"port {port} ended its answer with an error: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.monotonic()
                pieces.append(piece)
                token_ids += choice.get("token_ids") or []
                leads += [_lead(position) for position in (choice.get("logprobs") or {}).get("content") or []]
    if first is None or usage is None or not token_ids:
        raise StackError(f"port {port} streamed no content, no token ids or no usage; see make logs")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        "".join(pieces),
        tuple(token_ids),
        int(usage["prompt_tokens"]),
        int(details.get("cached_tokens") or 0),
        first - started,
        headers,
        tuple(leads) if len(leads) == len(token_ids) else (),
    )


def ask_one_token(port: int, model: str) -> None:
    """Send the shortest possible request: it takes one device block and caches nothing."""
    _request("POST", port, "/v1/completions", {"model": model, "prompt": "Ship", "max_tokens": 1, "temperature": 0})


def take_blocks(port: int, model: str, blocks: int) -> None:
    """Ask for that many short answers at the same time, each in a device block of its own; nothing of them is cached.

    At the same time, as vLLM 0.30 and newer reuse a block that caches nothing before any other: one such request after
    the other would always get the same block. Several tokens each, so that the last has begun before the first ends.
    """
    body = {"model": model, "prompt": "Ship", "max_tokens": 4, "ignore_eos": True, "temperature": 1, "n": blocks}
    _request("POST", port, "/v1/completions", body)


def count_prompt_tokens(port: int, model: str, messages: list[dict[str, str]]) -> int:
    """Return the prompt's tokens as the engine counts them, chat template included."""
    return int(_request("POST", port, "/tokenize", {"model": model, "messages": messages})["count"])


def is_in_slow_start(gateway_port: int) -> bool:
    """Whether the gateway still keeps requests from an engine that has just become ready."""
    state = _request("GET", gateway_port, "/ui/state")
    return any(engine["slowStart"] for model in state["models"] for engine in model["engines"])


def _lead(position: Mapping[str, Any]) -> float:
    best, *others = (float(token["logprob"]) for token in position["top_logprobs"])
    return best - max(others, default=-math.inf)


def _request(method: str, port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with exchange(port, method, path, body, timeout_seconds=TIMEOUT_SECONDS) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer
