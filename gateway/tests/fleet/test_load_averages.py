from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.load_averages import BUSY_SECONDS, BusyShare, RequestMeans


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 20)), max_size=50))
def test_a_busy_share_is_never_negative_and_decays(steps: list[tuple[float, float]]) -> None:
    busy, now, sent = BusyShare(), 0.0, 0.0
    for seconds, pause in steps:
        now += pause
        busy.add(seconds, now)
        sent += seconds
        assert 0 <= busy.at(now) <= sent / BUSY_SECONDS + 1e-9
        assert busy.at(now + 1) <= busy.at(now)


def test_a_steady_stream_of_work_is_its_own_share() -> None:
    busy = BusyShare()
    for step in range(10_000):
        busy.add(0.006, step * 0.01)

    assert abs(busy.at(100.0) - 0.6) < 0.01


@given(st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 1_000)), min_size=1, max_size=100))
def test_means_lie_between_zero_and_the_largest_request(requests: list[tuple[int, float]]) -> None:
    means = RequestMeans()
    for tokens, seconds in requests:
        means.sent(tokens)
        means.finished(seconds)

    assert 0 <= means.uncached_tokens <= max(tokens for tokens, _ in requests)
    assert 0 <= means.seconds <= max(seconds for _, seconds in requests)


def test_means_follow_a_change_of_traffic() -> None:
    means = RequestMeans()
    for tokens in [1_000] * 300 + [5_000] * 300:
        means.sent(tokens)
        means.finished(tokens / 1_000)

    assert 4_900 < means.uncached_tokens < 5_000
    assert 4.9 < means.seconds < 5.0


def test_the_device_share_and_the_time_of_a_load_are_of_the_tokens_found_lately() -> None:
    means = RequestMeans()
    assert means.device_share == means.reload_token_ms == means.cached_share == 0.0
    means.found(0, 0, 0.0)
    assert means.device_share == means.reload_token_ms == 0.0
    for _ in range(1_000):
        means.found(300, 100, 25.0)
    assert (means.device_share, means.reload_token_ms) == pytest.approx((0.75, 0.25))
    for _ in range(1_000):
        means.found(0, 400, 40.0)
    assert means.device_share < 0.01
    assert means.reload_token_ms == pytest.approx(0.1, rel=0.01)


def test_the_cached_share_is_of_all_prompt_tokens() -> None:
    means = RequestMeans()
    for _ in range(1_000):
        means.sent(100)
        means.found(200, 100, 5.0)
    assert means.cached_share == pytest.approx(0.75)
