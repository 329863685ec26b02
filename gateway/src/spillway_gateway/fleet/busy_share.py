"""How busy an engine's prefill has been lately, from the work that was sent there."""

from __future__ import annotations

import math

MEMORY_SECONDS = 5.0  # one time constant: long against one prefill, short against a change of traffic


class BusyShare:
    """Seconds of prefill sent per second, averaged over MEMORY_SECONDS; above 1 when more is sent than fits."""

    __slots__ = ("_at", "_share")

    def __init__(self) -> None:
        self._share = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        self._share = self.at(now) + seconds / MEMORY_SECONDS
        self._at = now

    def at(self, now: float) -> float:
        return self._share * math.exp((self._at - now) / MEMORY_SECONDS) if self._share else 0.0
