"""The kinds of a stream's events, and the facts that a plain reply states of its answer, in every dialect. Pure.

| kind     | chat, completions, generate, audio          | /v1/messages                  | /v1/responses             |
| -------- | ------------------------------------------- | ----------------------------- | ------------------------- |
| NOTHING  | comment, empty data, `ping`, `keepalive`    | the same                      | the same                  |
| PREAMBLE | role alone, empty delta                     | `message_start`, block starts | `response.created`, ...   |
| USAGE    | no choice                                   |                               |                           |
| PART     | text, ids, reasoning, tool call, finish     | `content_block_delta`, ...    | `*.delta`, `*.done`       |
| END      | `[DONE]`                                    | `message_stop`                | `response.completed`, ... |
| REFUSED  | `error` of status 4xx                       | `error` of such a type        | `error`, or `failed`, of  |
| FAILED   | any other `error`, finish reason `error`    | any other `error`, the stop   | such a code; of any other |
|          | or `abort`                                  | reason null                   | code; `cancelled`         |

Failover, figures, learned rates, timeouts, the circuit breaker and continuation all go by these kinds. What no row
names counts as a part of an answer, so that nothing unknown is held back or sent twice.

A plain reply with status 200 is one event that holds the whole answer, and the same rows say whether it failed. vLLM
leaves out a stop reason that is null. One that is cut inside its JSON document has failed too, as has a stream that
ends before any part of an answer; of responses alone the end holds the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum, auto
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from spillway_gateway.error_bodies import Dialect, error_in
from spillway_settings.wire import ENDING_ERROR


class Kind(IntEnum):  # whose hash costs a tenth of that of an Enum
    """REFUSED: the request is at fault, and the engine works. FAILED: the engine is at fault."""

    NOTHING = auto()
    PREAMBLE = auto()
    USAGE = auto()
    PART = auto()
    END = auto()
    REFUSED = auto()
    FAILED = auto()


class Event(NamedTuple):
    """message: the error's message; ENDING_ERROR if the engine ends and no request is the reason. binds: what the
    client may do next depends on this event, so that it is not held back."""

    kind: Kind
    message: str = ""
    binds: bool = False


EDGE_BYTES = 64  # of a plain reply's beginning and end, and of the part before, with which what is cut is found
_ENDS_OF = {ord("{"): ord("}"), ord("["): ord("]"), ord('"'): ord('"')}  # a document's last byte, by its first one
_JSON_BLANKS = b" \t\r\n"
_BEGINS = (b"{", b"[")  # of documents whose last byte shows their end
READ_BYTES_MAX = 64 * 1024  # of a plain reply that is read to its end on the event loop: 1 us, at most 0.6 ms
_skip_document = msgspec.json.Decoder(msgspec.Raw).decode
_CUT = "truncated"  # how msgspec's message calls a document that has not ended
BEFORE_AN_ANSWER = frozenset({Kind.NOTHING, Kind.PREAMBLE, Kind.USAGE})
_ENDS = frozenset({Kind.END, Kind.REFUSED, Kind.FAILED})
_NOTHING, _PREAMBLE, _PART, _END = (Event(kind) for kind in (Kind.NOTHING, Kind.PREAMBLE, Kind.PART, Kind.END))
# An event that ends a stream holds one of these. Quotes inside a JSON string are escaped, so most generated text does
# not; what does is parsed.
_MARKS = {
    Dialect.OPENAI: (b"[DONE]", b'"error"', b'"abort"', b"event:"),
    Dialect.ANTHROPIC: (b"message_stop", b"message_delta", b'"error"', b"event: error", b"event:error", b"[DONE]"),
    Dialect.RESPONSES: (
        *(b"response." + end for end in (b"completed", b"incomplete", b"cancelled", b"failed", b"error")),
        b'"error"',
        b"event: error",
        b"event:error",
        b"[DONE]",
    ),
}
_FAILURES = frozenset({"error", "response.failed", "response.error"})
_ALIVE = frozenset({"ping", "keepalive"})
_NO_NAME = frozenset({"", "message"})  # SSE's own name of an event that is given none
# Finish reasons of answers that the engine gave up. vLLM aborts what runs when it is paused or shut down.
_GIVEN_UP = {"error": "it ended an answer with the finish reason 'error'", "abort": "it aborted the request"}
_RESPONSES_PREAMBLE = frozenset({"response.created", "response.queued", "response.in_progress"})
_RESPONSES_END = frozenset({"response.completed", "response.incomplete", "response.cancelled"})
# Messages of vLLM's replies with status 500 that are the engine's fault. Any other may be the request's.
_DEAD_CORE = "EngineCore encountered an issue"  # EngineDeadError of 0.23
_GENERATION_ERROR = "Internal server error"  # in place of an answer with the finish reason `error`
# Never found in generated text, whose quotes are escaped.
_GIVEN_UP_IN_PART = re.compile(rb'"finish_reason"\s*:\s*"(?:abort|error)"').search
_ENDS_BY_NAME = _RESPONSES_END | {"message_stop"}
_PAYLOAD = ("text", "thinking", "data", "input", "content", "arguments", "summary", "encrypted_content", "output",
            "action", "code", "refusal", "result", "transcript")  # fmt: skip
# vLLM turns an error of its chat stream into one of its own in /v1/messages, which quotes the first one's end.
_QUOTED_CODE = re.compile(r"'code': (\d{3})\}\}, input_type=dict")
# Words for a status of 4xx, lower case, letters alone; besides those that begin with one of the prefixes.
_CLIENTS = frozenset(
    {
        "authenticationerror",
        "badrequest",
        "badrequesterror",
        "billingerror",
        "contentfilter",
        "contextlengthexceeded",
        "insufficientquota",
        "modelnotfound",
        "notfound",
        "notfounderror",
        "notimplemented",
        "notimplementederror",
        "permissiondenied",
        "permissiondeniederror",
        "permissionerror",
        "ratelimiterror",
        "ratelimitexceeded",
        "requesttoolarge",
        "unprocessableentity",
        "unprocessableentityerror",
        "validationerror",
    }
)
_CLIENTS_PREFIXES = ("invalid", "unsupported", "image", "emptyimage", "failedtodownloadimage")
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r").finditer
_NO_LETTER = re.compile(r"[^a-z]").sub


class _Choice(msgspec.Struct):
    delta: Any = None
    message: Any = None
    text: Any = None
    finish_reason: Any = None
    token_ids: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | msgspec.UnsetType | None = msgspec.UNSET
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None
    type: Any = None


class _Response(msgspec.Struct):
    status: Any = None
    error: Any = None
    background: Any = None


class _Typed(_Response):
    """An event, or a plain reply, which has the status and the error of a response itself."""

    type: Any = None
    object: Any = None
    stop_reason: Any = None
    code: Any = None
    message: Any = None
    delta: Any = None
    content_block: Any = None
    item: Any = None
    part: Any = None
    response: _Response | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_typed = msgspec.json.Decoder(_Typed).decode


def first_event(events: bytes, dialect: Dialect, *, ids_asked: bool = False) -> Event:
    """The event among these that decides whether an answer has begun: the first that is part of one or ends it. Else
    one that is held back until then, and NOTHING if all are comments. ids_asked: token ids are not the client's."""
    found = _NOTHING
    for name, data in _fields(events):
        event = _read(name, data, dialect, ids_asked)
        if event.kind not in BEFORE_AN_ANSWER:
            return event
        if event.kind is not Kind.NOTHING and not found.binds:
            found = event
    return found


