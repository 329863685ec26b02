from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.tiers.s3.client import BURST_SECONDS, RequestRate


def test_after_a_pause_a_burst_begins_at_once_and_the_next_waits() -> None:
    rate = RequestRate(10)
    assert [rate.begin(100.0) for _ in range(10)] == [0.0] * 10

    assert rate.begin(100.0) == 0.0  # the burst's end
    assert round(rate.begin(100.0), 6) == 0.1
    assert round(rate.wait_seconds(100.1), 6) == 0.1
    assert rate.begin(200.0) == 0.0


@given(st.floats(0.5, 1000), st.lists(st.floats(0, 3), min_size=1, max_size=50))
def test_no_span_has_more_than_its_share_and_a_burst(per_second: float, pauses: list[float]) -> None:
    rate, now, begun = RequestRate(per_second), 0.0, []
    for pause in pauses:
        now += pause
        begun.append(now + rate.begin(now))
    for first in range(len(begun)):
        for last in range(first, len(begun)):
            span = begun[last] - begun[first]
            assert last - first <= (span + BURST_SECONDS) * per_second + 1e-3 + 1
