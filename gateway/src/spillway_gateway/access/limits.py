"""What one tenant may take: requests at a time, requests per minute, and tokens per minute. Counted by one process.

Buckets of one minute. A request is let in while that of requests holds one and those of tokens hold anything; it takes
its whole prompt at once, as estimated, so prompts longer than a bucket work too and are paid for by waiting afterwards.
At its end the estimate is settled by what the engine counted, and the reply's tokens are added.
access/shared_script.py does the same sums for all replicas together.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import TenantLimited

WINDOW_SECONDS = 60.0


class Limit(IntEnum):
    """Which limit was met. The values are what the shared script answers."""

    CONCURRENT_REQUESTS = 1
    REQUESTS = 2
    PROMPT_TOKENS = 3
    TOKENS = 4


def limited(tenant: Tenant, limit: Limit, retry_after_seconds: int) -> TenantLimited:
    """The error that names the limit and when to come back."""
    if limit is Limit.CONCURRENT_REQUESTS:
        most = tenant.concurrent_requests_max
        return TenantLimited(f"{most} requests of this tenant are running, its limit; send fewer at a time", 1)
    rate, what = {
        Limit.REQUESTS: (tenant.requests_per_minute, "requests"),
        Limit.PROMPT_TOKENS: (tenant.prompt_tokens_per_minute, "prompt tokens"),
        Limit.TOKENS: (tenant.tokens_per_minute, "tokens"),
    }[limit]
    return TenantLimited(f"this tenant's {rate} {what} per minute are used up", retry_after_seconds)


class Settlement(NamedTuple):
    """What a request that was let in cost besides what it took at its beginning; negative: gives back."""

    requests: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def __add__(self, other: Settlement) -> Settlement:  # type: ignore[override]
        return Settlement(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING_OWED = Settlement()


def settle(estimated_prompt_tokens: int, counted_prompt_tokens: int | None, reply_tokens: int) -> Settlement:
    """For a request that an engine got. counted_prompt_tokens: as the engine's usage told; None leaves the estimate."""
    over = 0 if counted_prompt_tokens is None else counted_prompt_tokens - estimated_prompt_tokens
    return Settlement(0, over, reply_tokens)


def give_back(estimated_prompt_tokens: int) -> Settlement:
    """For a request that no engine got."""
    return Settlement(-1, -estimated_prompt_tokens, 0)


class SharedLimitsAway(Exception):
    """Replicas cannot decide together: the store does not answer, or not in time."""


class _Bucket:
    __slots__ = ("_filled_at", "_level")

    def __init__(self, now: float) -> None:
        self._level: float | None = None  # None: full, whatever the rate is
        self._filled_at = now

    def wait_seconds(self, least: int, rate: int, now: float) -> int:
        """Until the bucket holds `least`, or anything for 0; 0 when it does."""
        missing = least - self._refilled(rate, now)
        if missing < 0 or (least and missing <= 0):
            return 0
        return math.ceil(missing * WINDOW_SECONDS / rate) or 1

    def take(self, amount: int, rate: int, now: float) -> None:
        self._level, self._filled_at = self._refilled(rate, now) - amount, now

    def _refilled(self, rate: int, now: float) -> float:
        if self._level is None:
            return float(rate)
        return min(float(rate), self._level + (now - self._filled_at) * rate / WINDOW_SECONDS)


class TenantUsage:
    """Counters of one tenant. now: monotonic seconds."""

    __slots__ = ("_all_tokens", "_prompt_tokens", "_requests", "running_requests")

    def __init__(self, now: float) -> None:
        self.running_requests = 0
        self._requests = _Bucket(now)
        self._prompt_tokens = _Bucket(now)
        self._all_tokens = _Bucket(now)

    def begin(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Count a request in. Raises TenantLimited, naming the limit and when to come back."""
        most = tenant.concurrent_requests_max
        if most is not None and self.running_requests >= most:
            raise limited(tenant, Limit.CONCURRENT_REQUESTS, 1)
        for limit, bucket, least, rate in (
            (Limit.REQUESTS, self._requests, 1, tenant.requests_per_minute),
            (Limit.PROMPT_TOKENS, self._prompt_tokens, 0, tenant.prompt_tokens_per_minute),
            (Limit.TOKENS, self._all_tokens, 0, tenant.tokens_per_minute),
        ):
            wait = bucket.wait_seconds(least, rate, now) if rate is not None else 0
            if wait:
                raise limited(tenant, limit, wait)
        self.running_requests += 1
        self.take(tenant, prompt_tokens, now)

    def take(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Let the buckets know of a request that was let in, by them or by the shared ones."""
        if tenant.requests_per_minute is not None:
            self._requests.take(1, tenant.requests_per_minute, now)
        if tenant.prompt_tokens_per_minute is not None:
            self._prompt_tokens.take(prompt_tokens, tenant.prompt_tokens_per_minute, now)
        if tenant.tokens_per_minute is not None:
            self._all_tokens.take(prompt_tokens, tenant.tokens_per_minute, now)

    def end(self, tenant: Tenant, settlement: Settlement, now: float) -> None:
        """Count a request out that was let in."""
        self.running_requests -= 1
        requests, prompt_tokens, reply_tokens = settlement
        if tenant.requests_per_minute is not None:
            self._requests.take(requests, tenant.requests_per_minute, now)
        if tenant.prompt_tokens_per_minute is not None:
            self._prompt_tokens.take(prompt_tokens, tenant.prompt_tokens_per_minute, now)
        if tenant.tokens_per_minute is not None:
            self._all_tokens.take(prompt_tokens + reply_tokens, tenant.tokens_per_minute, now)
