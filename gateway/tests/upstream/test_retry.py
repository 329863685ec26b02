from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.upstream.retry import RetryBudget, may_retry


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 10))
def test_retries_stay_within_share_and_burst(steps: list[bool], burst: int) -> None:
    budget = RetryBudget(0.2, burst)
    requests = granted = 0
    for is_request in steps:
        if is_request:
            requests += 1
            budget.earn()
        else:
            granted += budget.spend()

    assert granted <= burst + 0.2 * requests + 1e-6


def test_never_after_the_first_byte() -> None:
    assert may_retry(bytes_sent=False, attempts=1, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=True, attempts=1, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=False, attempts=3, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=False, attempts=1, attempts_max=3, engines_left=False)
