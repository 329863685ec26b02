"""Whether loads from a tier pay, as the gate of Spillway's connector judges it: by what lately asked loads take beside
computing, as a mean that fades, and not by one request."""

from __future__ import annotations

from spillway_simulator.model.prefill_meter import HALF_LIFE_SECONDS

WORTH_RATIO = 0.9  # load only if it takes at most this share of the time that recomputing takes


class LoadMeter:
    """The meter of one shared tier. Loads that are not made count with what they would have taken."""

    def __init__(self) -> None:
        self._load_seconds = 0.0
        self._compute_seconds = 0.0
        self._updated_at = 0.0

    def add(self, load_seconds: float, compute_seconds: float, now: float) -> None:
        """A request asks for a load."""
        fade = 0.5 ** (max(0.0, now - self._updated_at) / HALF_LIFE_SECONDS)
        self._load_seconds = self._load_seconds * fade + load_seconds
        self._compute_seconds = self._compute_seconds * fade + compute_seconds
        self._updated_at = now

    @property
    def pays(self) -> bool:
        """True before the first load."""
        return self._load_seconds <= WORTH_RATIO * self._compute_seconds
