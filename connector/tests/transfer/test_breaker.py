from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.limits import BreakerPolicy
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.transfer.breaker import Breaker, BreakerState, rest_seconds

POLICY = BreakerPolicy(failures_to_open=3, first_rest_seconds=1.0, longest_rest_seconds=30.0, probe_seconds=15.0)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def breaker(clock: SteppedClock) -> Breaker:
    return Breaker(POLICY, clock)


def _open(breaker: Breaker) -> None:
    for _ in range(POLICY.failures_to_open):
        assert breaker.allow()
        breaker.record_failure()


def test_it_opens_after_failures_in_a_row_only(breaker: Breaker) -> None:
    for _ in range(10):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    _open(breaker)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()
    assert not breaker.would_allow()


def test_after_the_rest_one_probe_passes_and_its_success_closes(breaker: Breaker, clock: SteppedClock) -> None:
    _open(breaker)
    clock.advance(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.would_allow()
    assert breaker.allow()
    assert not breaker.would_allow()
    assert not breaker.allow()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allow() and breaker.allow()


def test_failed_probes_double_the_rest_up_to_the_longest(breaker: Breaker, clock: SteppedClock) -> None:
    _open(breaker)
    for rest in (1, 2, 4, 8, 16, 30, 30):
        clock.advance(rest - 0.001)
        assert not breaker.allow()
        clock.advance(0.001)
        assert breaker.allow()
        breaker.record_failure()
    clock.advance(30)
    breaker.allow()
    breaker.record_success()
    _open(breaker)
    clock.advance(1.0)
    assert breaker.allow(), "a success brings back the first rest"


def test_a_silent_probe_hands_over_to_another(breaker: Breaker, clock: SteppedClock) -> None:
    _open(breaker)
    clock.advance(1.0)
    assert breaker.allow()
    clock.advance(POLICY.probe_seconds)
    assert breaker.allow()


def test_failures_that_end_while_open_change_nothing(breaker: Breaker, clock: SteppedClock) -> None:
    _open(breaker)
    for _ in range(20):
        breaker.record_failure()
    clock.advance(1.0)
    assert breaker.allow()


@given(st.integers(0, 10_000))
def test_the_rest_stays_within_its_bounds(failed_probes: int) -> None:
    assert 1.0 <= rest_seconds(POLICY, failed_probes) <= 30.0
    assert rest_seconds(POLICY, failed_probes) <= rest_seconds(POLICY, failed_probes + 1)
