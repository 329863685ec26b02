from __future__ import annotations

import io

from spillway_connector.testing.clock import SteppedClock
from spillway_ctl.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_rate_and_time_left() -> None:
    clock, terminal = SteppedClock(), Terminal()
    line = ProgressLine("verified", terminal, clock)
    clock.advance(10.0)
    line.show(1000, 100 << 20, 0.25, "2 damaged")
    shown = terminal.getvalue()
    assert "verified 1,000 frames  100.0 MiB  10.0 MiB/s  2 damaged" in shown and "25%, 30 s left" in shown


def test_it_is_redrawn_now_and_then_only_and_taken_away_at_the_end() -> None:
    clock, terminal = SteppedClock(), Terminal()
    line = ProgressLine("listed", terminal, clock)
    for number in range(1000):
        clock.advance(0.001)
        line.show(number, number, None)
    assert terminal.getvalue().count("listed") == 4
    line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
    length = len(terminal.getvalue())
    line.clear()
    assert len(terminal.getvalue()) == length


def test_a_pipe_sees_nothing() -> None:
    clock, pipe = SteppedClock(), io.StringIO()
    line = ProgressLine("verified", pipe, clock)
    clock.advance(10.0)
    line.show(1000, 100 << 20, 0.25)
    line.clear()
    assert pipe.getvalue() == ""
