"""The gateway's errors in the shape of the API in use: as a JSON body, and as the last event of a stream."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from starlette.responses import Response

from spillway_gateway.errors import GatewayError

_encode = msgspec.json.encode
RETRY_JITTER_SECONDS_MAX = 5
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s?(\d{1,15})')


class Dialect(StrEnum):
    """The error shape of a route. RESPONSES differs from OPENAI in streams only."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Said(msgspec.Struct):
    """An engine's error."""

    message: str = ""
    type: str | None = None
    param: Any = None
    code: int | str | None = None


class _SaidReply(msgspec.Struct):
    error: Said


_decode_reply = msgspec.json.Decoder(_SaidReply).decode
_EVENT_NAMES = {Dialect.OPENAI: b"", Dialect.ANTHROPIC: b"event: error\n"}
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """OpenAI's `{"error": {"message", "type", "param", "code"}}` as UTF-8 JSON."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


INTERNAL_ERROR = error_body("The gateway failed on this request", "server_error", None, "internal_error")


def body_of(error: GatewayError, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """Anthropic's is `{"type": "error", "error": {"type", "message"}}`."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
        return _encode({"type": "error", "error": {"type": kind, "message": error.message}})
    return error_body(error.message, error.kind, error.param, error.code)


def event_of(
    error: GatewayError, dialect: Dialect = Dialect.OPENAI, *, at_event_boundary: bool, last_chunk: bytes = b""
) -> bytes:
    """The error as one server-sent event. No end marker follows, so no client takes the stream for complete.

    at_event_boundary: False if the engine died inside an event; newlines then end that event first. last_chunk: the
    bytes sent last; the Responses API numbers its events.
    """
    boundary = b"" if at_event_boundary else b"\n\n"
    if dialect is Dialect.RESPONSES:
        numbers = _SEQUENCE_NUMBER.findall(last_chunk)
        number = int(numbers[-1]) + 1 if numbers else 0
        return boundary + _responses_event(error.message, error.param, error.code, number)
    return boundary + _EVENT_NAMES[dialect] + b"data: " + body_of(error, dialect) + b"\n\n"


def event_of_reply(status: int, body: bytes, dialect: Dialect) -> bytes:
    """An engine's plain error reply as the first event of a stream that has begun with a comment."""
    said = error_in(body) or Said()
    message = said.message or f"The engine answered {status}"
    code = said.code if said.code is not None else status
    if dialect is Dialect.RESPONSES:
        return _responses_event(message, said.param, str(code), 0)
    if dialect is Dialect.ANTHROPIC:
        kind = said.type or _ANTHROPIC_KINDS.get(status, "api_error")
        document = _encode({"type": "error", "error": {"type": kind, "message": message}})
    else:
        document = error_body(message, said.type or "upstream_error", said.param, code)
    return _EVENT_NAMES[dialect] + b"data: " + document + b"\n\n"


def _responses_event(message: str, param: str | None, code: str | None, number: int) -> bytes:
    event = {"type": "error", "code": code, "message": message, "param": param, "sequence_number": number}
    return b"event: error\ndata: " + _encode(event) + b"\n\n"


def error_in(body: bytes) -> Said | None:
    """The error that an engine's reply is, in OpenAI's or Anthropic's shape."""
    try:
        return _decode_reply(body).error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def retry_after(seconds: int) -> bytes:
    """The value of the header. It has jitter, so that clients refused together do not retry together."""
    jitter = random.randint(0, min(RETRY_JITTER_SECONDS_MAX, seconds + 1))  # noqa: S311 - no secret depends on it
    return b"%d" % (seconds + jitter)


def headers_of(error: GatewayError) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", retry_after(error.retry_after_seconds)))
    return headers


def response_of(error: GatewayError, more_headers: Mapping[str, str] | None = None) -> Response:
    """The error as the framework answers it."""
    response = Response(body_of(error), error.status, more_headers)
    response.raw_headers += headers_of(error)
    return response
