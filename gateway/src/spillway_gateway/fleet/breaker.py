"""Circuit breaker of one engine (M. Nygard, Release It!, 2007): opens when requests fail, closes by a probe request.

closed -> open after `failures` failed requests in a row, or when `failure_share` of the last `window_requests` failed:
an engine whose streams break half of the time never fails many in a row. Open for `open_seconds`, doubled each time up
to `open_seconds_max`; then half-open: one request, the probe, is sent there. Its first byte closes the breaker on
trial, so that other requests need not wait for the end of a long stream; the next failure opens it again. A probe that
ends without an outcome, because its client disconnected, makes way for the next one.
"""

from __future__ import annotations

from collections import deque

from spillway_gateway.config.settings import BreakerConfig


class Breaker:
    """The breaker of one engine. On the event loop. now: monotonic seconds."""

    __slots__ = (
        "_config",
        "_failures",
        "_open_until",
        "_outcomes",
        "_probing",
        "_times_opened",
        "closed",
        "opened_total",
    )

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures = 0  # in a row
        self._outcomes: deque[bool] = deque(maxlen=config.window_requests)  # since it closed; True: failed
        self._times_opened = 0  # in a row, without a whole reply between
        self.closed = True  # requests pass without limit
        self._open_until: float | None = None
        self._probing = False
        self.opened_total = 0

    def allows(self, now: float) -> bool:
        """Whether a request may be sent: always when closed, one at a time when half-open."""
        return self._open_until is None or (now >= self._open_until and not self._probing)

    def sent(self) -> bool:
        """A request is sent. True when it is the probe, whose end must be reported."""
        if self._open_until is None or self._probing:
            return False
        self._probing = True
        return True

    def probe_began(self) -> None:
        """The probe's reply has begun."""
        if self._probing:
            self._close()
            self._failures = self._config.failures - 1

    def succeeded(self, *, probe: bool = False) -> None:
        """The engine sent a whole reply. Ignored while the breaker is open, unless it is the probe's reply: other
        requests were sent before."""
        if self._open_until is not None:
            if not probe:
                return
            self._close()
        self._failures = self._times_opened = 0
        self._outcomes.append(False)

    def failed(self, now: float) -> None:
        """The engine failed a request; opens the breaker at its thresholds."""
        self._failures += 1
        if self._open_until is not None:
            if self._probing and now >= self._open_until:
                self._open(now)
            return
        self._outcomes.append(True)
        window = len(self._outcomes) == self._config.window_requests
        if self._failures >= self._config.failures or (
            window and sum(self._outcomes) >= self._config.failure_share * self._config.window_requests
        ):
            self._open(now)

    def probe_ended(self) -> None:
        """The probe ended without an outcome."""
        self._probing = False

    def _close(self) -> None:
        self._open_until = None
        self.closed = True
        self._probing = False
        self._outcomes.clear()

    def _open(self, now: float) -> None:
        seconds = min(self._config.open_seconds * 2.0**self._times_opened, self._config.open_seconds_max)
        self._open_until = now + seconds
        self.closed = False
        self._times_opened = min(self._times_opened + 1, 32)
        self._probing = False
        self.opened_total += 1
