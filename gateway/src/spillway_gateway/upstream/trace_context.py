"""W3C trace context: a caller's `traceparent` passes unchanged, and one is generated if there is none.

A generated one has the sampled flag: an engine without a parent samples by its own setting, and a parent that is not
sampled would turn that off.
"""

from __future__ import annotations

import random
import re

from spillway_gateway.upstream.forward import header

_random = random.Random()  # noqa: S311 - ids are no secrets, and a system call for each would cost more than the rest
_SHAPE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def with_trace(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """headers: names in lower case. The same list if it has a traceparent, valid or not."""
    if header(headers, b"traceparent") is not None:
        return headers
    return [*headers, (b"traceparent", new_traceparent())]


def new_traceparent() -> bytes:
    """https://www.w3.org/TR/trace-context/, version 00: neither id is zero."""
    while True:
        trace, span = _random.getrandbits(128), _random.getrandbits(64)
        if trace and span:
            return b"00-%032x-%016x-01" % (trace, span)


def new_request_id() -> bytes:
    """32 hex digits. Names a request in logs, and is no secret."""
    return b"%032x" % _random.getrandbits(128)


def trace_id(headers: list[tuple[bytes, bytes]]) -> str | None:
    """32 hex digits, for logs; None for a traceparent of another shape."""
    found = _SHAPE.match(header(headers, b"traceparent") or b"")
    return found.group(1).decode() if found else None
