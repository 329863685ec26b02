"""The frame itself: it sees a gateway that stalls or grows, and none if nothing happens."""

from __future__ import annotations

import httpx
import pytest
from attack.target import ITERATION_UNITS_MAX, Harm, Target


def test_a_small_request_delays_no_other_client(target: Target) -> None:
    def ask() -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        assert httpx.post(target.url + "/v1/chat/completions", json=body, timeout=120).status_code == 200

    target.suffer(ask).assert_bearable(grown_mib_max=16)


def test_a_long_event_loop_iteration_is_seen_in_every_round(target: Target) -> None:
    units = 3 * int(ITERATION_UNITS_MAX)  # three times, as the measured units need not take equally long

    harm = target.suffer(lambda: target.hold(units), rounds=2)
    assert harm.iteration_units > ITERATION_UNITS_MAX
    with pytest.raises(AssertionError, match="one event loop iteration took"):
        harm.assert_bearable(grown_mib_max=16)


def test_a_delayed_stream_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"another stream waited 0\.06 s longer"):
        Harm(0.0, 0, 0.06).assert_bearable(grown_mib_max=16)


def test_memory_above_the_bound_is_an_error() -> None:
    with pytest.raises(AssertionError, match="MiB more memory"):
        Harm(0.0, 2**24 + 1).assert_bearable(grown_mib_max=16)
