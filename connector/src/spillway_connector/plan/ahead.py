"""Bounds the cost of promotions ahead of a request's turn that turn out to be useless. Pure."""

from __future__ import annotations

from enum import StrEnum

WASTED_SHARE_MAX = 0.01  # of the time: seconds of loading that no request used
WASTED_SECONDS_MAX = 0.5  # at once, before the share counts


class AheadOutcome(StrEnum):
    """The fate of a chunk that was promoted before its request's turn. Value of the metric's label."""

    PROMOTED = "promoted"  # its load was begun
    USED = "used"  # it was in the CPU tier, or nearly, when its request's turn came
    EVICTED = "evicted"  # it had made room for others, or its load had failed
    UNUSED = "unused"  # its request ended without a turn


class WasteBudget:
    """A leaky bucket: seconds of useless loading fill it, time empties it at `share` seconds a second.

    While it holds `seconds_max` or more, nothing is to be promoted ahead. Loads that are under way at that moment may
    still be wasted, so the sum over a time t is at most `share * t + seconds_max`, plus the loads of one full bound of
    rows.
    """

    def __init__(self, share: float = WASTED_SHARE_MAX, seconds_max: float = WASTED_SECONDS_MAX) -> None:
        self._share = share
        self._seconds_max = seconds_max
        self._wasted_seconds = 0.0
        self._as_of = 0.0

    def waste(self, seconds: float, now: float) -> None:
        """`seconds` of loading were of no use."""
        self._wasted_seconds = self._left(now) + seconds
        self._as_of = now

    def allows(self, now: float) -> bool:
        """Whether a promotion may be begun that might be wasted."""
        return self._wasted_seconds == 0.0 or self._left(now) < self._seconds_max

    def _left(self, now: float) -> float:
        return max(0.0, self._wasted_seconds - self._share * (now - self._as_of))
