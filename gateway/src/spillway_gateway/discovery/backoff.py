"""How long to wait before the next try. Pure."""

from __future__ import annotations

FIRST_SECONDS = 0.25


def pause_seconds(failures: int, seconds_max: float, chance: float) -> float:
    """failures: in a row, from 1. Doubles up to seconds_max, of which chance (0 to 1) takes away up to a half, so that
    many gateways do not come back together."""
    whole = min(seconds_max, FIRST_SECONDS * 2.0 ** min(failures - 1, 30))
    return whole * (1.0 - 0.5 * chance)
