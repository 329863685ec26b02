from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.load_cost import (
    BEHIND_SECONDS_MIN,
    BEHIND_SHARE,
    LoadGate,
    LoadPolicy,
    PrefillTimer,
    RateMeter,
    behind_after,
    loading_pays,
)

rates = st.floats(1.0, 1e12)


@given(st.integers(1, 4096), st.integers(1, 1 << 30), rates, rates)
def test_a_load_that_pays_is_faster_than_the_recomputation(tokens, size_bytes, prefill, load):
    if loading_pays(tokens, size_bytes, prefill, load, margin=0.9):
        assert size_bytes / load < tokens / prefill
    else:
        assert size_bytes / load > 0.89 * tokens / prefill


@given(st.integers(1, 4096), st.integers(1, 1 << 30), rates, rates, st.floats(1.0, 10.0))
def test_a_faster_link_or_a_slower_device_never_stops_paying(tokens, size_bytes, prefill, load, faster):
    if loading_pays(tokens, size_bytes, prefill, load, 0.9):
        assert loading_pays(tokens, size_bytes, prefill, load * faster, 0.9)
        assert loading_pays(tokens, size_bytes, prefill / faster, load, 0.9)


def test_the_figures_that_made_this_module():
    """Qwen3-14B on one H200: 163,840 bytes a token, 15.8k tokens/s; upstream's file tier reached 1.3 GB/s."""
    chunk = 128 * 163_840
    assert not loading_pays(128, chunk, 15_800, 1.3e9, 0.9)
    assert loading_pays(128, chunk, 15_800, 3.3e9, 0.9)


def test_unknown_rates_are_tried():
    assert loading_pays(128, 1 << 20, None, 1.0, 0.9)
    assert loading_pays(128, 1 << 20, 1e9, None, 0.9)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.001, 100)), min_size=1, max_size=30))
def test_a_rate_lies_between_its_measurements(spans):
    meter, now = RateMeter(10.0), 0.0
    for amount, seconds in spans:
        now += seconds
        meter.add(amount, seconds, now)
    seen = [amount / seconds for amount, seconds in spans]
    assert min(seen) * 0.999 <= meter.per_second <= max(seen) * 1.001


def test_old_measurements_fade():
    meter = RateMeter(half_life_seconds=10.0)
    meter.add(100, 1, now=0)
    meter.add(10, 1, now=10)
    assert meter.per_second == pytest.approx((50 + 10) / (0.5 + 1))
    meter.add(10, 1, now=1000)
    assert meter.per_second == pytest.approx(10)


def test_nothing_and_no_time_say_nothing():
    meter = RateMeter(10.0)
    meter.add(0, 1, now=0)
    meter.add(5, 0, now=1)
    assert meter.per_second is None
    assert RateMeter(10.0, pinned=3.0).per_second == 3.0


def test_a_slow_tier_is_closed_but_for_a_probe_and_opens_when_it_is_fast():
    gate = LoadGate(LoadPolicy(probe_seconds=30), 128, 1000, RateMeter(10.0))
    prefill = RateMeter(10.0, pinned=1280.0)  # a chunk in 100 ms
    assert gate.passes("a", prefill, now=0)  # unknown yet
    gate.load_rate.add(1000, 0.2, now=0)  # a chunk in 200 ms
    assert gate.passes("b", prefill, now=1)  # the first probe
    assert gate.passes("b", prefill, now=1.1)  # all of its chunks
    assert not gate.passes("c", prefill, now=2)
    assert not gate.passes("d", prefill, now=30.9)
    assert gate.passes("e", prefill, now=31.1)
    gate.load_rate.add(100_000, 0.2, now=31.2)
    assert gate.passes("c", prefill, now=31.3)


def test_a_slow_tier_that_was_measured_otherwise_is_not_probed_soon():
    gate = LoadGate(LoadPolicy(probe_seconds=30), 128, 1000, RateMeter(10.0))
    prefill = RateMeter(10.0, pinned=1280.0)
    gate.load_rate.add(1000, 0.2, now=0)
    gate.measured(now=10)
    assert not gate.passes("a", prefill, now=39.9)
    assert gate.passes("b", prefill, now=40.1)


def test_the_tokens_under_way_are_those_of_steps_that_have_not_ended():
    timer = PrefillTimer(RateMeter(10.0))
    timer.begin_step(500, now=0.0)
    timer.begin_step(300, now=0.1)
    assert timer.tokens_under_way == 800
    timer.end_step(now=1.0)
    assert timer.tokens_under_way == 300


def test_overlapping_steps_are_timed_from_end_to_end():
    timer = PrefillTimer(rate := RateMeter(1e9))
    timer.begin_step(1000, now=0.0)
    timer.begin_step(2000, now=0.1)
    timer.end_step(now=1.0)
    timer.end_step(now=3.0)
    assert rate.per_second == pytest.approx(1000)
    timer.begin_step(1, now=3.0)  # a decode step
    timer.end_step(now=9.0)
    timer.end_step(now=9.0)  # of no step
    assert rate.per_second == pytest.approx(1000)
    timer.begin_step(4000, now=9.0)
    timer.leave_out_step()
    timer.end_step(now=10.0)
    assert rate.per_second == pytest.approx(1000)
    timer.begin_step(6000, now=10.0)  # the engine was idle before
    timer.end_step(now=13.0)
    assert rate.per_second == pytest.approx((3000 + 6000) / (3 + 3))


@given(
    st.integers(1, 300),
    st.floats(1e-4, 2.0),
    st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 20.0)), min_size=1, max_size=200),
)
def test_a_load_that_is_given_up_has_cost_a_small_share_of_computing(chunks, seconds_per_chunk, steps):
    """The share is small however the chunks come. A look is a step apart from the next one, and only whole chunks can
    be used."""
    elapsed = received = 0.0
    for step_seconds, came in steps:
        elapsed, received = elapsed + step_seconds, min(float(chunks), received + came)
        if received == chunks:
            return
        if elapsed > behind_after(received, chunks, seconds_per_chunk, 0.0):
            before = elapsed - step_seconds
            whole = chunks * seconds_per_chunk
            total = before + (chunks - (received - came)) * seconds_per_chunk
            assert total <= whole + max(BEHIND_SHARE * whole, BEHIND_SECONDS_MIN) + 1e-6
            return


def test_a_load_as_fast_as_computing_is_not_given_up():
    for elapsed in range(1, 100):
        assert elapsed * 0.1 <= behind_after(elapsed, 100, 0.1, 0.0)


def test_nothing_can_arrive_within_two_round_trips():
    assert behind_after(0, 10, 0.1, 0.0) < 0.2 <= behind_after(0, 10, 0.1, 0.1)
    assert behind_after(0, 10, 0.1, 100.0) < 0.3, "a lookup that took so long waited for something else"


def test_after_a_load_was_given_up_its_rate_counts_alone_and_is_probed_later():
    gate = LoadGate(LoadPolicy(), 128, 1000, RateMeter(10.0))
    computing = RateMeter(10.0, pinned=1280.0)
    gate.load_rate.add(1e9, 1.0, now=0.0)
    assert gate.passes("before", computing, 1.0)
    gate.given_up(0.0, 1.0, now=2.0)
    assert not gate.passes("next", computing, 3.0)
    assert gate.passes("probe", computing, 2.0 + LoadPolicy().probe_seconds)
