from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import BreakerConfig
from spillway_gateway.fleet.breaker import Breaker

CONFIG = BreakerConfig(failures=3, open_seconds=5.0, open_seconds_max=12.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(CONFIG.failures):
        breaker.failed(now)
    return breaker


def test_a_few_failures_among_many_leave_it_closed() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(20):
        breaker.failed(0.0)
        for _ in range(3):
            breaker.succeeded()

    assert breaker.closed and breaker.allows(0.0)


def test_failures_in_a_row_open_it() -> None:
    assert not opened().allows(4.9)


def test_a_share_of_failures_opens_it_without_many_in_a_row() -> None:
    breaker = Breaker(CONFIG)
    for _ in range(9):
        breaker.succeeded()
        breaker.failed(0.0)
        assert breaker.closed  # too few outcomes to decide
    breaker.succeeded()
    breaker.failed(0.0)

    assert not breaker.allows(4.9)


def test_a_probe_that_began_lets_others_in_and_breaks_at_the_first_failure() -> None:
    breaker = opened()
    assert breaker.sent()
    breaker.probe_began()
    assert breaker.allows(5.0) and not breaker.sent()
    breaker.failed(6.0)

    assert not breaker.allows(15.9) and breaker.allows(16.0)  # the pause doubled


def test_old_streams_that_end_do_not_close_it() -> None:
    breaker = opened()
    breaker.succeeded()

    assert not breaker.closed


def test_one_probe_at_a_time_after_the_pause() -> None:
    breaker = opened()

    assert breaker.allows(5.0)
    assert breaker.sent()
    assert not breaker.allows(6.0)
    breaker.succeeded(probe=True)
    assert breaker.closed and not breaker.sent()


def test_a_failed_probe_doubles_the_pause_up_to_the_bound() -> None:
    breaker = opened()
    now, pauses = 5.0, []
    for _ in range(3):
        assert breaker.sent()
        breaker.failed(now)
        pause = next(seconds for seconds in (5.0, 10.0, 12.0) if breaker.allows(now + seconds))
        pauses.append(pause)
        now += pause

    assert pauses == [10.0, 12.0, 12.0]


def test_a_probe_without_a_verdict_makes_room_for_the_next() -> None:
    breaker = opened()
    breaker.sent()
    breaker.probe_ended()

    assert breaker.allows(5.0)


def test_late_failures_of_older_requests_do_not_prolong_the_pause() -> None:
    breaker = opened()
    breaker.failed(4.0)

    assert breaker.allows(5.0)
    assert breaker.opened_total == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["sent", "began", "ok", "whole", "fail", "lost"]), st.floats(0, 30)), max_size=60
    )
)
def test_no_history_keeps_an_engine_out_for_ever(steps: list[tuple[str, float]]) -> None:
    breaker = Breaker(CONFIG)
    now = 0.0
    for action, pause in steps:
        now += pause
        if action == "sent":
            breaker.sent()
        elif action == "began":
            breaker.probe_began()
        elif action in ("ok", "whole"):
            breaker.succeeded(probe=action == "whole")
        elif action == "fail":
            breaker.failed(now)
        else:
            breaker.probe_ended()
    breaker.probe_ended()  # every request ends at last

    assert breaker.allows(now + CONFIG.open_seconds_max)
