"""Turns the counters of one shared tier into samples of one engine step: only changes, as counter deltas.

Most steps in which anything moves, move the same few series, so those are compared one by one; for everything else a
whole picture is drawn, when a rare count has moved and otherwise once a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import SampledStats, sample_key
from spillway_connector.tiers.tier import Clock
from spillway_connector.transfer.breaker import BreakerState
from spillway_connector.transfer.chain import TierChain
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_connector.transfer.stats import TierStats

IDLE_SECONDS = 1.0  # between two looks at what moves by itself: a breaker, the bytes that other engines store
# Which field of TierCounters (the frequent) or TierStats (the rest) each metric is read from.
_FREQUENT_COUNTS = (
    (metrics.TIER_LOOKUPS, "lookups"),
    (metrics.TIER_MISSES, "misses"),
    (metrics.TIER_STORES_SKIPPED, "skipped"),
)
_FREQUENT_TOTALS = (
    (metrics.TIER_READ_BYTES, "read_bytes"),
    (metrics.TIER_READ_SECONDS, "read_seconds"),
    (metrics.TIER_WRITTEN_BYTES, "written_bytes"),
    (metrics.TIER_WRITE_SECONDS, "write_seconds"),
)
_counts_of = attrgetter(*(name for _, name in _FREQUENT_COUNTS))
_totals_of = attrgetter(*(name for _, name in _FREQUENT_TOTALS))
_RARE_COUNTS = (
    (metrics.TIER_DEADLINES_EXPIRED, "expiries"),
    (metrics.TIER_FAILURES, "failures"),
    (metrics.TIER_SHED, "shed"),
    (metrics.TIER_EVICTED_FRAMES, "evictions"),
    (metrics.TIER_QUARANTINED, "quarantined"),
    (metrics.TIER_REQUESTS, "requests"),
)
_OF_BACKEND = ("evictions", "quarantined", "requests")  # of _RARE_COUNTS: begin at 0 with each backend that is opened
_GAUGES = (
    (metrics.TIER_HELD_BLOCKS, "held_blocks"),
    (metrics.TIER_RESIDENT_BYTES, "resident_bytes"),
    (metrics.TIER_QUEUE_BYTES, "queued_store_bytes"),
    (metrics.TIER_QUEUE_AGE, "oldest_store_seconds"),
    (metrics.TIER_READY, "ready"),
    (metrics.TIER_WEIGHTS_CHANGED, "weights_changed"),
)
REPORTED = (
    metrics.TIER_DEMOTIONS,
    *(metric for metric, _ in (*_FREQUENT_COUNTS, *_FREQUENT_TOTALS, *_RARE_COUNTS, *_GAUGES)),
    metrics.TIER_BREAKER_OPEN,
)
"""The metrics of which a TierReport adds samples."""


class TierReport:
    """The last reported values of one tier. The scheduler's thread alone uses it."""

    def __init__(self, tier_type: str, shared: SharedTier, clock: Clock = time.monotonic) -> None:
        self._tier_type = tier_type
        self._shared = shared
        self._clock = clock
        self._reported: dict[str, dict[Any, int]] = {name: {} for _, name in (*_FREQUENT_COUNTS, *_RARE_COUNTS)}
        self._keys: dict[tuple[str, Any], str] = {}  # of samples
        self._totals = [sample_key(metric, tier_type) for metric, _ in _FREQUENT_TOTALS]
        self._reported_totals: tuple[float | None, ...] = (None,) * len(_FREQUENT_TOTALS)
        self._picture: TierStats | None = None
        self._before: dict[str, Counter[Any]] = {name: Counter() for name in _OF_BACKEND}  # of former backends
        self._rare_seen = 0
        self._drawn_at = float("-inf")

    def follow(self, shared: SharedTier) -> None:
        """Report of an object that takes the place of the former; what its backend has counted begins at 0."""
        former, self._shared = self._shared.snapshot(), shared
        for name in _OF_BACKEND:
            self._before[name] = Counter(self._before[name]) + Counter(getattr(former, name))
        self._drawn_at = float("-inf")

    def has_updates(self) -> bool:
        """Whether :meth:`add_to` has something to report, or its idle interval is over."""
        return self._shared.counters.moved or self._clock() - self._drawn_at >= IDLE_SECONDS

    def add_to(self, stats: SampledStats) -> None:
        """Add what changed since the last call; the first time, every series."""
        if not self.has_updates():
            return
        self._shared.counters.moved = False
        counters = self._shared.counters
        for (metric, name), counts in zip(_FREQUENT_COUNTS, _counts_of(counters), strict=True):
            if not dict.__eq__(counts, self._reported[name]):  # a Counter compares itself in a loop of Python's
                self._add_deltas(stats, metric, name, counts)
        if (totals := _totals_of(counters)) != self._reported_totals:
            for key, total, reported in zip(self._totals, totals, self._reported_totals, strict=True):
                if total != reported:
                    stats.samples()[key] = total - (reported or 0)
            self._reported_totals = totals
        rare = sum(counters.failures.values()) + sum(counters.expiries.values()) + counters.weights_changes
        rare += sum(counters.shed.values()) + self._shared.evicted_frames
        now = self._clock()
        if rare != self._rare_seen or now - self._drawn_at >= IDLE_SECONDS:
            self._rare_seen, self._drawn_at = rare, now
            self._draw(stats)

    def _draw(self, stats: SampledStats) -> None:
        now, before = self._shared.snapshot(), self._picture
        self._picture = now
        for metric, name in _RARE_COUNTS:
            counts = getattr(now, name)
            if before_all := self._before.get(name):
                counts = before_all + Counter(counts)
            self._add_deltas(stats, metric, name, counts)
        for metric, name in _GAUGES:
            value = float(getattr(now, name))
            if before is None or value != getattr(before, name):
                stats.add(metric, value, self._tier_type)
        for operation, state in now.breakers.items():
            if before is None or state is not before.breakers[operation]:
                is_open = float(state is not BreakerState.CLOSED)
                stats.add(metrics.TIER_BREAKER_OPEN, is_open, self._tier_type, operation.value)

    def _add_deltas(self, stats: SampledStats, metric: metrics.Metric, name: str, counts: Mapping[Any, int]) -> None:
        reported, samples = self._reported[name], stats.samples()
        for key, count in counts.items():
            if count != reported.get(key):
                sample = self._keys.get((name, key))
                if sample is None:
                    sample = self._keys[name, key] = sample_key(metric, self._tier_type, *_labels(key))
                samples[sample] = count - reported.get(key, 0)
                reported[key] = count


