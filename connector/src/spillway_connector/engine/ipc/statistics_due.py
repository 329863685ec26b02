"""Decides which engine steps report the statistics of the scheduler's process.

vLLM asks for them in every step, sends them to an API server and has it update each series. A step of a busy engine
takes a few milliseconds, and `/metrics` is read every few seconds, so most of that work has no reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STATISTICS_SECONDS = 0.1  # between two reports of an engine that computes for long
STATISTICS_BURST = 16  # reports in a row, so that a short request's are there when it has its answer


class StatisticsDue:
    """A token bucket of reports for steps that compute. A step that computes nothing always reports, because it may be
    the last one for hours. EngineCore process, scheduler thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._computes = False
        self._allowed = float(STATISTICS_BURST)
        self._filled_at = clock()

    def planned(self, tokens: int) -> None:
        """Note the tokens that the newest step computes."""
        self._computes = tokens > 0

    def take(self) -> bool:
        """Return whether a report is due now, which is then taken as made."""
        if not self._computes:
            return True
        now = self._clock()
        self._allowed = min(STATISTICS_BURST, self._allowed + (now - self._filled_at) / STATISTICS_SECONDS)
        self._filled_at = now
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True
