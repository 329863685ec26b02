from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.last_hour import MINUTE_SECONDS, MINUTES, LastHour
from spillway_gateway.routing.fleet_view import HeldPrefix, TierLabel

TOKENS = st.integers(0, 10_000)
NOW = 1_000 * MINUTE_SECONDS


def test_each_minute_has_its_own_tokens_and_the_current_one_is_last() -> None:
    hour = LastHour()
    hour.add(NOW - 2 * MINUTE_SECONDS, HeldPrefix(100, 50, 0), 120)
    hour.add(NOW, HeldPrefix(100), 40)
    hour.add(NOW + 59.9, HeldPrefix(0, 0, 30), 30)

    *before, two_ago, one_ago, current = hour.minutes(NOW + 59.9)
    assert (two_ago.expected, two_ago.reported, two_ago.missing[TierLabel.CPU]) == (150, 120, 30)
    assert (one_ago.expected, one_ago.reported) == (0, 0)
    assert (current.expected, current.reported, current.missing[TierLabel.DEVICE]) == (130, 70, 60)
    assert len(before) == MINUTES - 3 and not any(minute.expected for minute in before)


def test_what_is_older_than_an_hour_is_forgotten_and_a_clock_that_was_set_back_loses_nothing() -> None:
    hour = LastHour()
    for at in range(3 * MINUTES):
        hour.add(NOW + at * MINUTE_SECONDS, HeldPrefix(1), 1)
    last = NOW + (3 * MINUTES - 1) * MINUTE_SECONDS
    assert [minute.expected for minute in hour.minutes(last)] == [1] * MINUTES
    hour.add(NOW, HeldPrefix(5), 5)
    assert hour.minutes(last)[-1].expected == 6
    assert not any(minute.expected for minute in hour.minutes(last + MINUTES * MINUTE_SECONDS))


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_the_tier_of_a_loss_is_the_one_that_was_to_hold_its_first_token(
    device: int, cpu: int, shared: int, found: int
) -> None:
    expected = [TierLabel.DEVICE] * device + [TierLabel.CPU] * cpu + [TierLabel.SHARED] * shared
    lost_in = HeldPrefix(device, cpu, shared).tier_of_first_missing(found)
    assert lost_in == (expected[found] if found < len(expected) else None)
