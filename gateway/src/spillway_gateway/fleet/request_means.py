"""What an average request of a model is like: for work whose sizes are not known, and for how long memory is taken."""

from __future__ import annotations

WEIGHT = 1 / 64  # of one request: follows a change of traffic within a minute


class RequestMeans:
    """Exponentially weighted over requests; 0 before the first."""

    def __init__(self) -> None:
        self.uncached_tokens = 0.0
        self.seconds = 0.0  # from being sent to an engine until the reply's end

    def sent(self, uncached_tokens: int) -> None:
        self.uncached_tokens += WEIGHT * (uncached_tokens - self.uncached_tokens)

    def finished(self, seconds: float) -> None:
        self.seconds += WEIGHT * (seconds - self.seconds)