class JointReport:
    """The reports of one shared tier, or of two behind each other and of what goes from one to the other."""

    def __init__(self, reports: Sequence[TierReport], chain: TierChain | None) -> None:
        self._reports = reports
        self._chain = chain
        self._reported: dict[str, int] = {}

    def follow(self, members: Sequence[SharedTier], chain: TierChain | None) -> None:
        """See TierReport.follow."""
        for report, member in zip(self._reports, members, strict=True):
            report.follow(member)
        self._chain = chain
        self._reported.clear()

    def has_updates(self) -> bool:
        """Whether :meth:`add_to` has something to report."""
        return any([report.has_updates() for report in self._reports])

    def add_to(self, stats: SampledStats) -> None:
        """Add what changed since the last call."""
        for report in self._reports:
            report.add_to(stats)
        if self._chain is None:
            return
        below = self._chain.members[1].tier_name
        for outcome, count in self._chain.demotions.outcomes().items():
            if count != self._reported.get(outcome):
                stats.add(metrics.TIER_DEMOTIONS, count - self._reported.get(outcome, 0), below, outcome.value)
                self._reported[outcome] = count


def _labels(key: Enum | str | tuple[Enum | str, ...]) -> tuple[str, ...]:
    """The label values of one entry of a count: an enumeration's member, a word, or several of them."""
    parts = key if isinstance(key, tuple) else (key,)
    return tuple([str(part.value) if isinstance(part, Enum) else str(part) for part in parts])
