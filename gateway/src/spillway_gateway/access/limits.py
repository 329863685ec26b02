"""What one tenant may take of one gateway process: requests at a time, and prompt tokens per minute.

A token bucket of one minute. A request is let in while the bucket holds anything and then takes its whole prompt, so
prompts longer than the bucket work too and are paid for by waiting afterwards.
"""

from __future__ import annotations

import math

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import TenantLimited

WINDOW_SECONDS = 60.0


class TenantUsage:
    """Counters of one tenant. now: monotonic seconds."""

    __slots__ = ("_filled_at", "_level", "running_requests")

    def __init__(self, now: float) -> None:
        self.running_requests = 0
        self._level: float | None = None  # of the bucket; None: full
        self._filled_at = now

    def begin(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Count a request in. Raises TenantLimited, naming the limit and when to come back."""
        most = tenant.concurrent_requests_max
        if most is not None and self.running_requests >= most:
            raise TenantLimited(f"{most} requests of this tenant are running, its limit; send fewer at a time", 1)
        rate = tenant.prompt_tokens_per_minute
        if rate is not None:
            level = self._refilled(rate, now)
            if level <= 0:
                wait = math.ceil(-level * WINDOW_SECONDS / rate) or 1
                raise TenantLimited(f"this tenant's {rate} prompt tokens per minute are used up", wait)
            self._level, self._filled_at = level - prompt_tokens, now
        self.running_requests += 1

    def end(self) -> None:
        self.running_requests -= 1

    def _refilled(self, rate: int, now: float) -> float:
        if self._level is None:
            return float(rate)
        return min(float(rate), self._level + (now - self._filled_at) * rate / WINDOW_SECONDS)