def may_end(events: bytes, dialect: Dialect) -> bool:
    """Whether one of these events may end a stream. Asked for every event: a generator would take longer than the
    searches."""
    for mark in _MARKS[dialect]:  # noqa: SIM110 - see above
        if mark in events:
            return True
    return False


def endings(events: bytes, dialect: Dialect) -> list[Event]:
    """The events among these that end a stream, for good or bad."""
    if not may_end(events, dialect):
        return []
    marked = [event for event in _each(events) if may_end(event, dialect)]
    found = [_read(name, data, dialect, ids_asked=False) for event in marked for name, data in _fields(event)]
    return [event for event in found if event.kind in _ENDS]


def without_surplus(events: bytes, dialect: Dialect, *, complete: bool) -> tuple[bytes, bool]:
    """The events without those behind the end of an answer, where only `[DONE]`, with which vLLM ends every dialect,
    and errors may follow. complete: whether earlier events had the end; returned for the next ones."""
    if not complete and not may_end(events, dialect):
        return events, False
    kept: list[bytes] = []
    for event in _each(events):
        kinds = {found.kind for found in endings(event, dialect)}
        if not complete or kinds & {Kind.REFUSED, Kind.FAILED} or _is_mark(event):
            kept.append(event)
        complete = complete or Kind.END in kinds
    return b"".join(kept), complete


