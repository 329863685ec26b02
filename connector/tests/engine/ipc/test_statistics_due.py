"""Steps of an engine that report statistics, on a clock of the test's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.engine.connector import SpillwayConnector
from spillway_connector.engine.ipc.statistics_due import STATISTICS_BURST, STATISTICS_SECONDS, StatisticsDue


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=200))
def test_reports_are_rare_while_the_engine_computes_and_none_is_left_out_at_its_end(steps):
    clock = Clock()
    due = StatisticsDue(clock)
    begin, reported, answers = clock.now, 0, []
    for milliseconds, tokens in steps:
        clock.now += milliseconds / 1000
        due.planned(tokens)
        answers.append(due.take())
        if not tokens:
            assert answers[-1]
            continue
        reported += answers[-1]
        assert reported <= STATISTICS_BURST + (clock.now - begin) / STATISTICS_SECONDS + 1e-6
        assert answers[-1] or reported >= STATISTICS_BURST
    assert all(answers[:STATISTICS_BURST]), "the steps of a short request report at once"


def test_an_engine_that_computes_for_long_reports_ten_times_a_second(clock):
    due = StatisticsDue(clock)
    due.planned(8)
    for _ in range(STATISTICS_BURST):
        due.take()
    reported = 0
    for _ in range(1000):
        clock.now += 0.01
        reported += due.take()
    assert reported == pytest.approx(100, abs=1)


def test_with_asynchronous_scheduling_the_newest_step_counts(clock):
    """A step may be planned before the results of the last one are processed."""
    due = StatisticsDue(clock)
    due.planned(8)
    assert due.take()
    due.planned(8)
    due.planned(0)
    assert due.take() and due.take()


def test_a_connector_whose_engine_computes_counts_on_and_reports_what_it_counted_later(clock, monkeypatch):
    """The connector of either generation asks its half only if statistics are due."""
    connector = SpillwayConnector.__new__(SpillwayConnector)
    asked = []
    half = SimpleNamespace(
        build_connector_meta=lambda output: None,
        get_stats=lambda: asked.append(clock.now) or "statistics",
        manager=SimpleNamespace(take_stats=lambda: asked.append(clock.now) or "statistics"),
    )
    monkeypatch.setattr(f"{SpillwayConnector.__module__}.SpillwayConnectorScheduler", SimpleNamespace)
    connector.connector_worker, connector.connector_scheduler = None, half
    connector._statistics_due = StatisticsDue(clock)

    def step(tokens):
        connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=tokens))
        return connector.get_kv_connector_stats()

    assert [step(8) for _ in range(STATISTICS_BURST)] == ["statistics"] * STATISTICS_BURST
    assert step(8) is None and len(asked) == STATISTICS_BURST
    clock.now += 1.5 * STATISTICS_SECONDS
    assert step(8) == "statistics"
    assert step(8) is None
    assert step(0) == "statistics"
