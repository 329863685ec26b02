"""Own errors in OpenAI's shape: as a JSON body, and as the terminal event of a stream."""

from __future__ import annotations

import msgspec

from spillway_gateway.errors import GatewayError

_encode = msgspec.json.encode


def error_body(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as UTF-8 JSON."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def body_of(error: GatewayError) -> bytes:
    return error_body(error.message, error.kind, error.param, error.code)


def event_of(error: GatewayError, *, at_event_boundary: bool) -> bytes:
    """The same object as one server-sent event; no `[DONE]` follows, so no client takes the stream for complete.

    at_event_boundary: False when the engine died inside an event; newlines then end the open line first, so that the
    error is an event of its own.
    """
    return (b"" if at_event_boundary else b"\n\n") + b"data: " + body_of(error) + b"\n\n"


def headers_of(error: GatewayError) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    return headers
