"""When a dead component comes back. Pure: from counts and times to seconds."""

from __future__ import annotations

FIRST_DELAY_SECONDS = 1.0
DELAY_SECONDS_MAX = 30.0
STEADY_SECONDS = 60.0  # having run this long, the next failure counts as the first again


def restart_delay_seconds(failures_in_a_row: int) -> float:
    """1, 2, 4, ... 30 seconds for the first, second, third, ... failure."""
    return float(min(DELAY_SECONDS_MAX, FIRST_DELAY_SECONDS * 2 ** min(16, max(0, failures_in_a_row - 1))))


def failures_after_exit(failures_in_a_row: int, ran_seconds: float, exit_code: int) -> int:
    """A clean exit is an asked-for restart and counts as no failure."""
    if exit_code == 0:
        return 0
    return 1 if ran_seconds >= STEADY_SECONDS else failures_in_a_row + 1
