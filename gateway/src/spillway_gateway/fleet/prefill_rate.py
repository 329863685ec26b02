"""Rate at which an engine computes prompts, in tokens per second: as it reports, else as replies show.

A gateway sees only the time to the first byte, which includes HTTP, tokenising, other requests' decoding and loads.
These only make a sample slower, so the upper quartile is a better estimate than the mean. Small prompts measure fixed
costs and are left out.

A plain reply has no early first byte. Its time, which includes the answer's, says that the engine is at least so fast,
if the engine itself has counted the prompt: one that it cut, or had cached, would make it look faster. That counts only
while nothing else is known, and for engines without such replies too, which would get no prompt that others take.
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


class FleetSamples:
    """Samples of all engines of a model."""

    def __init__(self) -> None:
        self.first_parts = RateSamples(FLEET_SAMPLES)
        self.whole = RateSamples(FLEET_SAMPLES)  # of whole requests
        self.added = 0  # samples of both, ever


class PrefillRate:
    """One engine's rate. default: until there is a sample."""

    def __init__(self, fleet: FleetSamples, default_tokens_per_second: float) -> None:
        self._fleet = fleet
        self._samples = RateSamples(ENGINE_SAMPLES)
        self._whole = RateSamples(ENGINE_SAMPLES)  # of whole requests
        self._default = default_tokens_per_second
        self.reported: float | None = None  # by the engine, which times whole steps

    def sample(self, tokens: int, seconds: float) -> None:
        """tokens: The tokens that the engine computed between the request and its first byte, including those of
        requests queued before it."""
        if tokens >= SAMPLE_TOKENS_MIN and seconds > 0:
            self._samples.add(tokens / seconds)
            self._fleet.first_parts.add(tokens / seconds)
            self._fleet.added += 1

    def sample_whole(self, tokens: int, seconds: float) -> None:
        """tokens: The tokens that the engine computed of one request, at some moment between the request and the end of
        its reply."""
        if tokens >= SAMPLE_TOKENS_MIN and seconds > 0 and self.reported is None and not self._fleet.first_parts:
            self._whole.add(tokens / seconds)
            self._fleet.whole.add(tokens / seconds)
            self._fleet.added += 1

    @property
    def tokens_per_second(self) -> float:
        """The reported rate, else the engine's measured one, else its fleet's, else the default, or more than that if
        whole requests show it."""
        if self.reported is not None:
            return self.reported
        if self._samples.quartile is not None and len(self._samples) >= SAMPLES_TO_TRUST:
            return self._samples.quartile
        if self._fleet.first_parts.quartile is not None:
            return self._fleet.first_parts.quartile
        whole = self._whole if len(self._whole) >= SAMPLES_TO_TRUST else self._fleet.whole
        if whole.quartile is None or len(whole) < SAMPLES_TO_TRUST:
            return self._default
        return max(self._default, whole.quartile)


def usable_rate(reported: float | None) -> float | None:
    """A reported rate within the bounds; None for zero, not-a-number and nothing."""
    if reported is None or not reported > 0 or reported == float("inf"):
        return None
    return min(max(reported, RATE_MIN), RATE_MAX)
