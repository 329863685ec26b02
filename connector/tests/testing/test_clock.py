from __future__ import annotations

import pytest

from spillway_connector.testing.clock import SteppedClock


def test_it_moves_by_advance_and_never_back() -> None:
    clock = SteppedClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(1.5)
    assert clock() == 6.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
