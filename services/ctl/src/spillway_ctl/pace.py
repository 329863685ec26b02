"""Reading no faster than asked, so that engines keep the disk and the network to themselves."""

from __future__ import annotations

from collections.abc import Callable

from spillway_connector.tiers.tier import Clock

BURST_SECONDS = 0.25  # of quiet that may be made up for: one large block does not stop what follows it


class Pace:
    """bytes_per_second: None for no limit. wait: sleeps for the seconds it is given."""

    def __init__(self, bytes_per_second: int | None, clock: Clock, wait: Callable[[float], None]) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._free_at = clock()

    def after(self, size_bytes: int) -> None:
        """Call when so many bytes have been read: returns when the next may be."""
        if self._rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + size_bytes / self._rate
        if self._free_at > now:
            self._wait(self._free_at - now)
