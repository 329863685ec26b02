"""The prefill rate as Spillway's connector measures it: whole passes that compute many prompt tokens, with the decoding
that shares them, as a time-weighted mean that fades."""

from __future__ import annotations

TOKENS_MIN = 128  # of a pass; shorter ones mostly decode and say little about prefill
HALF_LIFE_SECONDS = 10.0


class PrefillMeter:
    """per_second: None before the first measurement."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._updated_at = 0.0

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """`tokens` of prompts were computed by a pass of `seconds` that ends `now`."""
        if tokens < TOKENS_MIN or seconds <= 0:
            return
        fade = 0.5 ** (max(0.0, now - self._updated_at) / HALF_LIFE_SECONDS)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds
        self._updated_at = now

    @property
    def per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None
