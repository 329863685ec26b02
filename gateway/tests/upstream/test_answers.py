"""The kinds of events: the table of every dialect, with events as vLLM 0.23 and 0.32 write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.error_bodies import Dialect
from spillway_gateway.upstream import answers
from spillway_gateway.upstream.answers import (
    READ_BYTES_MAX,
    Kind,
    data_at,
    endings,
    ends_unmarked,
    first_event,
    gives_up,
    is_cut,
    is_cut_inside,
    plain_failure,
    says_nothing,
    without_surplus,
)

CHAT, MESSAGES, RESPONSES = Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.RESPONSES
ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
RESPONSE = {"id": "resp_1", "object": "response", "status": "in_progress", "background": False, "error": None}
# What the Messages route of both versions makes of an error in the chat stream behind it.
QUOTED = (
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, "
    "input_value={'error': {'message': 'En...am': None, 'code': %d}}, input_type=dict]\n"
)


def choice(**fields: Any) -> dict[str, Any]:
    return {**ENVELOPE, "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **fields}]}


def error(code: Any, kind: str = "", message: str = "m") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def sse(document: dict[str, Any], dialect: Dialect = CHAT, end: str = "\n") -> bytes:
    name = f"event: {document['type']}{end}" if dialect is not CHAT and "type" in document else ""
    return f"{name}data: {json.dumps(document)}{end}{end}".encode()


EVENTS: list[tuple[Dialect, dict[str, Any], Kind]] = [
    (CHAT, choice(delta={"role": "assistant", "content": ""}), Kind.PREAMBLE),
    (CHAT, choice(delta={"role": "assistant"}), Kind.PREAMBLE),
    (CHAT, choice(delta={"role": "assistant", "content": None, "tool_calls": []}), Kind.PREAMBLE),
    (CHAT, choice(delta={}), Kind.PREAMBLE),
    (CHAT, choice(delta={"content": ""}), Kind.PREAMBLE),
    (CHAT, choice(text=""), Kind.PREAMBLE),
    (CHAT, choice(delta={"content": " "}), Kind.PART),
    (CHAT, choice(delta={"role": "assistant", "content": "a"}), Kind.PART),
    (CHAT, choice(delta={"reasoning": "a"}), Kind.PART),
    (CHAT, choice(delta={"reasoning_content": "a"}), Kind.PART),
    (CHAT, choice(delta={"refusal": "a"}), Kind.PART),
    (CHAT, choice(delta={"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}), Kind.PART),
    (CHAT, choice(text="a"), Kind.PART),
    (CHAT, choice(token_ids=[5]), Kind.PART),  # /inference/v1/generate
    (CHAT, choice(delta={"content": ""}, finish_reason="stop"), Kind.PART),
    (CHAT, {**ENVELOPE, "choices": [], "usage": {"prompt_tokens": 1}}, Kind.USAGE),
    (CHAT, {**ENVELOPE, "choices": []}, Kind.USAGE),
    (CHAT, {"usage": {"prompt_tokens": 1}}, Kind.USAGE),
    (CHAT, {**choice(delta={"role": "assistant"}), "error": None}, Kind.PREAMBLE),
    (CHAT, error(500, "InternalServerError"), Kind.FAILED),
    (CHAT, error(503, "ServiceUnavailableError"), Kind.FAILED),
    (CHAT, error("500"), Kind.FAILED),
    (CHAT, error("engine_disconnected", "upstream_error"), Kind.FAILED),  # of another gateway
    (CHAT, error(None), Kind.FAILED),
    (CHAT, {"error": "boom"}, Kind.FAILED),
    (CHAT, error(400, "BadRequestError"), Kind.REFUSED),
    (CHAT, error(501, "NotImplementedError"), Kind.REFUSED),
    (CHAT, error("404", "NotFoundError"), Kind.REFUSED),
    (CHAT, error(None, "BadRequestError"), Kind.REFUSED),
    (CHAT, error("model_not_found", "invalid_request_error"), Kind.REFUSED),
    (CHAT, {"object": "error", "message": "m", "code": 400}, Kind.REFUSED),
    (CHAT, {"object": "error", "message": "m", "code": 500}, Kind.FAILED),
    (CHAT, {"unknown": 1}, Kind.PART),
    (CHAT, {"type": "ping"}, Kind.NOTHING),
    (CHAT, {"type": "keepalive"}, Kind.NOTHING),
    (CHAT, choice(delta={}, finish_reason="error"), Kind.FAILED),
    (CHAT, choice(text="a", finish_reason="error"), Kind.FAILED),
    (CHAT, choice(delta={"content": ""}, finish_reason="abort"), Kind.FAILED),
    (CHAT, choice(text="", finish_reason="abort"), Kind.FAILED),
    (MESSAGES, {"type": "message_start", "message": {"id": "1", "content": []}}, Kind.PREAMBLE),
    (MESSAGES, {"type": "ping"}, Kind.NOTHING),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, Kind.PREAMBLE),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": ""}}, Kind.PREAMBLE),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "text", "text": "a"}}, Kind.PART),
    (
        MESSAGES,
        {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "1", "name": "f", "input": {}}},
        Kind.PREAMBLE,
    ),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}, Kind.PREAMBLE),
    (MESSAGES, {"type": "content_block_stop", "index": 0}, Kind.PREAMBLE),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, Kind.PART),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}}, Kind.PART),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}, Kind.PART),
    (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, Kind.PART),
    (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}}, Kind.FAILED),
    (MESSAGES, {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 1}}, Kind.PART),
    (MESSAGES, {"type": "message_stop"}, Kind.END),
    (MESSAGES, {"type": "error", "error": {"type": "internal_error", "message": "m"}}, Kind.FAILED),
    (MESSAGES, {"type": "error", "error": {"type": "internal_error", "message": QUOTED % 500}}, Kind.FAILED),
    (MESSAGES, {"type": "error", "error": {"type": "internal_error", "message": QUOTED % 400}}, Kind.REFUSED),
    (MESSAGES, {"type": "error", "error": {"type": "api_error", "message": "m"}}, Kind.FAILED),
    (MESSAGES, {"type": "error", "error": {"type": "overloaded_error", "message": "m"}}, Kind.FAILED),
    (MESSAGES, {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}, Kind.REFUSED),
    (MESSAGES, {"type": "error", "error": {"type": "rate_limit_error", "message": "m"}}, Kind.REFUSED),
    (MESSAGES, {"object": "error", "message": "m", "type": "InternalServerError", "code": 500}, Kind.FAILED),
    (MESSAGES, {"object": "error", "message": "m", "type": "BadRequestError", "code": 400}, Kind.REFUSED),
    (RESPONSES, {"type": "response.created", "response": RESPONSE}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.queued", "response": RESPONSE}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.in_progress", "response": RESPONSE}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "message", "content": []}}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.output_text.delta", "delta": ""}, Kind.PREAMBLE),
    (RESPONSES, {"type": "response.output_text.delta", "delta": "a"}, Kind.PART),
    (RESPONSES, {"type": "response.reasoning_text.delta", "delta": "a"}, Kind.PART),
    (RESPONSES, {"type": "response.function_call_arguments.delta", "delta": "{"}, Kind.PART),
    (RESPONSES, {"type": "response.output_text.done", "text": "a"}, Kind.PART),
    (RESPONSES, {"type": "response.completed", "response": {**RESPONSE, "status": "completed"}}, Kind.END),
    (RESPONSES, {"type": "response.incomplete", "response": {**RESPONSE, "status": "incomplete"}}, Kind.END),
    (RESPONSES, {"type": "response.completed", "response": {**RESPONSE, "status": "failed"}}, Kind.FAILED),
    (RESPONSES, {"type": "response.completed", "response": {**RESPONSE, "status": "cancelled"}}, Kind.FAILED),
    (
        RESPONSES,
        {"type": "response.cancelled", "response": {**RESPONSE, "status": "cancelled", "background": True}},
        Kind.END,
    ),
    (RESPONSES, {"type": "response.failed", "response": {**RESPONSE, "status": "failed"}}, Kind.FAILED),
    (RESPONSES, {"type": "response.failed", "response": {"error": {"code": "server_error"}}}, Kind.FAILED),
    (RESPONSES, {"type": "response.failed", "response": {"error": {"code": "invalid_prompt"}}}, Kind.REFUSED),
    (RESPONSES, {"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded"}}}, Kind.REFUSED),
    (RESPONSES, {"type": "error", "code": "server_error", "message": "m", "sequence_number": 2}, Kind.FAILED),
    (RESPONSES, {"type": "error", "code": None, "message": "m"}, Kind.FAILED),
    (RESPONSES, {"type": "error", "code": "invalid_prompt", "message": "m"}, Kind.REFUSED),
    (RESPONSES, {"type": "error", "error": {"code": 400, "message": "m"}}, Kind.REFUSED),
    (RESPONSES, error(500), Kind.FAILED),
    (RESPONSES, {"object": "error", "message": "m", "type": "InternalServerError", "code": 500}, Kind.FAILED),
    (RESPONSES, {"type": "response.something_new"}, Kind.PART),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("dialect", "document", "kind"), EVENTS)
def test_the_kind_of_an_event(dialect: Dialect, document: dict[str, Any], kind: Kind, end: str) -> None:
    event = sse(document, dialect, end)
    named_by_data_alone = f"data:{json.dumps(document)}{end}{end}".encode()
    named_as_sse_does = f"event: message{end}".encode() + named_by_data_alone
    over_lines = event.replace(b"{", f"{{{end}data: ".encode(), 1)
    for each in (event, named_by_data_alone, named_as_sse_does, over_lines, b": comment\n\n" + event):
        assert first_event(each, dialect).kind is kind
        ended = [found.kind for found in endings(each, dialect)]
        assert ended == ([kind] if kind in (Kind.END, Kind.REFUSED, Kind.FAILED) else [])
        assert says_nothing(each, dialect) is (kind is Kind.NOTHING)


MESSAGE = {"id": "1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "a"}]}
SAID = {"message": {"role": "assistant", "content": "a"}}
WHOLE_RESPONSE = {**RESPONSE, "status": "completed"}
# As vLLM 0.23 and 0.32 answer a request that they abort, or else.
PLAIN: list[tuple[Dialect, int, Any, bool]] = [
    (CHAT, 200, choice(**SAID, finish_reason="abort"), True),
    (CHAT, 200, {"choices": [choice(**SAID, finish_reason=why)["choices"][0] for why in ("stop", "abort")]}, True),
    (CHAT, 200, choice(text="", finish_reason="abort"), True),
    (CHAT, 200, choice(token_ids=[], finish_reason="abort"), True),
    (CHAT, 200, choice(text="", finish_reason="error"), True),
    (CHAT, 200, error(500), True),
    (CHAT, 200, {"object": "error", "message": "m", "code": 503}, True),
    (CHAT, 200, error(400), False),
    (CHAT, 200, choice(**SAID, finish_reason="stop"), False),
    (CHAT, 200, choice(text='{"finish_reason": "abort"}', finish_reason="length"), False),
    (CHAT, 200, choice(text="abort", finish_reason="stop", logprobs={"tokens": ["abort", "error"]}), False),
    (CHAT, 200, {"object": "list", "data": [{"embedding": [0.5]}]}, False),
    (CHAT, 200, {"count": 1, "tokens": [1], "error": None}, False),
    (CHAT, 200, ["error"], False),
    (CHAT, 400, choice(**SAID, finish_reason="abort"), False),
    (CHAT, 500, error(500, message="Internal server error"), True),
    (CHAT, 500, error(500, message="EngineCore encountered an issue. See stack trace"), True),
    (CHAT, 500, error(500, message="list index out of range"), False),
    (MESSAGES, 200, MESSAGE, True),
    (MESSAGES, 200, {**MESSAGE, "stop_reason": None}, True),
    (MESSAGES, 200, {**MESSAGE, "stop_reason": "end_turn"}, False),
    (MESSAGES, 200, {**MESSAGE, "content": [{"input": {"stop_reason": None}}], "stop_reason": "tool_use"}, False),
    (MESSAGES, 200, {"type": "error", "error": {"type": "api_error", "message": "m"}}, True),
    (MESSAGES, 200, {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}, False),
    (MESSAGES, 200, {"input_tokens": 3}, False),
    (MESSAGES, 500, {"type": "error", "error": {"type": "internal_error", "message": "Internal server error"}}, True),
    (RESPONSES, 200, WHOLE_RESPONSE, False),
    (RESPONSES, 200, {**WHOLE_RESPONSE, "metadata": {"status": "cancelled", "error": "x"}}, False),
    (RESPONSES, 200, {**RESPONSE, "status": "cancelled"}, True),
    (RESPONSES, 200, {**RESPONSE, "status": "cancelled", "background": True}, False),
    (RESPONSES, 200, {**RESPONSE, "status": "queued", "background": True}, False),
    (RESPONSES, 200, {**RESPONSE, "status": "incomplete"}, False),
    (RESPONSES, 200, {**RESPONSE, "status": "failed", "error": {"code": "server_error"}}, True),
    (RESPONSES, 200, {**RESPONSE, "status": "failed", "error": {"code": "invalid_prompt"}}, False),
    (RESPONSES, 200, error(500), True),
]


@pytest.mark.parametrize(("dialect", "status", "document", "failed"), PLAIN)
def test_a_plain_reply_says_whether_its_engine_failed(
    dialect: Dialect, status: int, document: Any, failed: bool
) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        body = json.dumps(document, separators=separators).encode()
        assert (plain_failure(status, body, dialect) is not None) is failed
        if status == 200 and "finish_reason" in str(document) and "error" not in document:
            assert gives_up(body, dialect) is failed, "in a part of a long one too"


@pytest.mark.parametrize("document", [b"{}", b"[1, {}]", b'"text"', b' \r\n{"a": 1}\n '])
def test_the_edges_of_a_plain_reply_say_whether_it_is_whole(document: bytes) -> None:
    assert not is_cut(document[:4], document[-4:])
    for short in (document.rstrip()[:-1], b"", b" ", b"null"):
        assert is_cut(short, short)


@pytest.mark.parametrize("document", [*(row[2] for row in PLAIN), {"a": [{"b": {}}, [], '}]"}']}])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_plain_reply_that_ends_anywhere_before_its_end_is_cut(document: Any, indent: int | None) -> None:
    body = json.dumps(document, indent=indent).encode()
    assert not is_cut_inside(body)
    assert not is_cut_inside(b" " + body + b"\r\n")
    for size in range(len(body)):
        assert is_cut_inside(body[:size])


@pytest.mark.parametrize(
    "odd",
    [
        b'{"logprob": NaN}',
        b'{"logprob": -Infinity}',
        b'{"text": "\xff\x01"}',
        b'{"text": "half of a pair: \\ud83d"}',
        b'{"text": "\\ude00"}',
        b'{"text": "\\ud83d", "logprob": NaN}',
    ],
)
def test_what_clients_may_read_though_it_is_no_json_is_not_cut(odd: bytes) -> None:
    assert not is_cut_inside(odd)
    assert not is_cut_inside(b"[" * 5000 + b"]" * 5000)
    assert not is_cut_inside(b'{"a": "' + b"x" * READ_BYTES_MAX + b'"}')


@given(st.binary(), st.sampled_from(list(Dialect)), st.sampled_from([200, 500]))
def test_a_plain_reply_that_cannot_be_read_is_no_failure(body: bytes, dialect: Dialect, status: int) -> None:
    assert plain_failure(status, body + b'"error" "abort"', dialect) is None
    assert plain_failure(status, b'{"error":' * 5000, dialect) is None


UNREADABLE = [b"", b" ", b"{", b"\xff\xfe", b"null", b"[1]", b'"x"', b'{"error": NaN}', b'{"response": "gone"}']


@pytest.mark.parametrize("name", ["error", "response.failed", "response.error"])
@pytest.mark.parametrize("data", [*UNREADABLE, pytest.param(b"[" * 100_000, id="nested")])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_failure_whose_data_cannot_be_read_is_one(name: str, data: bytes, end: bytes) -> None:
    event = end.join([b"event: " + name.encode(), b"data: " + data, b"", b""])
    assert first_event(b": a\n\n" + event, RESPONSES).kind is Kind.FAILED
    assert [found.kind for found in endings(event, RESPONSES)] == [Kind.FAILED]
    assert not says_nothing(event, RESPONSES)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(
    "comment",
    [
        *(b": keep-alive\n\n", b":\n\n", b": a\r\n\r\n", b": a\n: b\n\n", b"id: 1\n\n", b"event: a\n\n"),
        *(b"data:\n\n", b"data: \r\n\r\n", b"event: ping\ndata:\n\n", b'event: ping\ndata: {"time": 1}\n\n'),
    ],
)
def test_a_comment_says_nothing(dialect: Dialect, comment: bytes) -> None:
    assert first_event(comment * 3, dialect).kind is Kind.NOTHING
    assert says_nothing(comment, dialect)
    assert endings(comment, dialect) == []


def test_the_first_part_decides_about_a_chunk_of_several() -> None:
    role = sse(choice(delta={"role": "assistant", "content": ""}))
    text, failed = sse(choice(delta={"content": "a"})), sse(error(500))
    assert first_event(b": a\n\n" + role, CHAT).kind is Kind.PREAMBLE
    assert first_event(role + text + failed, CHAT).kind is Kind.PART
    assert first_event(role + failed + b"data: [DONE]\n\n", CHAT).kind is Kind.FAILED
    assert [event.kind for event in endings(text + failed + b"data: [DONE]\n\n", CHAT)] == [Kind.FAILED, Kind.END]


def test_token_ids_that_the_gateway_asked_for_are_no_part() -> None:
    event = sse(choice(delta={"content": ""}, token_ids=[5]))
    assert first_event(event, CHAT).kind is Kind.PART
    assert first_event(event, CHAT, ids_asked=True).kind is Kind.PREAMBLE


def test_the_id_of_a_background_response_is_not_held_back() -> None:
    created = {"type": "response.created", "response": {**RESPONSE, "background": True}}
    assert first_event(sse(created, RESPONSES), RESPONSES).binds
    assert not first_event(sse({**created, "response": RESPONSE}, RESPONSES), RESPONSES).binds


@pytest.mark.parametrize("name", ["response.completed", "response.incomplete", "response.cancelled", "message_stop"])
def test_an_end_whose_data_cannot_be_read_is_one(name: str) -> None:
    dialect = Dialect.ANTHROPIC if name == "message_stop" else Dialect.RESPONSES
    event = b'event: %s\ndata: {"type": "%s", "response": {"usage": NaN}}\n\n' % (name.encode(), name.encode())
    assert [each.kind for each in endings(event, dialect)] == [Kind.END]


def test_a_preamble_that_is_cut_is_one() -> None:
    event = sse({"type": "response.created", "response": {**RESPONSE, "instructions": "x" * 100}}, RESPONSES)
    assert first_event(event[:120], RESPONSES).kind is Kind.PREAMBLE


DONE = b"data: [DONE]\n\n"
WHOLE = {
    CHAT: sse(choice(delta={"content": "a"})) + DONE,
    MESSAGES: sse({"type": "message_stop"}, MESSAGES),
    RESPONSES: sse({"type": "response.completed", "response": {"status": "completed"}}, RESPONSES),
}


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("cut", [False, True])
def test_behind_the_end_of_an_answer_only_another_ending_is_left(dialect: Dialect, cut: bool) -> None:
    surplus = b": a\n\n" + sse(choice(text="second")) + WHOLE[MESSAGES] + WHOLE[RESPONSES]
    last = sse(error(500), dialect)
    pieces = [WHOLE[dialect], surplus, DONE, surplus, last]
    passed, complete = b"", False
    for piece in pieces if cut else [b"".join(pieces)]:
        left, complete = without_surplus(piece, dialect, complete=complete)
        passed += left
    assert complete
    assert passed == WHOLE[dialect] + DONE + last


@given(st.binary() | st.text().map(str.encode), st.sampled_from(list(Dialect)))
def test_nothing_is_taken_of_a_stream_that_has_not_ended(events: bytes, dialect: Dialect) -> None:
    left, complete = without_surplus(events, dialect, complete=False)
    assert complete or left == events


@pytest.mark.parametrize("complete", [False, True])
def test_of_many_events_only_those_that_may_end_a_stream_are_parsed(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes | None] = []
    read = answers._read

    def counted(name: str, data: bytes | None, *how: Any, **named: Any) -> answers.Event:
        parsed.append(data)
        return read(name, data, *how, **named)

    monkeypatch.setattr(answers, "_read", counted)
    events = 30 * sse(choice(delta={"content": "a"})) + sse(error(400)) + DONE
    assert without_surplus(events, CHAT, complete=complete)[1]
    assert [found.kind for found in endings(events, CHAT)] == [Kind.REFUSED, Kind.END]
    assert set(parsed) == {json.dumps(error(400)).encode(), b"[DONE]"}


def test_a_stream_without_its_mark_is_whole_where_its_answer_is() -> None:
    text, finish = choice(delta={"content": "a"}), choice(delta={}, finish_reason="stop")
    assert ends_unmarked(sse(finish), CHAT)
    assert ends_unmarked(sse(finish) + sse({**ENVELOPE, "choices": [], "usage": {}}), CHAT)
    assert ends_unmarked(sse({**ENVELOPE, "choices": [], "usage": {}}), CHAT, choices=2)
    assert not ends_unmarked(sse(finish), CHAT, choices=2), "the other one may have no end"
    assert not ends_unmarked(sse(text), CHAT)
    assert not ends_unmarked(b"", CHAT)
    assert not ends_unmarked(sse({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, MESSAGES), MESSAGES)


@given(st.text(), st.sampled_from(list(Dialect)))
def test_generated_text_never_ends_a_stream(text: str, dialect: Dialect) -> None:
    text += 'event: error\n\ndata: [DONE]\n\n{"error": {"code": 500}} "error" message_stop response.completed'
    documents = {
        CHAT: choice(delta={"content": text}),
        MESSAGES: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}},
        RESPONSES: {"type": "response.output_text.delta", "delta": text},
    }
    for ascii_alone in (True, False):
        event = json.dumps(documents[dialect], ensure_ascii=ascii_alone).encode("utf-8", "surrogatepass")
        assert endings(b"data: " + event + b"\n\n", dialect) == []


@given(st.binary(), st.sampled_from(list(Dialect)))
def test_any_bytes_are_read(events: bytes, dialect: Dialect) -> None:
    first_event(events, dialect)
    endings(events + b'"error"', dialect)
    says_nothing(events, dialect)
    ends_unmarked(events, dialect)
    data_at(events, len(events) // 2)
