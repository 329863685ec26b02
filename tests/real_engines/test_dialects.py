"""Replies that count as an answer, or as a clear error, in each dialect: the program's verdicts rest on this."""

from __future__ import annotations

import json
from typing import Any

import pytest

from real_engines.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES, Exchange, take_event, take_reply

PARTS: dict[str, list[Any]] = {
    CHAT: [{"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "a"}}]}],
    COMPLETIONS: [{"choices": [{"text": "a"}]}],
    MESSAGES: [{"type": "message_start"}, {"type": "content_block_delta", "delta": {"text": "a"}}],
    RESPONSES: [{"type": "response.created", "response": {}}, {"type": "response.output_text.delta", "delta": "a"}],
}
ENDS = {
    CHAT: "[DONE]",
    COMPLETIONS: "[DONE]",
    MESSAGES: json.dumps({"type": "message_stop"}),
    RESPONSES: json.dumps({"type": "response.completed", "response": {}}),
}
ERRORS: dict[str, list[Any]] = {
    CHAT: [{"error": {"message": "m", "code": 500}}],
    COMPLETIONS: [{"error": {"message": "m", "code": 500}}],
    MESSAGES: [{"type": "error", "error": {"type": "api_error", "message": "m"}}],
    RESPONSES: [
        {"type": "error", "message": "m", "code": "server_error"},
        {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "m"}}},
    ],
}
REPLIES: dict[str, Any] = {
    CHAT: {"choices": [{"message": {"content": "a"}}]},
    COMPLETIONS: {"choices": [{"text": "a"}]},
    MESSAGES: {"content": [{"type": "text", "text": "a"}]},
    RESPONSES: {"error": None, "output": [{"content": [{"text": "a"}]}]},
}


def begun(dialect: str) -> Exchange:
    exchange = Exchange("one", dialect, True, status=200)
    for event in PARTS[dialect]:
        take_event(exchange, json.dumps(event))
    return exchange


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_is_an_answer_once_it_has_come_to_its_end(dialect: str) -> None:
    exchange = begun(dialect)
    assert (exchange.text, exchange.parts, exchange.answered, exchange.error_is_clear) == ("a", 1, False, False)
    take_event(exchange, ENDS[dialect])
    assert exchange.answered


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_within_a_stream_is_clear_and_no_answer(dialect: str) -> None:
    for error in ERRORS[dialect]:
        exchange = begun(dialect)
        take_event(exchange, json.dumps(error))
        assert exchange.error_is_clear and not exchange.answered
        if ENDS[dialect] == "[DONE]":  # which these end with after errors, too
            take_event(exchange, "[DONE]")
            assert exchange.error_is_clear and not exchange.answered


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_plain_reply(dialect: str) -> None:
    answered = Exchange("one", dialect, False, status=200)
    take_reply(answered, REPLIES[dialect])
    assert answered.answered
    refused = Exchange("one", dialect, False, status=500)
    take_reply(refused, {"error": {"message": "m"}})
    assert refused.error_is_clear and not refused.answered
