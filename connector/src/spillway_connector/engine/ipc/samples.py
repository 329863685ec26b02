"""Spillway's samples of one engine step, as the plain data that vLLM's statistics carry between processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from spillway_connector import metrics
from spillway_connector.metrics import Kind, Metric

SAMPLES_KEY = "spillway"  # of all samples within the statistics
# One sample is keyed "metric|label value|label value": statistics cross processes as plain msgpack.
SEPARATOR = "|"


@lru_cache(maxsize=4096)  # a step adds the same ones as the step before
def sample_key(metric: Metric, *label_values: str) -> str:
    assert len(label_values) == len(metric.labels)
    return SEPARATOR.join((metric.name, *label_values))


def metric_of(key: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric and the label values that a :func:`sample_key` was made of."""
    name, *label_values = key.split(SEPARATOR)
    return metrics.BY_NAME[name], tuple(label_values)


class SampledStats:
    """Samples that are mixed into vLLM's statistics of a connector: a counter delta, or the value of a gauge, by
    :func:`sample_key`."""

    data: dict[str, Any]  # vLLM's

    def add(self, metric: Metric, amount: float, *label_values: str) -> None:
        """Count `amount` more of a counter, or set a gauge to it."""
        samples = self.samples()
        key = sample_key(metric, *label_values)
        samples[key] = samples.get(key, 0) + amount if metric.kind is Kind.COUNTER else amount

    def merge(self, samples: Mapping[str, float]) -> None:
        """Counters add up; of a gauge the later value counts."""
        for key, amount in samples.items():
            metric, label_values = metric_of(key)
            self.add(metric, amount, *label_values)

    def samples(self) -> dict[str, float]:
        samples: dict[str, float] = self.data.setdefault(SAMPLES_KEY, {})
        return samples


class Samples(SampledStats):
    """Samples apart from vLLM's statistics. False if there are none."""

    def __init__(self) -> None:
        self.data = {}

    def __bool__(self) -> bool:
        return bool(self.samples())


class Gauges:
    """Adds the gauges that have changed since they were last added. zero: one that is 0 before it is known."""

    def __init__(self, zero: str) -> None:
        self._reported: dict[str, float | None] = {zero: 0}

    def add(self, stats: SampledStats, values: Mapping[str, float | None]) -> None:
        """Add those of these gauges that have changed, by :func:`sample_key`; None: it is not known yet."""
        for key, value in values.items() - self._reported.items():
            self._reported[key] = value
            if value is not None:
                stats.samples()[key] = value
