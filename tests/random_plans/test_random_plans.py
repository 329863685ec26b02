"""A few hundred of the plans that `python -m random_plans` makes a hundred thousand of."""

from __future__ import annotations

from random_plans.check import check
from random_plans.layouts import KINDS


def test_plans_of_every_kind_move_what_the_model_moves():
    assert {check(seed) for seed in range(400)} == set(KINDS)
