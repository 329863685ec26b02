from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.discovery.backoff import FIRST_SECONDS, pause_seconds


@given(st.integers(1, 10_000), st.floats(0.1, 600), st.floats(0, 1))
def test_pauses_grow_within_their_bound_and_are_never_zero(failures: int, most: float, chance: float) -> None:
    pause = pause_seconds(failures, most, chance)

    assert min(most, FIRST_SECONDS) / 2 <= pause <= most
    assert pause <= pause_seconds(failures + 1, most, chance)
    assert pause_seconds(failures, most, 1.0) <= pause <= pause_seconds(failures, most, 0.0)
