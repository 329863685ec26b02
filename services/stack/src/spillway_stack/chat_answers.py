"""Checks a chat completion against OpenAI's API, and a streamed one against a plain one. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spillway_stack.errors import StackError

FINISH_REASONS = ("stop", "length")
# With a reasoning parser the first tokens of an answer may all be in one of these.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def plain_answer(document: Mapping[str, Any], tokens_max: int) -> ChatAnswer:
    """Parse a `chat.completion`. Raises StackError with what is wrong."""
    if document.get("object") != "chat.completion":
        raise StackError(f"the answer is no chat.completion: {_short(document)}")
    choice = _only_choice(document)
    message = choice.get("message") or {}
    if message.get("role") != "assistant":
        raise StackError(f"the answer's role is not assistant: {_short(choice)}")
    return _checked(_text(message), document, choice.get("finish_reason"), document.get("usage"), tokens_max)


def streamed_answer(lines: Iterable[bytes], tokens_max: int, on_text: Callable[[], None]) -> ChatAnswer:
    """Parse the lines of an event stream requested with `include_usage`. Raises StackError with what is wrong.

    on_text is called as each piece of text arrives.
    """
    pieces: list[str] = []
    roles, ids, finish_reasons = set(), set(), []
    usage: Any = None
    last: Mapping[str, Any] = {}
    done = False
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if done:
            raise StackError(f"the stream continues after [DONE]: {data[:200]!r}")
        if data == b"[DONE]":
            done = True
            continue
        last = _event(data)
        ids.add(last.get("id"))
        usage = last.get("usage") or usage
        for choice in last.get("choices") or []:
            delta = choice.get("delta") or {}
            if text := _text(delta):
                on_text()
                pieces.append(text)
            roles |= {delta["role"]} if delta.get("role") else set()
            finish_reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    if not done:
        raise StackError(f"the stream ended without [DONE], after {''.join(pieces)!r}")
    if len(ids) != 1 or roles != {"assistant"} or len(finish_reasons) != 1:
        raise StackError(
            f"the stream needs one id, the role assistant and one finish_reason; "
            f"it has {len(ids)}, {sorted(roles)} and {finish_reasons}"
        )
    return _checked("".join(pieces), last, finish_reasons[0], usage, tokens_max)


def require_agreement(streamed: ChatAnswer, plain: ChatAnswer, same_text: bool) -> None:
    """Compare two answers to one question. Raises StackError with the difference.

    same_text: no token of the answer is a near tie. Otherwise two engines, or one engine with and
    without a cached prefix, may rightly continue with different words.
    """
    names = ["model", "prompt_tokens"]
    if same_text:
        names += ["text", "finish_reason", "completion_tokens"]
    for name in names:
        one, other = getattr(streamed, name), getattr(plain, name)
        if one != other:
            raise StackError(f"the streamed and the plain answer to one question differ in {name}: {one!r}, {other!r}")


def _event(data: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StackError(f"an event of the stream is no JSON ({error}): {data[:200]!r}") from error
    if not isinstance(event, dict) or "error" in event:
        raise StackError(f"the stream ended with an error: {_short(event)}")
    if event.get("object") != "chat.completion.chunk":
        raise StackError(f"an event of the stream is no chat.completion.chunk: {_short(event)}")
    return event


def _only_choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = document.get("choices") or []
    if len(choices) != 1:
        raise StackError(f"the answer has {len(choices)} choices, not 1: {_short(document)}")
    choice: Mapping[str, Any] = choices[0]
    return choice


def _text(message: Mapping[str, Any]) -> str:
    return "".join(message.get(name) or "" for name in TEXT_FIELDS)


def _checked(text: str, document: Mapping[str, Any], finish_reason: Any, usage: Any, tokens_max: int) -> ChatAnswer:
    usage = usage or {}
    prompt, completion, total = (
        usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if not text.strip():
        raise StackError("the answer is empty")
    if finish_reason not in FINISH_REASONS:
        raise StackError(f"the answer's finish_reason is {finish_reason!r}, none of {', '.join(FINISH_REASONS)}")
    if prompt < 1 or not 1 <= completion <= tokens_max or total != prompt + completion:
        raise StackError(f"the answer's usage does not add up for at most {tokens_max} tokens: {usage}")
    if finish_reason == "length" and completion != tokens_max:
        raise StackError(f"the answer was cut at {completion} tokens, {tokens_max} were allowed")
    return ChatAnswer(text, str(document.get("model")), finish_reason, prompt, completion)


def _short(document: Any) -> str:
    return json.dumps(document)[:300]
