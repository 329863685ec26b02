"""One reading of a server's /metrics; subtract two readings for counter deltas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Reading:
    samples: tuple[Sample, ...]

    @classmethod
    def parse(cls, text: str) -> Reading:
        families = text_string_to_metric_families(text)
        return cls(
            tuple(
                Sample(found.name, dict(found.labels), found.value) for family in families for found in family.samples
            )
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over every series of `name` that carries these labels; 0 for a counter that never counted."""
        return sum(sample.value for sample in self._matching(name, labels))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for sample in self._matching(name, labels):
            totals[sample.labels[label]] = totals.get(sample.labels[label], 0.0) + sample.value
        return totals

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


def device_loads_bytes(reading: Reading) -> float:
    """CPU tier -> device."""
    return reading.total("spillway_device_copy_bytes_total", direction="load")


def tier_reads_bytes(reading: Reading, tier: str) -> float:
    """Shared tier -> CPU tier."""
    return reading.total("spillway_tier_read_bytes_total", tier=tier)


@dataclass(frozen=True, slots=True)
class PendingStores:
    """queued_bytes: on the way to the shared tier. The others are counters."""

    queued_bytes: float
    copied_bytes: float
    ended: float


def pending_stores(reading: Reading, tier: str) -> PendingStores:
    ended = (
        "spillway_tier_written_bytes_total",
        "spillway_tier_failures_total",
        "spillway_tier_shed_total",
        "spillway_tier_stores_skipped_total",
    )
    return PendingStores(
        reading.total("spillway_tier_queue_bytes", tier=tier),
        reading.total("spillway_device_copy_bytes_total", direction="store"),
        sum(reading.total(name, tier=tier) for name in ended),
    )


def tier_failures(reading: Reading, tier: str) -> dict[tuple[str, str], float]:
    """(operation, reason) -> how often."""
    return {
        (sample.labels["operation"], sample.labels["reason"]): sample.value
        for sample in reading.samples
        if sample.name == "spillway_tier_failures_total" and sample.labels["tier"] == tier
    }


def new_failures(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], operation: str) -> set[str]:
    """Reasons that `operation` failed for between two readings of `tier_failures`."""
    return {
        reason
        for (failed, reason), count in after.items()
        if failed == operation and count > before.get((failed, reason), 0)
    }
