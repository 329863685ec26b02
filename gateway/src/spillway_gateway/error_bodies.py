"""The gateway's errors in the shape of the API in use: as a JSON body, and as the last event of a stream."""

from __future__ import annotations

import random
import re
from enum import StrEnum

import msgspec

from spillway_gateway.errors import GatewayError

_encode = msgspec.json.encode
RETRY_JITTER_SECONDS_MAX = 5
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":\s?(\d{1,15})')


class Dialect(StrEnum):
    """The error shape of a route. RESPONSES differs from OPENAI in streams only."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


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

    at_event_boundary: False where the engine died inside an event; newlines then end that event first. last_chunk: the
    bytes sent last; the Responses API numbers its events.
    """
    boundary = b"" if at_event_boundary else b"\n\n"
    if dialect is Dialect.OPENAI:
        return boundary + b"data: " + body_of(error) + b"\n\n"
    if dialect is Dialect.ANTHROPIC:
        return boundary + b"event: error\ndata: " + body_of(error, dialect) + b"\n\n"
    numbers = _SEQUENCE_NUMBER.findall(last_chunk)
    number = int(numbers[-1]) + 1 if numbers else 0
    event = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": number,
    }
    return boundary + b"event: error\ndata: " + _encode(event) + b"\n\n"


def headers_of(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Retry-After has jitter, so that clients refused together do not retry together."""
    headers = [(b"content-type", b"application/json")]
    seconds = error.retry_after_seconds
    if seconds is not None:
        jitter = random.randint(0, min(RETRY_JITTER_SECONDS_MAX, seconds + 1))  # noqa: S311 - no secret depends on it
        headers.append((b"retry-after", str(seconds + jitter).encode()))
    return headers
