"""Memory for request bodies that arrive in parts: one budget for all of them.

A long body counts until its request ends, since it may be sent to another engine; a short one only while it arrives.
Long bodies get three quarters of the budget, so that short ones still pass while uploads fill the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from spillway_gateway.config.settings import LONG_BODY_SHARE
from spillway_gateway.errors import GatewayError

SHORT_BYTES_MAX = 1024 * 1024


class BodyBudgetSpent(GatewayError):
    """The budget for request bodies has no room for this one."""

    status = 503
    kind = "service_unavailable"
    code = "gateway_overloaded"
    retry_after_seconds = 2


class BodyBudget:
    """The budget of one gateway process. bytes_max: reads limits.bodiesBytesMax, which may change while it runs."""

    def __init__(self, bytes_max: Callable[[], int]) -> None:
        self._bytes_max = bytes_max
        self.reserved_bytes = 0

    def check(self, more_bytes: int, body_bytes: int) -> None:
        """Raises BodyBudgetSpent if more_bytes do not fit, of a body of body_bytes with them."""
        share = 1.0 if body_bytes <= SHORT_BYTES_MAX else LONG_BODY_SHARE
        if self.reserved_bytes + more_bytes > share * self._bytes_max():
            raise BodyBudgetSpent(
                "The gateway holds as many bytes of request bodies as its limits.bodiesBytesMax allows; try again"
            )

    def reserve(self, more_bytes: int, body_bytes: int) -> None:
        """Raises BodyBudgetSpent."""
        self.check(more_bytes, body_bytes)
        self.reserved_bytes += more_bytes

    def release(self, reserved_bytes: int) -> None:
        self.reserved_bytes -= reserved_bytes
