"""One tenant's limits: concurrent requests, requests per minute and tokens per minute. Counted by one process.

Token buckets (J. Turner, New directions in communications, IEEE Communications Magazine, 1986) that hold one minute's
rate. A request is admitted while the bucket of requests holds one and the buckets of tokens are not empty. It takes its
whole estimated prompt at once, so a bucket may go below zero, and prompts longer than a bucket are admitted too. At the
end the estimate is corrected by the engine's count, and the reply's tokens are taken. access/shared_script.py computes
the same for all replicas together.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from spillway_gateway.access.keys import Tenant
from spillway_gateway.errors import TenantLimited

WINDOW_SECONDS = 60.0


class Limit(IntEnum):
    """The limit that was reached. Values as the shared script returns them."""

    CONCURRENT_REQUESTS = 1
    REQUESTS = 2
    PROMPT_TOKENS = 3
    TOKENS = 4


def limited(tenant: Tenant, limit: Limit, retry_after_seconds: int) -> TenantLimited:
    """The error, with the limit and the seconds until a retry may succeed."""
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
    """The amounts that an admitted request takes at its end beyond those of its beginning; negative ones are given
    back."""

    requests: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def __add__(self, other: Settlement) -> Settlement:  # type: ignore[override]
        return Settlement(*(mine + its for mine, its in zip(self, other, strict=True)))


NOTHING_OWED = Settlement()


def settle(estimated_prompt_tokens: int, counted_prompt_tokens: int | None, reply_tokens: int) -> Settlement:
    """Settle the account of a request that was sent to an engine.

    counted_prompt_tokens: from the engine's usage; None keeps the estimate.
    """
    over = 0 if counted_prompt_tokens is None else counted_prompt_tokens - estimated_prompt_tokens
    return Settlement(0, over, reply_tokens)


def give_back(estimated_prompt_tokens: int) -> Settlement:
    """Settle a request that was sent to no engine."""
    return Settlement(-1, -estimated_prompt_tokens, 0)


class SharedLimitsUnavailable(Exception):
    """Redis does not answer in time, so replicas cannot decide together."""


class _Bucket:
    __slots__ = ("_filled_at", "_level")

    def __init__(self, now: float) -> None:
        self._level: float | None = None  # None: full, whatever the rate is
        self._filled_at = now

    def wait_seconds(self, least: int, rate: int, now: float) -> int:
        """Seconds until the bucket holds `least`, or more than nothing for 0; 0 when it does."""
        missing = least - self._refilled(rate, now)
        if missing < 0 or (least and missing <= 0):
            return 0
        return math.ceil(missing * WINDOW_SECONDS / rate) or 1

    def take(self, amount: int, rate: int, now: float) -> None:
        """Take an amount, which may bring the level below zero; negative amounts are returned."""
        self._level, self._filled_at = self._refilled(rate, now) - amount, now

    def _refilled(self, rate: int, now: float) -> float:
        if self._level is None:
            return float(rate)
        return min(float(rate), self._level + (now - self._filled_at) * rate / WINDOW_SECONDS)


class TenantUsage:
    """Counters of one tenant. On the event loop. now: monotonic seconds."""

    __slots__ = ("_all_tokens", "_prompt_tokens", "_requests", "running_requests")

    def __init__(self, now: float) -> None:
        self.running_requests = 0
        self._requests = _Bucket(now)
        self._prompt_tokens = _Bucket(now)
        self._all_tokens = _Bucket(now)

    def begin(self, tenant: Tenant, prompt_tokens: int, now: float) -> None:
        """Admit and count a request. Raises TenantLimited."""
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
        """Take an admitted request from the buckets, whether these or the shared ones admitted it."""
        if tenant.requests_per_minute is not None:
            self._requests.take(1, tenant.requests_per_minute, now)
        if tenant.prompt_tokens_per_minute is not None:
            self._prompt_tokens.take(prompt_tokens, tenant.prompt_tokens_per_minute, now)
        if tenant.tokens_per_minute is not None:
            self._all_tokens.take(prompt_tokens, tenant.tokens_per_minute, now)

    def end(self, tenant: Tenant, settlement: Settlement, now: float) -> None:
        """An admitted request has ended."""
        self.running_requests -= 1
        requests, prompt_tokens, reply_tokens = settlement
        if tenant.requests_per_minute is not None:
            self._requests.take(requests, tenant.requests_per_minute, now)
        if tenant.prompt_tokens_per_minute is not None:
            self._prompt_tokens.take(prompt_tokens, tenant.prompt_tokens_per_minute, now)
        if tenant.tokens_per_minute is not None:
            self._all_tokens.take(prompt_tokens + reply_tokens, tenant.tokens_per_minute, now)
