"""Answers of the chat route that are well formed, and those that are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spillway_engine.chat_answers import MalformedAnswer, plain_chat, streamed_chat

USAGE = {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32}
CHAT = {
    "object": "chat.completion",
    "choices": [{"message": {"role": "assistant", "content": "Here."}, "finish_reason": "stop"}],
    "usage": USAGE,
}


def streamed(*pieces: str, usage: dict[str, int] | None = USAGE) -> list[str]:
    head = {"id": "1", "object": "chat.completion.chunk"}
    choices: list[Any] = [{"delta": {"role": "assistant"}}, *({"delta": {"content": piece}} for piece in pieces)]
    choices.append({"delta": {}, "finish_reason": "stop"})
    chunks = [*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": usage}]
    return [*map(json.dumps, chunks), "[DONE]"]


def test_both_kinds_have_the_same_text_and_tokens() -> None:
    plain, stream = plain_chat(CHAT), streamed_chat(streamed("He", "re."))

    assert plain == stream
    assert (plain.text, plain.prompt_tokens) == ("Here.", 30)


def test_reasoning_is_text_too() -> None:
    message = {"role": "assistant", "reasoning_content": "Well."}
    assert plain_chat({**CHAT, "choices": [{"message": message, "finish_reason": "stop"}]}).text == "Well."


def changed(old: str, new: str) -> dict[str, Any]:
    return json.loads(json.dumps(CHAT).replace(old, new))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"choices": []}, "no chat.completion"),
        ({**CHAT, "choices": []}, "0 choices"),
        (changed("chat.completion", "text_completion"), "no chat.completion"),
        ({**CHAT, "choices": [{"message": {"content": "a"}}]}, "is not assistant"),
        (changed("Here.", " "), "answer is empty"),
        (changed("stop", "error"), "finish_reason is 'error'"),
        (changed("stop", "length"), "cut at 2 tokens, 16 were allowed"),
        ({**CHAT, "usage": None}, "does not add up"),
        ({**CHAT, "usage": {**USAGE, "total_tokens": 33}}, "does not add up"),
        ({**CHAT, "usage": {**USAGE, "completion_tokens": 17, "total_tokens": 47}}, "does not add up"),
        ([], "another type"),
        ({**CHAT, "choices": ["Here."]}, "another type"),
        ({**CHAT, "choices": {"first": "Here."}}, "another type"),
        (changed('"Here."', '["Here."]'), "another type"),
        ({**CHAT, "usage": {**USAGE, "total_tokens": "many"}}, "another type"),
    ],
)
def test_an_answer_that_is_not_well_formed(answer: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedAnswer, match=problem):
        plain_chat(answer)


STREAM = streamed("He", "re.")


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([], "without .DONE."),
        (STREAM[:-1], "without .DONE."),
        ([*STREAM, "{}"], "continues after .DONE."),
        (["{", "[DONE]"], "no JSON"),
        (['{"error": {"message": "gone"}}'], "ended with an error"),
        ([event.replace(".chunk", "") for event in STREAM], "no chat.completion.chunk"),
        ([STREAM[0].replace('"id": "1"', '"id": "2"'), *STREAM[1:]], "this one has 2"),
        ([event.replace('"stop"', "null") for event in STREAM], r"and \[\]"),
        ([event.replace('"role": "assistant"', '"content": "a"') for event in STREAM], "this one has 1, "),
        (streamed(" "), "answer is empty"),
        (streamed("a", usage=None), "does not add up"),
    ],
)
def test_a_stream_that_is_not_well_formed(events: list[str], problem: str) -> None:
    with pytest.raises(MalformedAnswer, match=problem):
        streamed_chat(events)
