"""A tier's counters, reported in portions: every count once, rare ones at once, unchanged ones within a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from spillway_connector.engine.shared_tiers.tier_stats import IDLE_SECONDS, TierReport
from spillway_connector.engine.v023.stats import SpillwayStats
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, key_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import EvictionReason
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_connector.transfer.stats import Operation

PAYLOAD, ROWS = 1000, 16


@pytest.fixture
def shared() -> Iterator[SharedTier]:
    tier = MemoryTier(NAMESPACE, PAYLOAD, MemoryStore(1 << 20))
    rows = np.zeros(ROWS * PAYLOAD, np.uint8)
    shared = SharedTier(tier, rows=memoryview(rows), row_bytes=PAYLOAD, payload_bytes=PAYLOAD)
    yield shared
    shared.close(timeout_seconds=1.0)


def samples_of(report: TierReport) -> dict[str, float]:
    stats = SpillwayStats()
    report.add_to(stats)
    return stats.reduce()


def end_job(shared: SharedTier) -> None:
    while not shared.finished():
        assert shared.wait_for_progress(60.0)


def test_portions_add_up_to_the_counters(shared: SharedTier):
    report = TierReport("memory", shared)
    sums: Counter[str] = Counter()
    for number in range(ROWS):
        shared.submit_store(2 * number, [key_of(number)], [number])
        end_job(shared)
        sums.update(samples_of(report))
        shared.submit_load(2 * number + 1, [key_of(number), key_of(100 + number)], [number, 0])
        end_job(shared)
        shared.lookup(key_of(number), "r")
        sums.update(samples_of(report))
    counters = shared.counters
    assert sums["tier_written_bytes|memory"] == counters.written_bytes == ROWS * PAYLOAD
    assert sums["tier_read_bytes|memory"] == counters.read_bytes == ROWS * PAYLOAD
    assert sums["tier_lookups|memory|hit"] == sum(counters.lookups.values()) == ROWS
    assert sums["tier_failures|memory|load|miss"] == counters.failures[Operation.LOAD, "miss"] == ROWS
    assert sums["tier_misses|memory|gone"] == ROWS


def test_an_idle_tier_is_read_once_a_second(shared: SharedTier):
    clock = SteppedClock()
    report = TierReport("memory", shared, clock)
    samples_of(report)
    shared._tier._evictions[EvictionReason.ROOM] += 3  # on a thread of its own  # type: ignore[attr-defined]
    assert not report.has_updates()
    assert samples_of(report) == {}
    clock.advance(IDLE_SECONDS)
    assert report.has_updates()
    assert samples_of(report) == {"tier_evicted_frames|memory|room": 3}
    assert samples_of(report) == {}


def test_the_first_portion_has_every_series_and_the_next_none_that_rests(shared: SharedTier):
    report = TierReport("memory", shared)
    stats, next_stats = SpillwayStats(), SpillwayStats()
    report.add_to(stats)
    names = {key.split("|")[0].removeprefix("spillway_tier_") for key in stats.samples()}
    assert names >= {"read_bytes", "read_seconds", "written_bytes", "write_seconds", "breaker_open", "resident_bytes"}
    shared.counters.moved = True
    report.add_to(next_stats)
    assert not next_stats.samples()