def _each(events: bytes) -> list[bytes]:
    """One by one, each with the blank line that ends it."""
    ends = [0, *(blank.end() for blank in _BLANK_LINE(events)), len(events)]
    return [events[start:end] for start, end in pairwise(ends) if end > start]


def _is_mark(event: bytes) -> bool:
    return any(data is not None and data.strip() == b"[DONE]" for _, data in _fields(event))


def says_nothing(events: bytes, dialect: Dialect) -> bool:
    """Whether all of them only keep the connection alive."""
    if (b"data: {" in events or b"data:{" in events) and b"ping" not in events and b"keepalive" not in events:
        return False
    return all(_read(name, data, dialect, ids_asked=False).kind is Kind.NOTHING for name, data in _fields(events))


def ends_unmarked(last_events: bytes, dialect: Dialect, choices: int = 1) -> bool:
    """Whether a stream that ended behind these events, without its mark, was whole: usage was last, or the finish
    reason of its only choice. In the dialects whose events have names, the last one is always the mark."""
    if dialect is not Dialect.OPENAI:
        return False
    for _, data in _fields(last_events):
        try:
            chunk = _decode_chunk(data or b"")
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if not chunk.choices or (choices == 1 and any(choice.finish_reason is not None for choice in chunk.choices)):
            return True
    return False


def plain_failure(status: int, body: bytes, dialect: Dialect) -> str | None:
    """The engine's message, as in Event, if a whole plain reply of JSON says that the engine failed or ends."""
    if status == 503 and says_it_ends(status, body):
        return ENDING_ERROR
    if status == 500:
        error = error_in(body)
        failed = error is not None and (_DEAD_CORE in error.message or error.message == _GENERATION_ERROR)
        return error.message if error is not None and failed else None
    if status != 200 or (dialect is Dialect.OPENAI and b'"error"' not in body and b'"abort"' not in body):
        return None
    try:
        event = _plain(body, dialect)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return event.message if event.kind is Kind.FAILED else None


def says_it_ends(status: int, body: bytes) -> bool:
    """Whether a whole plain reply says that the engine ends, for a reason that no request is."""
    error = error_in(body) if status == 503 else None
    return error is not None and error.type == ENDING_ERROR


def is_cut(beginning: bytes, end: bytes) -> bool:
    """Whether the first and last byte show that a plain reply is no whole JSON document."""
    first, last = beginning.lstrip(_JSON_BLANKS)[:1], end.rstrip(_JSON_BLANKS)[-1:]
    return not first or not last or _ENDS_OF.get(first[0]) != last[0]


