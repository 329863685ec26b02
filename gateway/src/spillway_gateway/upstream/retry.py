"""Whether a failed attempt may be made again elsewhere. Pure decisions and a budget; no I/O.

Nothing is retried once a body byte has reached the client: a second generation would continue another text.
"""

from __future__ import annotations

RETRYABLE_STATUSES = frozenset({502, 503, 504})


class RetryBudget:
    """Token bucket filled by requests: a share of the traffic may be retried, and a burst at once.

    ratio: retries earned per request. burst: most that can be saved up, sized so that all streams of one killed engine
    fit while an outage of every engine cannot double the load.
    """

    def __init__(self, ratio: float, burst: int) -> None:
        self._ratio = ratio
        self._burst = float(burst)
        self._available = float(burst)

    def earn(self) -> None:
        self._available = min(self._burst, self._available + self._ratio)

    def spend(self) -> bool:
        """Take one retry; False when none is left."""
        if self._available < 1:
            return False
        self._available -= 1
        return True


def may_retry(*, bytes_sent: bool, attempts: int, attempts_max: int, engines_left: bool) -> bool:
    return not bytes_sent and attempts < attempts_max and engines_left
