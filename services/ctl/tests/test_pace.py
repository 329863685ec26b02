from __future__ import annotations

from spillway_connector.testing.clock import SteppedClock
from spillway_ctl.verify import Pace


def test_reading_is_held_to_the_rate() -> None:
    clock = SteppedClock()
    began = clock()
    pace = Pace(1000, clock, clock.advance)
    for _ in range(10):
        pace.after(500)
    assert clock() - began == 5.0


def test_slow_reading_is_not_slowed_further_and_quiet_is_not_made_up_for() -> None:
    clock = SteppedClock()
    waits: list[float] = []
    pace = Pace(1000, clock, waits.append)
    for _ in range(5):
        clock.advance(10.0)
        pace.after(500)
    assert sum(waits) == 5 * 0.25


def test_without_a_limit_nothing_waits() -> None:
    waits: list[float] = []
    Pace(None, SteppedClock(), waits.append).after(1 << 60)
    assert waits == []
