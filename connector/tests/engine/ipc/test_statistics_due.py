"""Steps of an engine that report statistics, on a clock of the test's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.connector import SpillwayConnector
from spillway_connector.engine.ipc.statistics_due import STATISTICS_BURST, STATISTICS_SECONDS, StatisticsDue
from spillway_connector.testing.generation import (
    SpillwayTieringManager,
    make_cpu_tier,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region

BLOCK_TOKENS, ROWS = 16, 8


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


def test_a_connector_whose_engine_computes_counts_on_and_reports_what_it_counted_later(clock):
    """The connector of either generation asks its half only if statistics are due."""
    region = unnamed_region(ROWS, 4096)
    manager = SpillwayTieringManager(
        make_cpu_tier(ROWS, region, "lru", enable_events=False),
        [],
        ROWS,
        ConnectorConfig.parse({"num_cpu_blocks": ROWS}),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    connector = SpillwayConnector.__new__(SpillwayConnector)
    connector.connector_worker, connector.connector_scheduler = None, scheduler_half(manager, [attention])
    connector._statistics_due = StatisticsDue(clock)

    def step(tokens):
        connector.build_connector_meta(step_output({"running": tokens} if tokens else {}))
        manager.count_settled(1)
        stats = connector.get_kv_connector_stats()
        return None if stats is None else next(count for name, count in counts_of(stats) if "settled" in name)

    assert [step(8) for _ in range(STATISTICS_BURST)] == [1] * STATISTICS_BURST
    assert [step(8), step(8)] == [None, None]
    clock.now += 1.5 * STATISTICS_SECONDS
    assert [step(8), step(8), step(0)] == [3, None, 2]
    region.cleanup()


def counts_of(stats):
    """Yield names and values of whatever vLLM's statistics of this generation hold."""
    left = [("", stats.data)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}|{key}", one) for key, one in value.items()]
        elif isinstance(value, int | float):
            yield name, value
