from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.prefill_rate import FLEET_SAMPLES, SAMPLE_TOKENS_MIN, PrefillRate, RateSamples, usable_rate


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
    rate = PrefillRate(RateSamples(FLEET_SAMPLES), 5_000.0)
    for _ in range(8):
        rate.sample(2_000, 0.1)
    rate.sample(2_000, 0.1 + wait)

    assert rate.tokens_per_second == 20_000


def test_small_prompts_say_nothing_and_the_default_stands() -> None:
    rate = PrefillRate(RateSamples(FLEET_SAMPLES), 5_000.0)
    rate.sample(SAMPLE_TOKENS_MIN - 1, 0.001)
    rate.sample(10_000, 0.0)

    assert rate.tokens_per_second == 5_000


def test_reported_rates_that_are_none() -> None:
    assert [usable_rate(value) for value in (None, 0.0, -1.0, math.nan, math.inf)] == [None] * 5
    assert usable_rate(1e12) == 1e7
