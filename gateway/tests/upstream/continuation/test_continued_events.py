"""Streams that are cut anywhere and go on from a second engine: the client has the text of the uninterrupted one."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.testing.spelled_answers import SpelledAnswer
from spillway_gateway.upstream.continuation.continued_events import (
    ContinuedEvents,
    NotContinuable,
    Plan,
    body_of,
    plan_of,
)
from spillway_gateway.upstream.continuation.junction import Junction, joined, known_junction, pieces
from spillway_gateway.upstream.continuation.sent_answer import KeptBytes, SentAnswer

PROMPT = tuple(range(40))
DONE = b"data: [DONE]\n\n"


def sent_answer(*, chat: bool, tokens_max: int = 10_000, bytes_max: int = 1 << 20) -> SentAnswer:
    return SentAnswer(KeptBytes(lambda: bytes_max), chat=chat, tokens_max=tokens_max)


def documents(events: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return [msgspec.json.decode(line) for line in lines[:-1]]


def text_of(events: bytes) -> str:
    choices = [choice for document in documents(events) for choice in document["choices"]]
    return "".join(choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices)


def finish_of(events: bytes) -> tuple[Any, Any]:
    ends = [choice for document in documents(events) for choice in document["choices"] if choice["finish_reason"]]
    assert len(ends) == 1
    return ends[0]["finish_reason"], ends[0].get("stop_reason")


def plan_for(answer: SpelledAnswer, *, chat: bool) -> Plan:
    body: dict[str, Any] = {"model": "fake", "stream": True, "stream_options": answer.options}
    body |= {"messages": []} if chat else {"prompt": "p"}
    body |= {"stop": list(answer.stop), "include_stop_str_in_output": answer.include_stop}
    if answer.tokens_max is not None or not chat:
        body["max_tokens"] = answer.tokens_max or 100
    return plan_of(msgspec.json.encode(body), chat=chat)


def junction_of(sent: SentAnswer, plan: Plan, answer: SpelledAnswer) -> Junction:
    known = known_junction(sent, plan.held_back)
    if known is not None:
        return known
    for piece in pieces(sent, plan.held_back):
        text = answer.detokenize(sent.tokens[piece.start : piece.end])
        found = joined(piece, text, sent.sent_text(), plan.held_back)
        if found is not None:
            return found
    raise AssertionError("no junction")


def continued(answer: SpelledAnswer, sent: SentAnswer, plan: Plan, *, stop_after: int | None = None) -> bytes:
    """The rest of an answer, as the client gets it from an engine that continues it and dies after so many events."""
    junction = junction_of(sent, plan, answer)
    left = (answer.tokens_max or 100) - junction.tokens
    body = msgspec.json.decode(body_of(plan, sent, junction.tokens, left))
    assert body["prompt"] == [*PROMPT, *range(1000, 1000 + junction.tokens)]
    assert body["max_tokens"] == left
    second = replace(answer, request_id="another", options={"include_usage": True})
    events = second.events(chat=False, asked_ids=True, done_tokens=junction.tokens, prompt=body["prompt"])
    answers = ContinuedEvents(plan, sent, junction)
    shown = b""
    for event in [*events, DONE][:stop_after]:
        shown += answers.take(event)
        assert answers.failure is None
        if answers.done:
            break
    return shown


TEXTS = st.text(alphabet=' ab"\\\u00e9\u4e2d\U0001f600', min_size=1, max_size=40)


@st.composite
def spelled_answers(draw: st.DrawFn) -> SpelledAnswer:
    """Stop strings are mostly taken from the text, so that they are met."""
    text = draw(TEXTS)
    rest, spelled = text.encode(), []
    while rest:
        size = draw(st.integers(1, 6))
        spelled.append(rest[:size])
        rest = rest[size:]
    stop = []
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + draw(st.integers(1, 8))] + draw(st.sampled_from(["", "", "", "a"])))
    return SpelledAnswer(
        spelled,
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        prompt=PROMPT,
        stop=stop,
        include_stop=draw(st.booleans()),
        tokens_max=draw(st.none() | st.integers(1, 60)),
        options=draw(st.sampled_from([{}, {"include_usage": True}])),
    )


@given(spelled_answers(), st.booleans())
def test_ids_are_taken_out_and_nothing_else_changes(answer: SpelledAnswer, chat: bool) -> None:
    asked = [*answer.events(chat=chat, asked_ids=True), DONE]
    plain = [*answer.events(chat=chat, asked_ids=False), DONE]
    sent = sent_answer(chat=chat)
    assert [sent.take(event) for event in asked] == plain
    assert sent.take(b"".join(asked)) == b"".join(plain)
    lost = sent_answer(chat=chat)
    lost.lose("request")
    assert lost.take(b"".join(asked)) == b"".join(plain)


@given(spelled_answers(), st.booleans(), st.data())
def test_a_stream_cut_anywhere_has_the_text_of_the_whole_one(
    answer: SpelledAnswer, chat: bool, data: st.DataObject
) -> None:
    whole = b"".join([*answer.events(chat=chat, asked_ids=False), DONE])
    events = answer.events(chat=chat, asked_ids=True)
    plan = plan_for(answer, chat=chat)
    sent = sent_answer(chat=chat)
    shown = b"".join(sent.take(event) for event in events[: data.draw(st.integers(1, len(events)), "first cut")])
    if not sent.finished:
        shown += continued(answer, sent, plan, stop_after=data.draw(st.integers(0, 6), "second cut"))
    if not sent.finished:
        shown += continued(answer, sent, plan)
    if not shown.endswith(DONE):
        return  # cut between the last token and the end, which needs no engine
    assert text_of(shown) == text_of(whole)
    assert finish_of(shown) == finish_of(whole)
    assert {(each["id"], each["object"], each["created"]) for each in documents(shown)} == {
        (each["id"], each["object"], each["created"]) for each in documents(whole)
    }
    usages = [each["usage"] for each in documents(shown) if each.get("usage")]
    assert len(usages) == len([each for each in documents(whole) if each.get("usage")])
    if not answer.stop:  # an engine counts to the token that completes a stop string, a junction to its chunk
        assert usages == [each["usage"] for each in documents(whole) if each.get("usage")]


@pytest.mark.parametrize("chat", [True, False])
def test_chunks_after_the_junction_are_shaped_as_those_before(chat: bool) -> None:
    answer = SpelledAnswer([b"one", b" two", b" three"], prompt=PROMPT, options={"include_usage": True})
    whole = b"".join([*answer.events(chat=chat, asked_ids=False), DONE])
    for cut in range(1, len(answer.events(chat=chat, asked_ids=True)) - 1):
        sent = sent_answer(chat=chat)
        shown = b"".join(sent.take(event) for event in answer.events(chat=chat, asked_ids=True)[:cut])
        if not sent.finished:
            assert shown + continued(answer, sent, plan_for(answer, chat=chat)) == whole


@pytest.mark.parametrize(
    ("stop", "include_stop"),
    [
        (["no such"], False),
        (["rs a", "and"], False),
        (["b and", "b a"], False),
        (["so", "d so"], False),
        (["d so", "so"], False),
        (["and"], True),
        (["b a", "rs and"], True),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_two_cuts_at_all_places_around_stop_strings(stop: list[str], include_stop: bool, chat: bool) -> None:
    text = b"letters and b and so"
    spelled = [text[at : at + 1] for at in range(len(text))]
    answer = SpelledAnswer(spelled, prompt=PROMPT, stop=stop, include_stop=include_stop)
    whole = b"".join([*answer.events(chat=chat, asked_ids=False), DONE])
    events = answer.events(chat=chat, asked_ids=True)
    for first in range(1, len(events)):
        for second in range(len(events)):
            sent = sent_answer(chat=chat)
            shown = b"".join(sent.take(event) for event in events[:first])
            shown += continued(answer, sent, plan_for(answer, chat=chat), stop_after=second)
            if not sent.finished:
                shown += continued(answer, sent, plan_for(answer, chat=chat))
            if shown.endswith(DONE):
                assert (text_of(shown), finish_of(shown)) == (text_of(whole), finish_of(whole))


PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 0},
        {"n": 2},
        {"logprobs": True},
        {"min_tokens": 1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"thinking_token_budget": 0},
        {"echo": True},
        {"a_member_of_a_later_version": 1},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": 3},
        {"stop": ["a" * 2000]},
        {"stop": 3},
        {"max_tokens": "many"},
    ],
)
def test_what_another_engine_would_do_otherwise_is_not_continued(fields: dict[str, Any]) -> None:
    with pytest.raises(NotContinuable):
        plan_of(msgspec.json.encode({**PLAIN, **fields}), chat=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": None, "n": 1, "logprobs": False, "top_logprobs": 0, "min_tokens": 0, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}, "tools": [], "echo": False, "bad_words": [], "user": "u"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"temperature": 0.7, "top_p": 0.9, "stop": "\n", "logit_bias": {"5": 1.0}, "return_token_ids": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_a_plain_request_keeps_what_decides_on_its_tokens(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({**PLAIN, **fields, "cache_salt": "s", "max_completion_tokens": 9, "max_tokens": 5})
    plan = plan_of(body, chat=True)
    assert plan.tokens_max == 9
    kept = {"temperature", "top_p", "stop", "logit_bias", "user"} & fields.keys()
    assert plan.members.keys() == {"model", "cache_salt"} | kept


@pytest.mark.parametrize(("fields", "tokens_max"), [({}, 16), ({"max_tokens": 3}, 3)])
def test_a_completion_ends_where_it_would_have(fields: dict[str, Any], tokens_max: int | None) -> None:
    plan = plan_of(msgspec.json.encode({"prompt": [1, 2], **fields}), chat=False)
    assert plan.tokens_max == tokens_max
    with pytest.raises(NotContinuable):
        plan_of(b'{"prompt":[1,2],"max_tokens":null}', chat=False)
    for prompt in (["a", "b"], [[1], [2]], None):
        with pytest.raises(NotContinuable):
            plan_of(msgspec.json.encode({"prompt": prompt, **fields}), chat=False)


def chat_event(choice: dict[str, Any], **members: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "c", "choices": [{"index": 0, **choice}], **members}) + b"\n\n"


ROLE = chat_event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, prompt_token_ids=[1, 2, 3])


@pytest.mark.parametrize(
    ("event", "shown", "why"),
    [
        ({"delta": {"reasoning": "hm"}, "finish_reason": None, "token_ids": [5]}, True, "parser"),
        ({"delta": {"tool_calls": []}, "finish_reason": None, "token_ids": [5]}, True, "parser"),
        ({"delta": {}, "finish_reason": None, "token_ids": [5]}, False, "parser"),
        ({"delta": {"content": "x"}, "index": 1, "finish_reason": None, "token_ids": [5]}, True, "shape"),
        ({"delta": {"content": "x"}, "finish_reason": None, "token_ids": [5]}, True, None),
    ],
)
def test_a_parser_at_work_excludes_an_answer(event: dict[str, Any], shown: bool, why: str | None) -> None:
    sent = sent_answer(chat=True)
    sent.take(ROLE)
    assert bool(sent.take(chat_event(event))) is shown
    assert sent.lost == why
    assert bool(sent.take(chat_event(event))) is shown
    assert b"[5]" not in sent.take(chat_event(event) + chat_event({"delta": {"content": "y"}, "token_ids": [5]}))


def test_an_engine_without_ids_and_answers_without_room_are_not_continued() -> None:
    sent = sent_answer(chat=True)
    sent.take(ROLE.replace(b"[1,2,3]", b"null"))
    assert sent.lost == "no_token_ids"
    for bound in ({"tokens_max": 5}, {"bytes_max": 4096 + 5}):
        sent = sent_answer(chat=True, **bound)
        sent.take(ROLE)
        for at in range(3000):
            sent.take(chat_event({"delta": {"content": "x"}, "finish_reason": None, "token_ids": [at]}))
        assert sent.lost == "tokens"
        assert sent.tokens == array("I")


def test_room_is_given_back() -> None:
    kept = KeptBytes(lambda: 1 << 20)
    sent = SentAnswer(kept, chat=True, tokens_max=1000)
    sent.take(ROLE)
    assert kept.taken > 0
    sent.close()
    sent.close()
    assert kept.taken == 0


@pytest.mark.parametrize(
    "failure",
    [
        b'data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}\n\n',
        chat_event({"delta": {"content": "withheld"}, "finish_reason": "abort", "token_ids": []}),
    ],
)
def test_what_precedes_a_failure_is_shown_and_the_failure_is_not(failure: bytes) -> None:
    sent = sent_answer(chat=True)
    sent.take(ROLE)
    token = chat_event({"delta": {"content": "x"}, "finish_reason": None, "token_ids": [5]})
    assert sent.take(token + failure + DONE) == token.replace(b"[5]", b"null")
    assert sent.failure is not None
    assert sent.held == failure + DONE
    assert sent.tokens == array("I", [5])


def test_a_session_goes_on_with_the_answer():
    params = {"spillway_session": {"id": "8f0c"}}
    body = {"model": "fake", "prompt": "p", "stream": True, "max_tokens": 9, "kv_transfer_params": params}
    plan = plan_of(msgspec.json.encode(body), chat=False)

    assert msgspec.json.decode(plan.members["kv_transfer_params"]) == params
    with pytest.raises(NotContinuable, match="kv_transfer_params"):
        plan_of(msgspec.json.encode(body | {"kv_transfer_params": params | {"max_offload_tokens": 1}}), chat=False)
