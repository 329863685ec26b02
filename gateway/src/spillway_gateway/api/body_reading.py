"""Reads a request's body, within its own limit and the budget of all bodies together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from spillway_gateway.client.body_budget import SHORT_BYTES_MAX
from spillway_gateway.client.connection import ClientRequest
from spillway_gateway.config.settings import LimitsConfig, TimeoutsConfig
from spillway_gateway.errors import RequestBodyTimeout, RequestTooLarge, UnsupportedEncoding
from spillway_gateway.upstream.exchange import ClientDisconnected
from spillway_gateway.upstream.forward import Body, Headers

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(
    headers: Headers,
    first: Mapping[bytes, bytes],
    receive: Receive,
    client: ClientRequest,
    *,
    limits: LimitsConfig,
    timeouts: TimeoutsConfig,
) -> Body:
    """Read the whole request body.

    Args:
        headers: all of the request's.
        first: the first value of each of them.
        receive: the server's.
        client: the connection that the body comes from.
        limits: the bound on one body.
        timeouts: the time until it has to be whole.

    Raises:
        RequestTooLarge, BodyBudgetSpent: Before more bytes are read than the limits allow.
        RequestBodyTimeout, UnsupportedEncoding, ClientDisconnected.
    """
    for name, encoding in headers if b"content-encoding" in first else ():
        if name == b"content-encoding" and any(
            each.strip().lower() not in (b"", b"identity") for each in encoding.split(b",")
        ):
            shown = encoding[:40].decode("latin-1")
            raise UnsupportedEncoding(f"A body with content-encoding {shown!r} given; send it without")
    bytes_max = limits.body_bytes_max
    declared = first.get(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    body = client.take_whole_body()
    if body is not None:
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        return body
    if declared is not None and declared.isdigit():
        client.check_body_budget(int(declared))
    client.expect_body(timeouts.body_read_seconds)
    parts: Body = bytearray()  # grows in place: joining the parts of a long body would copy all of it at once
    message: MutableMapping[str, Any] = {"more_body": True}
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if client.body_timed_out:
            raise RequestBodyTimeout(
                "The body came slower than timeouts.bodyReadSeconds and connections.bodyBytesPerSecondMin of the "
                "gateway allow"
            )
        part = message.get("body", b"")
        if len(parts) + len(part) > bytes_max:
            raise _too_large(bytes_max)
        client.reserve_body_bytes(len(part))
        if not parts and not message.get("more_body", False):
            parts = part  # whole at once
            break
        parts += part
    if len(parts) <= SHORT_BYTES_MAX:
        client.release_body_bytes()
    return parts


def _too_large(bytes_max: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is larger than {bytes_max} bytes, the gateway's limits.bodyBytesMax")
