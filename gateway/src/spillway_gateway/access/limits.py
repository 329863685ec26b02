"""What one tenant may take of one gateway process: requests at a time, and tokens per minute.

Token buckets of one minute. A request is let in while each bucket holds anything; it takes its whole prompt at once
and what the reply adds at its end, so prompts longer than a bucket work too and are paid for by waiting afterwards.
"""

from __future__ import annotations

import math

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import TenantLimited

WINDOW_SECONDS = 60.0


class _Bucket:
    __slots__ = ("_filled_at", "_level")

    def __init__(self, now: float) -> None:
        self._level: float | None = None  # None: full, whatever the rate is
        self._filled_at = now

    def wait_seconds(self, rate: int, now: float) -> int:
        """Until the bucket holds anything; 0 when it does."""
        level = self._refilled(rate, now)
        return 0 if level > 0 else math.ceil(-level * WINDOW_SECONDS / rate) or 1

    def take(self, tokens: int, rate: int, now: float) -> None:
        self._level, self._filled_at = self._refilled(rate, now) - tokens, now

    def _refilled(self, rate: int, now: float) -> float:
        if self._level is None:
            return float(rate)
        return min(float(rate), self._level + (now - self._filled_at) * rate / WINDOW_SECONDS)


class TenantUsage:
    """Counters of one tenant. now: monotonic seconds."""

    __slots__ = ("_all_tokens", "_prompt_tokens", "running_requests")

    def __init__(self, now: float) -> None:
        self.running_requests = 0
        self._prompt_tokens = _Bucket(now)
        self._all_tokens = _Bucket(now)

    def begin(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Count a request in. Raises TenantLimited, naming the limit and when to come back."""
        most = tenant.concurrent_requests_max
        if most is not None and self.running_requests >= most:
            raise TenantLimited(f"{most} requests of this tenant are running, its limit; send fewer at a time", 1)
        buckets = [
            (bucket, rate, what)
            for bucket, rate, what in (
                (self._prompt_tokens, tenant.prompt_tokens_per_minute, "prompt tokens"),
                (self._all_tokens, tenant.tokens_per_minute, "tokens"),
            )
            if rate is not None
        ]
        for bucket, rate, what in buckets:
            wait = bucket.wait_seconds(rate, now)
            if wait:
                raise TenantLimited(f"this tenant's {rate} {what} per minute are used up", wait)
        for bucket, rate, _ in buckets:
            bucket.take(prompt_tokens, rate, now)
        self.running_requests += 1

    def end(self, tenant: Tenant, completion_tokens: int, now: float) -> None:
        """Count a request out that begin() let in."""
        self.running_requests -= 1
        if tenant.tokens_per_minute is not None and completion_tokens > 0:
            self._all_tokens.take(completion_tokens, tenant.tokens_per_minute, now)
