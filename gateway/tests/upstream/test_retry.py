from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.errors import (
    EngineBadReply,
    EngineConnectTimeout,
    EngineDisconnected,
    EngineEnding,
    EngineFailed,
    EngineFirstByteTimeout,
    EngineRefused,
    EngineWentDown,
    UpstreamError,
)
from spillway_gateway.upstream.retry import RetryBudget, may_retry


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 10))
def test_retries_stay_within_share_and_burst(steps: list[bool], burst: int) -> None:
    budget = RetryBudget(lambda: LimitsConfig(retry_ratio=0.2, retry_burst=burst))
    requests = granted = 0
    for is_request in steps:
        if is_request:
            requests += 1
            budget.earn()
        else:
            granted += budget.spend(EngineFirstByteTimeout("late"))

    assert granted <= burst + 0.2 * requests + 1e-6


@pytest.mark.parametrize("gone", [EngineRefused, EngineDisconnected, EngineWentDown, EngineEnding, EngineFailed])
def test_all_requests_of_an_engine_that_is_gone_may_be_retried(gone: type[UpstreamError]) -> None:
    budget = RetryBudget(lambda: LimitsConfig(retry_ratio=0.2, retry_burst=1))
    assert all(budget.spend(gone("gone")) for _ in range(1000))
    assert budget.spend(EngineFirstByteTimeout("late"))  # they took nothing of it


@pytest.mark.parametrize("late", [EngineConnectTimeout, EngineFirstByteTimeout, EngineBadReply])
def test_retries_after_an_engine_that_still_runs_are_bounded(late: type[UpstreamError]) -> None:
    budget = RetryBudget(lambda: LimitsConfig(retry_ratio=0.2, retry_burst=1))
    assert budget.spend(late("late"))
    assert not budget.spend(late("late"))


def test_never_after_the_first_byte() -> None:
    assert may_retry(bytes_sent=False, attempts=1, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=True, attempts=1, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=False, attempts=3, attempts_max=3, engines_left=True)
    assert not may_retry(bytes_sent=False, attempts=1, attempts_max=3, engines_left=False)


def test_a_reload_changes_what_the_next_request_earns() -> None:
    limits = [LimitsConfig(retry_ratio=0.0, retry_burst=0)]
    budget, late = RetryBudget(lambda: limits[-1]), EngineFirstByteTimeout("late")
    budget.earn()
    assert not budget.spend(late)
    limits.append(LimitsConfig(retry_ratio=1.0, retry_burst=1))
    budget.earn()
    assert budget.spend(late) and not budget.spend(late)
