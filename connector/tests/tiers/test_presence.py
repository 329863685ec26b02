from __future__ import annotations

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.presence import PresenceIndex


def test_answers_are_believed_for_their_time() -> None:
    clock = SteppedClock()
    index = PresenceIndex(clock, present_seconds=30, absent_seconds=5)
    index.put(b"there", True)
    index.put(b"not", False)
    assert (index.get(b"there", clock()), index.get(b"not", clock())) == (True, False)
    clock.advance(5)
    assert (index.get(b"there", clock()), index.get(b"not", clock())) == (True, None)
    clock.advance(25)
    assert index.get(b"there", clock()) is None
    assert len(index) == 0


def test_the_oldest_answers_are_forgotten_first() -> None:
    clock = SteppedClock()
    index = PresenceIndex(clock, keys_max=3)
    for key in (b"a", b"b", b"c"):
        index.put(key, True)
    index.put(b"a", False)
    index.put(b"d", True)
    assert [index.get(key, clock()) for key in (b"a", b"b", b"c", b"d")] == [False, None, True, True]
    assert len(index) == 3
