"""The lane's verdicts on gateways that follow, follow late, or do not follow. Needs no cluster."""

from __future__ import annotations

from cluster.discovery_watch import FOLLOW_SECONDS_MAX, Change, lags

BOTH, FIRST, REPLACED = {"u0": "e-0", "u1": "e-1"}, {"u0": "e-0"}, {"u0": "e-0", "u2": "e-1"}
RESTART = [Change(0.0, BOTH), Change(10.0, FIRST), Change(18.0, REPLACED)]


def test_a_gateway_that_follows_has_small_lags() -> None:
    gateway = [Change(0.0, BOTH), Change(10.5, FIRST), Change(17.9, REPLACED)]

    assert lags(RESTART, [gateway]) == {"-e-1": 0.5, "+e-1": 0.0}
    assert lags(RESTART, [gateway, [Change(0.0, BOTH), Change(12.0, FIRST), Change(19.0, REPLACED)]]) == {
        "-e-1": 2.0,
        "+e-1": 1.0,
    }


def test_a_gateway_that_stands_still_is_late_for_ever() -> None:
    """The engine that Kubernetes has again under that name does not count: it is another pod."""
    found = lags(RESTART, [[Change(0.0, BOTH)]])

    assert found == {"-e-1": float("inf"), "+e-1": float("inf")}
    assert min(found.values()) > FOLLOW_SECONDS_MAX


def test_a_gateway_that_has_gone_has_nothing_to_follow() -> None:
    assert lags(RESTART, [[Change(0.0, BOTH), Change(10.2, None)]]) == {"-e-1": 10.2 - 10.0, "+e-1": 0.0}


def test_what_is_taken_back_is_late_until_then() -> None:
    flap = [Change(0.0, BOTH), Change(10.0, FIRST), Change(11.5, BOTH)]

    assert lags(flap, [[Change(0.0, BOTH)]]) == {"-e-1": 1.5, "+e-1": 0.0}


def test_a_change_while_another_is_under_way_is_counted_from_its_own_moment() -> None:
    ready = [Change(0.0, {}), Change(1.0, {"u0": "e-0"}), Change(2.0, BOTH)]

    assert lags(ready, [[Change(0.0, {}), Change(2.5, BOTH)]]) == {"+e-0": 1.5, "+e-1": 0.5}
