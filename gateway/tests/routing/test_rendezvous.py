from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing.rendezvous import pick_bounded, ranked

keys = st.integers(0, 2**64 - 1)
names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


@given(names, keys)
def test_a_leaving_engine_moves_only_its_own_keys(engines: list[str], key: int) -> None:
    order = ranked(engines, key)
    remaining = [name for name in engines if name != order[-1]]

    assert ranked(remaining, key) == order[:-1]
    assert ranked(list(reversed(engines)), key) == order


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 100), min_size=1, max_size=8), keys)
def test_the_pick_is_within_the_bound(running: dict[str, int], key: int) -> None:
    chosen = pick_bounded(running, key, 1.25)

    mean = (sum(running.values()) + 1) / len(running)
    assert running[chosen] + 1 <= math.ceil(1.25 * mean)
