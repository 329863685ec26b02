from hypothesis import given
from hypothesis import strategies as st

from spillway_stack.supervisor import DELAY_SECONDS_MAX, failures_after_exit, restart_delay_seconds


def test_delays_double_up_to_the_bound() -> None:
    assert [restart_delay_seconds(failures) for failures in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@given(st.integers(0, 10_000))
def test_delays_are_bounded_and_never_shrink(failures: int) -> None:
    assert 0 < restart_delay_seconds(failures) <= restart_delay_seconds(failures + 1) <= DELAY_SECONDS_MAX


def test_a_clean_exit_and_a_long_run_forgive() -> None:
    assert failures_after_exit(5, ran_seconds=1, exit_code=0) == 0
    assert failures_after_exit(5, ran_seconds=61, exit_code=1) == 1
    assert failures_after_exit(5, ran_seconds=1, exit_code=-9) == 6
