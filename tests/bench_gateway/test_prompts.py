"""The order and the numbers of requests. Their texts are those of installed packages (gateway_load/texts.py)."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest
from gateway_load.prompts import NUMBER, Prompts, chat_body, own_body, traffic

TURNS = (3, 1, 2)  # of the chats


def parts(*contents: str) -> list[bytes]:
    messages = [{"role": "user", "content": content} for content in contents]
    return chat_body(messages, stream=False).split(NUMBER.encode())


PROMPTS = Prompts(
    chats=[
        [parts(*(f"[{NUMBER}] chat {chat} turn {turn}" for turn in range(last + 1))) for last in range(turns)]
        for chat, turns in enumerate(TURNS)
    ],
    documents=[parts("document", f"[{NUMBER}] question {at}") for at in range(2)],
    own=[parts(f"[{NUMBER}] own {at}") for at in range(2)],
)


def contents(body: bytes) -> list[str]:
    return [message["content"] for message in json.loads(body)["messages"]]


@pytest.mark.parametrize("concurrent", [1, 64])
def test_no_prompt_is_sent_twice_and_chats_go_on_in_order(concurrent: int) -> None:
    sent = list(itertools.islice(traffic(PROMPTS, itertools.count(7), concurrent=concurrent), 2_000))

    assert len(set(sent)) == len(sent)
    kinds: Counter[str] = Counter()
    last: dict[str, list[str]] = {}
    begun_in_the_middle = 0
    for body in sent:
        said = contents(body)
        (number,) = {found for text in said for found in re.findall(r"\[(\d+)\]", text)}
        kinds[re.sub(r"[^a-z]", "", said[-1].replace("turn", ""))] += 1
        if "chat" in said[-1]:
            begun_in_the_middle += number not in last and len(said) > 1
            assert number not in last or said[:-1] == last[number]
            last[number] = said
        else:
            assert number not in last
    assert kinds == {"chat": 1_000, "question": 500, "own": 500}
    assert begun_in_the_middle <= max(16, 2 * concurrent)


def test_streamed_requests_differ_in_that_alone() -> None:
    plain, streamed = (traffic(each, itertools.count(), concurrent=1) for each in (PROMPTS, PROMPTS.streamed()))
    for one, other in itertools.islice(zip(plain, streamed, strict=True), 50):
        assert {**json.loads(one), "stream": True} == json.loads(other)


def test_a_prompt_of_its_own_is_one_message_as_it_was_written() -> None:
    assert "中文" in own_body("中文").decode() and contents(own_body("中文")) == ["中文"]
