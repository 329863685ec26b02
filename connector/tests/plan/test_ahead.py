"""Bounds on the cost of useless promotions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.ahead import WasteBudget

moments = st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.01, 2.0)), min_size=1, max_size=60)


@given(moments, st.floats(0.001, 0.5), st.floats(0.1, 5.0))
def test_a_guess_that_is_always_wrong_costs_its_share_of_the_time(pauses_and_costs, share, seconds_max):
    budget = WasteBudget(share, seconds_max)
    now = wasted = 0.0
    for pause, cost in pauses_and_costs:
        now += pause
        if budget.allows(now):
            assert wasted <= share * now + seconds_max + 1e-6
            budget.waste(cost, now)
            wasted += cost


def test_it_allows_again_when_the_time_has_paid():
    budget = WasteBudget(share=0.01, seconds_max=1.0)
    assert budget.allows(0.0)
    budget.waste(1.5, 0.0)

    assert not budget.allows(49.0)
    assert budget.allows(51.0)
