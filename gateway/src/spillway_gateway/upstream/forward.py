"""The request that an engine gets: its head filtered, the body's bytes unchanged. Pure."""

from __future__ import annotations

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
# Headers of replies that engines may not set: client/cors.py says who may read them, proxies in front obey the others
# (`x-envoy-immediate-health-check-fail` takes the gateway out of Envoy's balancing), and so do caches and browsers.
_NOT_FROM_ENGINES = (
    *(_INTERNAL_PREFIX, b"access-control-", b"content-security-policy", b"grpc-"),
    *(b"x-accel-", b"x-forwarded-", b"x-envoy-", b"x-original-", b"x-rewrite-", b"x-real-", b"x-host", b"x-lighttpd-"),
    *(b"x-litespeed-", b"surrogate-", b"cdn-"),
)
# Headers of an engine's reply that clients do not get: its redirects, links and what browsers should keep concern the
# engine's own address, and the request's id is the gateway's.
_REPLY_DROPPED = HOP_BY_HOP | {
    b"date",
    b"server",
    b"location",
    b"content-location",
    b"refresh",
    b"link",
    b"via",
    b"uri",
    b"forwarded",
    b"proxy-status",
    b"set-cookie",
    b"set-cookie2",
    b"authentication-info",
    b"proxy-authentication-info",
    b"clear-site-data",
    b"strict-transport-security",
    # A shared cache would keep a stored response that an engine calls public, for whoever asks for its id.
    b"cache-control",
    b"expires",
    b"etag",
    b"last-modified",
    b"age",
    b"pragma",
    b"report-to",
    b"reporting-endpoints",
    b"speculation-rules",
    b"accept-ch",
    b"critical-ch",
    b"origin-agent-cluster",
    b"nel",
    b"service-worker-allowed",
    b"sourcemap",
    b"x-request-id",
    b"x-sendfile",
    b"alt-svc",
    b"www-authenticate",
}


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
    """The engine's headers as the client gets them."""
    named = connection_named(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in _REPLY_DROPPED and name not in named and not name.startswith(_NOT_FROM_ENGINES)
    ]


def connection_named(headers: Headers) -> frozenset[bytes]:
    """Header names that the Connection header makes hop-by-hop (RFC 9110, 7.6.1)."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return _NOTHING
    named = {token.strip().lower() for value in values for token in value.split(b",")}
    return frozenset(named - {b"close", b"keep-alive", b""})


def header(headers: Headers, wanted: bytes) -> bytes | None:
    """The first value of a header; wanted in lower case."""
    for name, value in headers:
        if name == wanted:
            return value
    return None
