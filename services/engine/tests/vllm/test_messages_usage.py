"""The usage that vLLM's server reports in the Messages API for a cached prompt, on every supported vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.entrypoints.anthropic import serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from spillway_engine.messages_usage import report_cached_tokens

PROMPT, CACHED, ANSWER = 1000, 896, 7
CACHED_TEXT = 'He said "cached_tokens": 5.'
CACHED_NAME = "cached_tokens"  # a part of an answer that is this word alone stands in quotes in vLLM's JSON


@pytest.fixture(autouse=True)
def _joined(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = serving.AnthropicServingMessages
    for method in ("messages_full_converter", "message_stream_converter"):
        monkeypatch.setattr(handler, method, getattr(handler, method))
    report_cached_tokens(serving)


def handler() -> Any:
    made = object.__new__(serving.AnthropicServingMessages)
    made.stop_reason_map = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return made


def usage_of(cached: int | None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "total_tokens": PROMPT + ANSWER}
    return counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def plain(cached: int | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": CACHED_TEXT}
    reply = ChatCompletionResponse(
        model="m",
        choices=[{"index": 0, "message": message, "finish_reason": "stop"}],
        usage=usage_of(cached),
    )
    usage: dict[str, Any] = handler().messages_full_converter(reply).model_dump(exclude_none=True)["usage"]
    return usage


def streamed(cached: int | None) -> list[dict[str, Any]]:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    first = {"prompt_tokens": PROMPT, "completion_tokens": 0, "total_tokens": PROMPT}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": first},
        {"choices": [{"index": 0, "delta": {"content": CACHED_TEXT}}]},
        {"choices": [{"index": 0, "delta": {"content": CACHED_NAME}}]},
        {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage_of(cached)},
    ]

    async def completion() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(head | chunk)}\n\n"
        yield "data: [DONE]\n\n"

    async def read() -> list[str]:
        return [event async for event in handler().message_stream_converter(completion())]

    events = [event.partition("data: ") for event in asyncio.run(read())]
    return [json.loads(data) for _, _, data in events if data]


def test_a_plain_reply_tells_what_the_cache_served_apart_from_the_rest() -> None:
    usage = plain(CACHED)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (PROMPT - CACHED, CACHED)
    assert usage["output_tokens"] == ANSWER


def test_the_end_of_a_stream_does_so_too() -> None:
    events = streamed(CACHED)
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    usage = events[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (PROMPT - CACHED, CACHED)
    assert usage["output_tokens"] == ANSWER
    assert CACHED_TEXT + CACHED_NAME in "".join(event.get("delta", {}).get("text") or "" for event in events)


@pytest.mark.parametrize("cached", [None, 0])
def test_where_nothing_was_cached_the_whole_prompt_was_computed(cached: int | None) -> None:
    for usage in (plain(cached), streamed(cached)[-2]["usage"]):
        assert usage["input_tokens"] == PROMPT
        assert not usage.get("cache_read_input_tokens")
