"""W3C trace context of a request: a caller's `traceparent` passes unchanged.

If the caller sends none and the gateway records no traces, engines get none: each begins a trace, or does not, by its
own sampling. A parent's flag would decide that for them.
"""

from __future__ import annotations

import random
import re

from spillway_gateway.upstream.forward import header

_random = random.Random()  # noqa: S311 - ids are no secrets, and a system call for each would cost more than the rest
_SHAPE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def new_request_id() -> bytes:
    """32 hex digits. Names a request in logs, and is no secret."""
    return b"%032x" % _random.getrandbits(128)


def trace_id(headers: list[tuple[bytes, bytes]]) -> str | None:
    """32 hex digits, for logs; None for a traceparent of another shape."""
    found = _SHAPE.match(header(headers, b"traceparent") or b"")
    return found.group(1).decode() if found else None
