"""Memory for request bodies that arrive in parts: one bound over all of them.

A long body counts until its request is over, as it may have to be sent to another engine; a short one while it arrives.
Long bodies leave a quarter of the room free, so that short ones still find some when uploads fill the rest.
"""

from __future__ import annotations

from spillway_gateway.config.settings import LONG_BODY_SHARE
from spillway_gateway.errors import GatewayError

SHORT_BYTES_MAX = 1024 * 1024


class NoBodyRoom(GatewayError):
    status = 503
    kind = "service_unavailable"
    code = "gateway_overloaded"
    retry_after_seconds = 2


class BodyRoom:
    """Of one gateway process. bytes_max: limits.bodiesBytesMax, which may change while it runs."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    def require(self, more_bytes: int, body_bytes: int, bytes_max: int) -> None:
        """Whether there is room for so many bytes of a body that has body_bytes with them. Raises NoBodyRoom."""
        share = 1.0 if body_bytes <= SHORT_BYTES_MAX else LONG_BODY_SHARE
        if self.taken_bytes + more_bytes > share * bytes_max:
            raise NoBodyRoom(
                "The gateway holds as many bytes of request bodies as its limits.bodiesBytesMax allows; try again"
            )

    def take(self, more_bytes: int, body_bytes: int, bytes_max: int) -> None:
        """Raises NoBodyRoom."""
        self.require(more_bytes, body_bytes, bytes_max)
        self.taken_bytes += more_bytes

    def give_back(self, taken_bytes: int) -> None:
        self.taken_bytes -= taken_bytes
