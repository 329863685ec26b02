"""A circuit breaker (Nygard, "Release It!"): stops calls to a store that fails, and probes until it answers again.

CLOSED lets everything pass. After ``failures_to_open`` failures in a row it is OPEN and lets nothing pass for a while
that doubles with every failed probe. Then it is HALF_OPEN: one operation passes as a probe; its success closes the
breaker, its failure opens it again, without a report another operation becomes the probe. Pure: time is an argument.
"""

from __future__ import annotations

import threading
from enum import Enum

from spillway_connector.limits import BreakerPolicy
from spillway_connector.tiers.tier import Clock


class BreakerState(Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


def rest_seconds(policy: BreakerPolicy, failed_probes: int) -> float:
    """Return how long the breaker stays open after this number of failed probes in a row: exponential backoff."""
    # The exponent is capped so that weeks of failed probes do not overflow a float.
    return min(policy.longest_rest_seconds, policy.first_rest_seconds * 2.0 ** min(failed_probes, 60))


class Breaker:
    """One breaker guards one kind of operation of one tier. Safe to use from several threads."""

    def __init__(self, policy: BreakerPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._failed_probes = 0
        self.open_until: float | None = None  # None while closed; read without the lock
        self._probe_until: float | None = None  # set while a probe is under way

    @property
    def state(self) -> BreakerState:
        if self.open_until is None:  # as in would_allow
            return BreakerState.CLOSED
        with self._lock:
            return self._state(self._clock())

    def would_allow(self) -> bool:
        """Whether an operation would pass now; takes no probe."""
        if self.open_until is None:  # the common case, without the lock: one attribute read is atomic
            return True
        with self._lock:
            now = self._clock()
            return self._state(now) is BreakerState.HALF_OPEN and not self._probing(now)

    def allow(self) -> bool:
        """Whether an operation may start now. In HALF_OPEN the first caller gets the probe and must report it."""
        with self._lock:
            now = self._clock()
            state = self._state(now)
            if state is BreakerState.CLOSED:
                return True
            if state is BreakerState.OPEN or self._probing(now):
                return False
            self._probe_until = now + self._policy.probe_seconds
            return True

    def record_success(self) -> None:
        """The store answered (a miss and a corrupt entry are answers too)."""
        with self._lock:
            self._failures = 0
            self._failed_probes = 0
            self.open_until = None
            self._probe_until = None

    def record_failure(self) -> None:
        """The store refused or did not answer."""
        with self._lock:
            now = self._clock()
            state = self._state(now)
            if state is BreakerState.CLOSED:
                self._failures += 1
                if self._failures >= self._policy.failures_to_open:
                    self.open_until = now + rest_seconds(self._policy, 0)
            elif state is BreakerState.HALF_OPEN:
                self._failed_probes += 1
                self._probe_until = None
                self.open_until = now + rest_seconds(self._policy, self._failed_probes)
            # OPEN: an operation begun earlier has ended late; the state stays.

    def _state(self, now: float) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def _probing(self, now: float) -> bool:
        return self._probe_until is not None and now < self._probe_until