def is_cut_inside(body: bytes) -> bool:
    """Whether a plain reply is no whole JSON document. A short reply is read for that; of a long one only the edges are
    looked at. Values that JSON does not have but some clients read (NaN) do not count as cut, nor does a document that
    is nested too deeply to be read."""
    if len(body) <= READ_BYTES_MAX:
        try:
            _skip_document(body)
            if body[:1] in _BEGINS:
                return False
        except msgspec.DecodeError as error:
            if _CUT in str(error):
                return not _is_read_by_others(body)
        except RecursionError:
            pass
    return is_cut(body[:EDGE_BYTES], body[-EDGE_BYTES:])


def _is_read_by_others(body: bytes) -> bool:
    """Whether another decoder reads the document: msgspec takes half of a surrogate pair before a quote for its end."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def ends_too_early(event: Event, dialect: Dialect) -> bool:
    """Whether a stream's end makes it a failed one, if no part of an answer came before."""
    return event.kind is Kind.END and dialect is not Dialect.RESPONSES


def gives_up(part: bytes, dialect: Dialect) -> bool:
    """Whether a part of a long plain reply says that the engine gave up one of its choices. Other dialects say it of
    the whole reply alone, so a part does not show it."""
    return dialect is Dialect.OPENAI and _GIVEN_UP_IN_PART(part) is not None


def data_at(events: bytes, at: int) -> bytes:
    """The data of the event that lies at this position, all lines of it."""
    start = max((blank.end() for blank in _BLANK_LINE(events, 0, at)), default=0)
    end = next((blank.start() for blank in _BLANK_LINE(events, at)), len(events))
    return next((data for _, data in _fields(events[start:end]) if data is not None), b"")


def is_engines_fault(error: Mapping[str, Any]) -> bool:
    """Whether an error object of an engine says that the engine failed, not the request. An error that says neither
    counts as the engine's."""
    code, kind = error.get("code"), error.get("type")
    if isinstance(code, str) and code.isdecimal():
        code = int(code[:9])
    if isinstance(code, int) and not isinstance(code, bool):
        return not (400 <= code < 500 or code == 501)  # 501: vLLM's NotImplementedError, about the request
    quoted = _QUOTED_CODE.search(str(error.get("message")))
    if quoted is not None:
        return is_engines_fault({"code": int(quoted[1])})
    return not any(isinstance(word, str) and _is_clients(word) for word in (code, kind))


def message_in(error: Mapping[str, Any]) -> str:
    """The message of an engine's error object, as in Event."""
    message = ENDING_ERROR if error.get("type") == ENDING_ERROR else error.get("message")
    return message if isinstance(message, str) else "no message"


def _is_clients(word: str) -> bool:
    letters = _NO_LETTER("", word.lower())
    return letters in _CLIENTS or letters.startswith(_CLIENTS_PREFIXES)


