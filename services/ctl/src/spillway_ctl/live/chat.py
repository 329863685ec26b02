"""Is an answer of the chat route well formed, plain and streamed? Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spillway_ctl.live.asking import CheckFailed

QUESTION = "Name the capital of France."
ANSWER_TOKENS = 16
_FINISH_REASONS = ("stop", "length")
# If a reasoning parser is on, the first tokens of an answer may all be here.
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


def plain_chat(answer: Mapping[str, Any]) -> tuple[str, int]:
    """Text and tokens of the prompt. Raises CheckFailed unless it is one well-formed chat.completion."""
    choices = answer.get("choices") or []
    if answer.get("object") != "chat.completion" or len(choices) != 1:
        raise CheckFailed(f"the chat's answer is no chat.completion with one choice: {answer}")
    message = choices[0].get("message") or {}
    if message.get("role") != "assistant":
        raise CheckFailed(f"the role of the chat's answer is not assistant: {answer}")
    return _checked(_text_of(message), choices[0].get("finish_reason"), answer.get("usage"))


def streamed_chat(events: list[str]) -> tuple[str, int]:
    """The same of the data of a stream's events."""
    if not events or events[-1] != "[DONE]":
        raise CheckFailed(f"the streamed chat ended without [DONE]: {events[-2:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    for chunk in chunks:
        if chunk.get("object") != "chat.completion.chunk":
            raise CheckFailed(f"the streamed chat holds something else than chunks: {chunk}")
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    deltas = [choice.get("delta") or {} for choice in choices]
    ids = {chunk.get("id") for chunk in chunks}
    roles = {delta["role"] for delta in deltas if delta.get("role")}
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(ids) != 1 or roles != {"assistant"} or len(reasons) != 1:
        raise CheckFailed(
            f"a streamed chat has one id, the role assistant and one finish_reason; this one has {len(ids)}, "
            f"{sorted(roles)} and {reasons}"
        )
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    return _checked("".join(map(_text_of, deltas)), reasons[0], usage)


def _text_of(message: Mapping[str, Any]) -> str:
    return "".join(message.get(name) or "" for name in _TEXT_FIELDS)


def _checked(text: str, finish_reason: object, usage: Mapping[str, Any] | None) -> tuple[str, int]:
    if not text.strip():
        raise CheckFailed("the chat's answer is empty")
    if finish_reason not in _FINISH_REASONS:
        raise CheckFailed(f"the chat's answer ends with finish_reason {finish_reason!r}")
    usage = usage or {}
    prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if prompt < 1 or not 1 <= completion <= ANSWER_TOKENS or usage.get("total_tokens") != prompt + completion:
        raise CheckFailed(f"the usage of the chat's answer does not add up: {usage}")
    return text, prompt
