"""Checks that an answer of the chat route is well formed, plain and streamed, for `make up` and `helm test`. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

QUESTION = "Name the capital of France."
ANSWER_TOKENS = 16
_FINISH_REASONS = ("stop", "length")
# If a reasoning parser is on, the first tokens of an answer may all be here.
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class MalformedAnswer(Exception):
    """The answer is malformed. The message says why."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def event_data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream."""
    return (line[5:].strip().decode() for line in lines if line.startswith(b"data:"))


@contextmanager
def _typed() -> Iterator[None]:
    """Turn errors of types and missing members within the context into MalformedAnswer."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise MalformedAnswer(f"the answer has a member of another type than a chat's: {error}") from error


@_typed()
def plain_chat(document: Mapping[str, Any]) -> ChatAnswer:
    """Raises MalformedAnswer unless it is one well-formed chat.completion of at most ANSWER_TOKENS tokens."""
    if document.get("object") != "chat.completion":
        raise MalformedAnswer(f"the answer is no chat.completion: {_short(document)}")
    choices = document.get("choices") or []
    if len(choices) != 1:
        raise MalformedAnswer(f"the answer has {len(choices)} choices, not 1: {_short(document)}")
    message = choices[0].get("message") or {}
    if message.get("role") != "assistant":
        raise MalformedAnswer(f"the answer's role is not assistant: {_short(document)}")
    return _checked(_text_of(message), document, choices[0].get("finish_reason"), document.get("usage"))


@_typed()
def streamed_chat(events: Iterable[str], on_text: Callable[[], None] = lambda: None) -> ChatAnswer:
    """The same of a stream that was asked for with `include_usage`.

    Args:
        events: the data of its events.
        on_text: called as each piece of text arrives.
    """
    pieces: list[str] = []
    roles, ids, finish_reasons = set(), set(), []
    usage: Any = None
    last: Mapping[str, Any] = {}
    done = False
    for data in events:
        if done:
            raise MalformedAnswer(f"the stream continues after [DONE]: {data[:200]!r}")
        if data == "[DONE]":
            done = True
            continue
        last = _event(data)
        ids.add(last.get("id"))
        usage = last.get("usage") or usage
        for choice in last.get("choices") or []:
            delta = choice.get("delta") or {}
            if text := _text_of(delta):
                on_text()
                pieces.append(text)
            roles |= {delta["role"]} if delta.get("role") else set()
            finish_reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    if not done:
        raise MalformedAnswer(f"the stream ended without [DONE], after {''.join(pieces)!r}")
    if len(ids) != 1 or roles != {"assistant"} or len(finish_reasons) != 1:
        raise MalformedAnswer(
            f"a streamed chat has one id, the role assistant and one finish_reason; this one has {len(ids)}, "
            f"{sorted(roles)} and {finish_reasons}"
        )
    return _checked("".join(pieces), last, finish_reasons[0], usage)


def _event(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise MalformedAnswer(f"an event of the stream is no JSON ({error}): {data[:200]!r}") from error
    if not isinstance(event, dict) or "error" in event:
        raise MalformedAnswer(f"the stream ended with an error: {_short(event)}")
    if event.get("object") != "chat.completion.chunk":
        raise MalformedAnswer(f"an event of the stream is no chat.completion.chunk: {_short(event)}")
    return event


def _text_of(message: Mapping[str, Any]) -> str:
    return "".join(message.get(name) or "" for name in _TEXT_FIELDS)


def _checked(text: str, document: Mapping[str, Any], finish_reason: Any, usage: Mapping[str, Any] | None) -> ChatAnswer:
    usage = usage or {}
    prompt, completion, total = (
        int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if not text.strip():
        raise MalformedAnswer("the answer is empty")
    if finish_reason not in _FINISH_REASONS:
        raise MalformedAnswer(f"the answer's finish_reason is {finish_reason!r}, none of {', '.join(_FINISH_REASONS)}")
    if prompt < 1 or not 1 <= completion <= ANSWER_TOKENS or total != prompt + completion:
        raise MalformedAnswer(f"the answer's usage does not add up for at most {ANSWER_TOKENS} tokens: {usage}")
    if finish_reason == "length" and completion != ANSWER_TOKENS:
        raise MalformedAnswer(f"the answer was cut at {completion} tokens, {ANSWER_TOKENS} were allowed")
    return ChatAnswer(text, str(document.get("model")), finish_reason, prompt, completion)


def _short(document: Any) -> str:
    return json.dumps(document)[:300]
