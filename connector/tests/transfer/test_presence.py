from __future__ import annotations

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.transfer.presence import PresenceIndex


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


def test_what_was_learnt_first_is_forgotten_first() -> None:
    clock = SteppedClock()
    index = PresenceIndex(clock, keys_max=3)
    for key in (b"a", b"b", b"c"):
        index.put(key, True)
    index.put(b"b", False)  # another answer, not another key
    assert len(index) == 3
    index.put(b"d", True)
    assert [index.get(key, clock()) for key in (b"a", b"b", b"c", b"d")] == [None, False, True, True]
    index.put_many([b"a", b"e", b"f"], True)
    assert index.get_many([b"c", b"d"]) == [None, None]
    assert index.present_of([b"a", b"b", b"e", b"f"], clock()) == {b"a", b"e", b"f"}
    assert len(index) == 3


def test_no_dict_grows_large_enough_to_hold_up_a_step() -> None:
    index = PresenceIndex(SteppedClock(), keys_max=20_000)
    for begin in range(0, 60_000, 1000):  # forgetting all the time from the twentieth batch on
        index.put_many([number.to_bytes(36, "big") for number in range(begin, begin + 1000)], begin % 2000 == 0)
    assert len(index) == 20_000
    assert sum(map(len, index._shards)) == 20_000
    assert max(map(len, index._shards)) < 2 * 20_000 / len(index._shards), "spread evenly"
    assert index.get_many([(39_999).to_bytes(36, "big")]) == [None]
    assert index.get((59_999).to_bytes(36, "big"), 0.0) is False
    index.clear()
    assert len(index) == 0
    assert index.get((59_999).to_bytes(36, "big"), 0.0) is None
