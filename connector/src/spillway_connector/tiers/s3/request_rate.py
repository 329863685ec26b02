"""How many requests a second one engine makes of an object store, where each costs money. Pure."""

from __future__ import annotations

BURST_SECONDS = 1.0  # so long a pause may be made up for at once: a lookup asks for all of a prompt


class RequestRate:
    """At most ``per_second`` requests, after a pause more at once."""

    def __init__(self, per_second: float) -> None:
        self._seconds_each = 1.0 / per_second
        self._next_at = float("-inf")  # from when on the next request may begin, the burst left aside

    def wait_seconds(self, now: float) -> float:
        """How long a request that comes now has to wait."""
        return max(0.0, max(self._next_at, now - BURST_SECONDS) - now)

    def begin(self, now: float) -> float:
        """Count a request that comes now; how long it has to wait."""
        wait = self.wait_seconds(now)
        self._next_at = max(self._next_at, now - BURST_SECONDS) + self._seconds_each
        return wait