def _fields(events: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Name and data of each event; no data: a comment. The line endings are those that bytes.splitlines knows."""
    name, data, seen = "", None, False
    for line in (*events.splitlines(), b""):
        if not line:
            if seen:
                yield name, data
            name, data, seen = "", None, False
            continue
        seen = True
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data = value if data is None else data + b"\n" + value
        elif field == b"event":
            name = value.decode("utf-8", "replace")


def _read(name: str, data: bytes | None, dialect: Dialect, ids_asked: bool) -> Event:
    if data is None or (not data.strip() and name not in _FAILURES):
        return _NOTHING
    if data.strip() == b"[DONE]":
        return _END
    try:
        if dialect is Dialect.OPENAI:
            return _chunk(name, _decode_chunk(data), ids_asked)
        return _typed(name, _decode_typed(data), dialect)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        if name in _FAILURES:
            return Event(Kind.FAILED, data[:500].decode("utf-8", "replace"))
        # A long one is passed on in parts, and its beginning alone is no JSON.
        if dialect is not Dialect.OPENAI and name in _ENDS_BY_NAME:
            return _END
        return _PREAMBLE if dialect is Dialect.RESPONSES and name in _RESPONSES_PREAMBLE else _PART


def _plain(body: bytes, dialect: Dialect) -> Event:
    if dialect is Dialect.OPENAI:
        return _chunk("", _decode_chunk(body), ids_asked=False)
    reply = _decode_typed(body)
    return _response_end(reply) if reply.object == "response" else _typed("", reply, dialect)


def _chunk(name: str, chunk: _Chunk, ids_asked: bool) -> Event:
    if chunk.error is not None:
        return _error(chunk.error)
    if name == "error" or chunk.object == "error":
        return _error({"message": chunk.message, "code": chunk.code, "type": chunk.type})
    if chunk.choices is msgspec.UNSET:
        if (chunk.type if name in _NO_NAME else name) in _ALIVE:
            return _NOTHING
        return _PART if chunk.usage is msgspec.UNSET else Event(Kind.USAGE)
    if not chunk.choices:
        return Event(Kind.USAGE)
    for choice in chunk.choices:
        if isinstance(choice.finish_reason, str) and choice.finish_reason in _GIVEN_UP:
            return Event(Kind.FAILED, _GIVEN_UP[choice.finish_reason])
    for choice in chunk.choices:
        delta = choice.delta
        said = any(value for key, value in delta.items() if key != "role") if isinstance(delta, dict) else delta
        if said or choice.text or choice.message or choice.finish_reason is not None:
            return _PART
        if choice.token_ids and not ids_asked:
            return _PART
    return _PREAMBLE


def _typed(name: str, event: _Typed, dialect: Dialect) -> Event:
    kind = event.type if name in _NO_NAME else name
    untyped = event.object == "error" or (kind is None and event.error is not None)  # as in chat
    if untyped or kind in _FAILURES:
        error = event.response.error if event.response is not None else event.error
        if error is None:
            error = {"message": event.message, "code": event.code, "type": event.type if untyped else None}
        return _error(error)
    if kind in _ALIVE:
        return _NOTHING
    return _messages(kind, event) if dialect is Dialect.ANTHROPIC else _responses(str(kind), event)


def _messages(kind: object, event: _Typed) -> Event:
    given_up = kind == "message" and event.stop_reason is None
    if kind == "message_delta" and isinstance(event.delta, dict):
        given_up = event.delta.get("stop_reason", "") is None
    if given_up:
        return Event(Kind.FAILED, _GIVEN_UP["abort"])
    if kind in ("message_start", "content_block_stop"):  # what a block held came before its end
        return _PREAMBLE
    if kind == "content_block_start":
        return _PART if _has_payload(event.content_block) else _PREAMBLE
    if kind == "content_block_delta" and isinstance(event.delta, dict):
        return _PART if any(value for key, value in event.delta.items() if key != "type") else _PREAMBLE
    return _END if kind == "message_stop" else _PART


def _responses(kind: str, event: _Typed) -> Event:
    response = event.response
    if kind in _RESPONSES_END:
        return _END if response is None else _response_end(response)
    if kind in _RESPONSES_PREAMBLE:
        # A background response goes on without this connection, and the client asks for it by the id.
        return Event(Kind.PREAMBLE, binds=response is not None and response.background is True)
    if kind.endswith(".added"):
        return _PART if _has_payload(event.item) or _has_payload(event.part) else _PREAMBLE
    if kind.endswith(".delta") and event.delta is not None:
        return _PART if event.delta else _PREAMBLE
    return _PREAMBLE if kind.endswith(".in_progress") else _PART


def _response_end(response: _Response) -> Event:
    if response.status == "failed" or response.error is not None:
        return _error(response.error or {})
    if response.status == "cancelled" and response.background is not True:
        return Event(Kind.FAILED, _GIVEN_UP["abort"])  # no client can cancel it
    return _END


def _has_payload(block: object) -> bool:
    return isinstance(block, dict) and any(block.get(key) for key in _PAYLOAD)


def _error(error: object) -> Event:
    if not isinstance(error, dict):
        return Event(Kind.FAILED, str(error))
    return Event(Kind.FAILED if is_engines_fault(error) else Kind.REFUSED, message_in(error))
