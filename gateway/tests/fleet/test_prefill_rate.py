from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.prefill_rate import (
    SAMPLE_TOKENS_MIN,
    SAMPLES_TO_TRUST,
    FleetSamples,
    PrefillRate,
    RateSamples,
    usable_rate,
)


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=200))
def test_the_quartile_is_one_of_the_last_samples_in_bounds(samples: list[float]) -> None:
    rates = RateSamples(32)
    for sample in samples:
        rates.add(sample)

    bounded = sorted(min(max(sample, 50.0), 1e7) for sample in samples[-32:])
    assert rates.quartile is not None
    above = sum(sample > rates.quartile for sample in bounded)
    assert rates.quartile in bounded and above <= len(bounded) / 4 + 1


@given(st.floats(0.001, 50.0))
def test_one_request_that_waited_changes_nothing(wait: float) -> None:
    """Waiting only ever makes a sample slower."""
    rate = PrefillRate(FleetSamples(), 5_000.0)
    for _ in range(8):
        rate.sample(2_000, 0.1)
    rate.sample(2_000, 0.1 + wait)

    assert rate.tokens_per_second == 20_000


def test_small_prompts_say_nothing_and_the_default_stands() -> None:
    rate = PrefillRate(FleetSamples(), 5_000.0)
    rate.sample(SAMPLE_TOKENS_MIN - 1, 0.001)
    rate.sample(10_000, 0.0)

    assert rate.tokens_per_second == 5_000


def test_whole_requests_show_that_an_engine_is_faster_than_the_default() -> None:
    rate = PrefillRate(FleetSamples(), 5_000.0)
    for _ in range(SAMPLES_TO_TRUST - 1):
        rate.sample_whole(2_000, 0.1)
    rate.sample_whole(SAMPLE_TOKENS_MIN - 1, 0.001)
    rate.sample_whole(10_000, 0.0)
    assert rate.tokens_per_second == 5_000

    rate.sample_whole(2_000, 0.1)
    assert rate.tokens_per_second == 20_000
    slow = PrefillRate(FleetSamples(), 5_000.0)  # or its answers are long
    for _ in range(32):
        slow.sample_whole(2_000, 10.0)
    assert slow.tokens_per_second == 5_000

    rate.sample(2_000, 0.2)  # the first part of an answer says more
    rate.sample_whole(2_000, 0.01)
    assert rate.tokens_per_second == 10_000


def test_an_engine_without_whole_requests_counts_as_the_others_do_and_a_slow_one_as_the_default() -> None:
    fleet = FleetSamples()
    fast, slow, idle = (PrefillRate(fleet, 5_000.0) for _ in range(3))
    for _ in range(SAMPLES_TO_TRUST):
        fast.sample_whole(2_000, 0.1)
    assert [rate.tokens_per_second for rate in (fast, slow, idle)] == [20_000] * 3

    for _ in range(SAMPLES_TO_TRUST):
        slow.sample_whole(2_000, 10.0)
    assert [rate.tokens_per_second for rate in (fast, slow, idle)] == [20_000, 5_000, 20_000]


def test_reported_rates_that_are_none() -> None:
    assert [usable_rate(value) for value in (None, 0.0, -1.0, math.nan, math.inf)] == [None] * 5
    assert usable_rate(1e12) == 1e7
