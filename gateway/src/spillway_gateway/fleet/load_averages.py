"""Averages over the recent past: how busy a resource is, and what a request of a model takes.

Both are exponentially weighted moving averages, one by time and one by requests, so each keeps one number and no
samples. On the event loop only.
"""

from __future__ import annotations

import math

BUSY_SECONDS = 5.0  # time constant: long against one prefill, short against a change of traffic
REQUEST_WEIGHT = 1 / 64  # of the latest request: follows a change of traffic within a minute


class BusyShare:
    """Seconds of work sent to a resource per second, averaged over BUSY_SECONDS; above 1 when more is sent than fits.

    now: monotonic seconds.
    """

    __slots__ = ("_at", "share")

    def __init__(self) -> None:
        self.share = 0.0  # when work was sent last
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Work that takes this number of seconds was sent."""
        self.share = self.at(now) + seconds / BUSY_SECONDS
        self._at = now

    def at(self, now: float) -> float:
        """The share, 0 or more."""
        return self.share * math.exp((self._at - now) / BUSY_SECONDS) if self.share else 0.0


class RequestMeans:
    """The cost of a model's average request; 0 before the first. It stands for requests of other senders, whose sizes
    are not known, and says for how long KV cache is occupied and what a prompt displaces.

    device_share: the share of the tokens that requests found cached, those on the engine's device; 0 to 1.
    reload_token_ms: the time to load one token that is not on the device any more; 0 if none was loaded.
    """

    def __init__(self) -> None:
        self._device_tokens = 0.0  # found on the engine's device
        self._loaded_tokens = 0.0  # found in its lower tiers
        self._load_ms = 0.0
        self.device_share = self.reload_token_ms = 0.0
        self.uncached_tokens = 0.0
        self.seconds = 0.0  # from being sent to an engine until the end of the reply

    def sent(self, uncached_tokens: int) -> None:
        """A request with this number of uncached tokens was sent."""
        self.uncached_tokens += REQUEST_WEIGHT * (uncached_tokens - self.uncached_tokens)

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens of requests that was expected in any tier; 0 to 1."""
        cached_tokens = self._device_tokens + self._loaded_tokens
        return cached_tokens / (cached_tokens + self.uncached_tokens) if cached_tokens else 0.0

    def found(self, device_tokens: int, loaded_tokens: int, load_ms: float) -> None:
        """A request was sent to an engine, which is expected to have device_tokens of its tokens on its device, and to
        load loaded_tokens from its lower tiers within load_ms."""
        self._device_tokens += REQUEST_WEIGHT * (device_tokens - self._device_tokens)
        self._loaded_tokens += REQUEST_WEIGHT * (loaded_tokens - self._loaded_tokens)
        self._load_ms += REQUEST_WEIGHT * (load_ms - self._load_ms)
        if self._loaded_tokens:
            self.reload_token_ms = self._load_ms / self._loaded_tokens
        if cached_tokens := self._device_tokens + self._loaded_tokens:
            self.device_share = self._device_tokens / cached_tokens

    def finished(self, seconds: float) -> None:
        """A request has ended this number of seconds after it was sent."""
        self.seconds += REQUEST_WEIGHT * (seconds - self.seconds)
