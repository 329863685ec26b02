"""The request that an engine gets: its head filtered, the body's bytes unchanged. Pure."""

from __future__ import annotations

from functools import lru_cache

from spillway_settings.wire import OWN_HEADERS_PREFIX, RANK_HEADER

Headers = list[tuple[bytes, bytes]]
Body = bytes | bytearray  # a long one is not copied to become bytes

_RANK_HEADER = RANK_HEADER.encode()
_NOTHING: frozenset[bytes] = frozenset()
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The gateway reads replies, for usage, errors and ends: no client may agree with an engine on another encoding, on a
# part of a reply, or on none.
_OF_THE_REPLYS_FORM = frozenset(
    {
        b"accept-encoding",
        b"range",
        b"if-range",
        b"if-match",
        b"if-none-match",
        b"if-modified-since",
        b"if-unmodified-since",
        b"a-im",
    }
)
# Set by the gateway itself, or refused from callers: the rank would let a client pick a worker, and the internal
# headers would let it pose as the gateway.
_DROPPED_FROM_CALLERS = (
    HOP_BY_HOP | _OF_THE_REPLYS_FORM | {b"host", b"content-length", b"expect", _RANK_HEADER, b"x-request-id"}
)
_INTERNAL_PREFIX = OWN_HEADERS_PREFIX.encode()
# The only headers of an engine that clients get: those that a reader of the body needs, and when to ask again.
# Everything else is the gateway's to say (the request's id, limits, caching, CORS), describes the engine's own address
# (redirects, cookies), or would steer what stands in front: Envoy obeys `x-envoy-*` and `endpoint-load-metrics`, nginx
# `x-accel-*`, browsers a score of others, and each release of them may obey more.
_OF_REPLIES = frozenset(
    {
        b"content-length",
        b"content-type",
        b"metadata",  # of poolings whose numbers are bytes: which has their shapes
        b"retry-after",
    }
)
# A page or a script of an engine would run in a browser with the gateway's origin.
_TYPES = frozenset({b"application/json", b"application/octet-stream", b"text/event-stream", b"text/plain"})
_UNKNOWN_TYPE = (b"content-type", b"application/octet-stream")  # without any, a browser guesses


def request_head(
    path: bytes,
    host: bytes,
    headers: Headers,
    body_bytes: int,
    request_id: bytes,
    *,
    method: bytes = b"POST",
    rank: int | None = None,
) -> bytes:
    """Head of the request to the engine.

    path: with its query. headers: the caller's, names in lower case as ASGI gives them. The caller's header values
    were parsed by the server, so none holds a line break. rank: the data parallel rank that is to take it.
    """
    named = connection_named(headers)
    lines = [method + b" " + path + b" HTTP/1.1\r\nhost: " + host]
    for name, value in headers:
        if name in _DROPPED_FROM_CALLERS or name in named or name.startswith(_INTERNAL_PREFIX):
            continue
        lines.append(name + b": " + value)
    if rank is not None:
        lines.append(_RANK_HEADER + b": %d" % rank)
    lines.append(b"accept-encoding: identity\r\nx-request-id: " + request_id)
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    return b"\r\n".join(lines)


def reply_headers(headers: Headers) -> Headers:
    """The engine's headers as the client gets them: each once."""
    named = connection_named(headers)
    kept = {name: value for name, value in reversed(headers) if name in _OF_REPLIES and name not in named}
    kind = kept.pop(b"content-type", b"")
    return [(b"content-type", kind) if _is_known(kind) else _UNKNOWN_TYPE, *kept.items()]


@lru_cache(maxsize=64)
def _is_known(kind: bytes) -> bool:
    return kind.partition(b";")[0].strip().lower() in _TYPES


def connection_named(headers: Headers) -> frozenset[bytes]:
    """Header names that the Connection header makes hop-by-hop (RFC 9110, 7.6.1)."""
    if b"connection" not in dict(headers):
        return _NOTHING
    values = [value for name, value in headers if name == b"connection"]
    named = {token.strip().lower() for value in values for token in value.split(b",")}
    return frozenset(named - {b"close", b"keep-alive", b""})


def first_values(headers: Headers) -> dict[bytes, bytes]:
    """The first value of each header, by its name."""
    return dict(reversed(headers))


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """The first value of a header; wanted in lower case."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
