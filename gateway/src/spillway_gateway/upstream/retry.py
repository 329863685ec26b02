"""Whether a failed attempt may be retried on another engine. Pure decisions and a budget; no I/O.

Nothing is retried once the client has a part of an answer: a second generation would continue another text.
"""

from __future__ import annotations

from collections.abc import Callable

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.errors import (
    AdapterNotServed,
    EngineConnectTimeout,
    EngineDisconnected,
    EngineEnding,
    EngineFailed,
    EngineRefused,
    EngineWentDown,
    UpstreamError,
)

RETRYABLE_STATUSES = frozenset({502, 503, 504})
# The engine is gone or terminates, and its part of the work is lost. A retry is then no extra load: it does work that
# was admitted and that no engine does any more. All requests of the engine move at once.
_ENGINE_GONE = (EngineRefused, EngineDisconnected, EngineWentDown, EngineEnding, EngineFailed)
# The engine refused before it computed anything, and it is not overload.
_NOTHING_DONE = (AdapterNotServed,)
# The request was never sent, so it cannot be the cause, and trying the next engine costs nothing.
_NEVER_SENT = (EngineRefused, EngineConnectTimeout)


class RetryBudget:
    """Token bucket filled by requests: a share of the traffic may be retried, and a burst at once.

    A request earns limits.retryRatio retries, and limits.retryBurst of them can be saved up. It bounds retries after
    failures of an engine that still runs, such as a refusal or a timeout under overload, when a retry adds load. A
    retry after an engine that is gone is not charged; `may_retry`'s attempts_max bounds it.
    """

    def __init__(self, limits: Callable[[], LimitsConfig]) -> None:
        self._limits = limits
        self._available = float(limits().retry_burst)

    def earn(self) -> None:
        """Earn a request's share of a retry; called once for each request."""
        limits = self._limits()
        self._available = min(limits.retry_burst, self._available + limits.retry_ratio)

    def spend(self, failure: UpstreamError) -> bool:
        """Take one retry after this failure; returns False if none is left."""
        if isinstance(failure, (*_ENGINE_GONE, *_NOTHING_DONE)):
            return True
        if self._available < 1:
            return False
        self._available -= 1
        return True


def is_attempt(failure: UpstreamError) -> bool:
    """Whether the request was sent before this failure."""
    return not isinstance(failure, _NEVER_SENT)


def may_retry(*, bytes_sent: bool, attempts: int, attempts_max: int, engines_left: bool) -> bool:
    """attempts: engines that were sent the request. Each is tried once, so this ends."""
    return not bytes_sent and attempts < attempts_max and engines_left
