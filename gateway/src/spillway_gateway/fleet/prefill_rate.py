"""How fast an engine computes prompts, in tokens per second: as it reports, else as replies show.

A gateway sees only the time to the first byte, which includes HTTP, tokenising, other requests' decoding and loads.
These only make a sample slower, so the upper quartile is a better estimate than the mean. Small prompts measure fixed
costs and are left out.
"""

from __future__ import annotations

from collections import deque

SAMPLE_TOKENS_MIN = 1_024
ENGINE_SAMPLES = 32
FLEET_SAMPLES = 64
SAMPLES_TO_TRUST = 8  # below it the fleet's rate is used
QUARTILE = 0.75
RATE_MIN, RATE_MAX = 50.0, 10_000_000.0  # one odd sample must not make an engine look free or unusable


class RateSamples:
    """The last samples and their upper quartile; None without any."""

    def __init__(self, samples_max: int) -> None:
        self._samples: deque[float] = deque(maxlen=samples_max)
        self.quartile: float | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, tokens_per_second: float) -> None:
        """Add a sample, clipped to the bounds."""
        self._samples.append(min(max(tokens_per_second, RATE_MIN), RATE_MAX))
        ordered = sorted(self._samples)
        self.quartile = ordered[int(QUARTILE * (len(ordered) - 1))]


class PrefillRate:
    """One engine's rate. fleet: samples of all engines of the model. default: until there is a sample."""

    def __init__(self, fleet: RateSamples, default_tokens_per_second: float) -> None:
        self._fleet = fleet
        self._samples = RateSamples(ENGINE_SAMPLES)
        self._default = default_tokens_per_second
        self.reported: float | None = None  # by the engine, which times whole steps

    def sample(self, tokens: int, seconds: float) -> None:
        """tokens: The tokens that the engine computed between the request and its first byte, including those of
        requests queued before it."""
        if tokens >= SAMPLE_TOKENS_MIN and seconds > 0:
            self._samples.add(tokens / seconds)
            self._fleet.add(tokens / seconds)

    @property
    def tokens_per_second(self) -> float:
        """The reported rate, else the engine's measured one, else its fleet's, else the default."""
        if self.reported is not None:
            return self.reported
        measured = self._samples.quartile
        if measured is not None and len(self._samples) >= SAMPLES_TO_TRUST:
            return measured
        return self._fleet.quartile or measured or self._default


def usable_rate(reported: float | None) -> float | None:
    """A reported rate within the bounds; None for zero, not-a-number and nothing."""
    if reported is None or not reported > 0 or reported == float("inf"):
        return None
    return min(max(reported, RATE_MIN), RATE_MAX)
