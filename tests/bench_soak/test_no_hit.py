from __future__ import annotations

import os
import random

import pytest
from first_token import BenchError
from no_hit import Rounds, cpu_seconds, make_report, render, settle
from paired_rounds import Interval, ordered, paired_ratio, promise_of


def test_drift_of_the_machine_cancels_out() -> None:
    base = [1.0 / (1 + 0.1 * number) for number in range(9)]  # slower in every round
    ratio = paired_ratio([value * 0.97 for value in base], base, random.Random(1))
    assert ratio.median == pytest.approx(0.97)
    assert (ratio.low, ratio.high) == (pytest.approx(0.97), pytest.approx(0.97))


def test_an_interval_holds_what_made_it() -> None:
    chance = random.Random(2)
    base = [chance.uniform(0.9, 1.1) for _ in range(15)]
    ratio = paired_ratio([value * chance.gauss(0.99, 0.01) for value in base], base, chance)
    assert ratio.low < 0.99 < ratio.high
    assert ratio.high - ratio.low < 0.05


def test_everyone_begins_and_follows_everyone_who_is_next_to_it() -> None:
    names = ["off", "cpu", "nvme", "redis"]
    orders = [ordered(names, number) for number in range(8)]
    assert [order[0] for order in orders[::2]] == names
    assert all(one == other[::-1] for one, other in zip(orders[::2], orders[1::2], strict=True))
    assert all(sorted(order) == sorted(names) for order in orders)


def test_a_promise_is_kept_only_by_the_whole_interval() -> None:
    assert promise_of(Interval(0.99, 0.98, 1.0)) == "kept"
    assert promise_of(Interval(0.99, 0.979, 1.0)) == "undecided"
    assert promise_of(Interval(0.97, 0.96, 0.979)) == "missed"


def test_report_and_table() -> None:
    rounds = {
        "off": Rounds([1.0, 1.1, 0.9], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        "nvme": Rounds([0.99, 1.089, 0.891], [1.02, 1.02, 1.02], [5e6, 5e6, 5e6]),
    }
    report = make_report(rounds, 512, 4, random.Random(0))
    assert report["nvme_throughput_ratio"] == 0.99
    assert report["nvme_promise"] == "kept"
    assert report["nvme_cpu_seconds_ratio"] == 1.02
    assert report["nvme_written_to_shared_tier_bytes"] == 15_000_000
    assert "0.990 (0.990 to 0.990)" in render(report, list(rounds))


def test_processor_time_is_counted() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) <= before:
        sum(range(100_000))


def test_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("no_hit.SETTLE_POLL_SECONDS", 0.0)
    states = iter([1, 2, 2, 3, 3, 3, 3])
    settle(lambda: next(states))
    assert next(states, None) is None
    monkeypatch.setattr("no_hit.SETTLE_SECONDS", 0.0)
    with pytest.raises(BenchError, match="still writing"):
        settle(object)
