"""Counts of several processes as one exposition: the router's own, those of its fronts, and of fronts that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from spillway_gateway.metrics import Collected
from spillway_gateway.processes.messages import FamilySamples

_SUMMED_TYPES = ("counter", "histogram")
SUMMED_GAUGES = (
    "spillway_gateway_client_connections",
    "spillway_gateway_body_bytes",
    "spillway_gateway_unread_reply_bytes",
)
Labels = tuple[str, ...]  # names and values in turns
Counted = dict[str, dict[tuple[str, Labels], float]]  # family -> (series, labels) -> value


def counts_of(registry: Collected) -> FamilySamples:
    """Return the counts of one process that can be added to those of others."""
    families: FamilySamples = {}
    for family in registry.collect():
        if family.type in _SUMMED_TYPES or family.name in SUMMED_GAUGES:
            samples = [
                (sample.name, _flat(sample.labels), sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            if samples:
                families[family.name] = samples
    return families


class SummedCounts:
    """The families of an exposition: own ones with the other processes' counts in them. others: their last counts."""

    def __init__(self, own: Collected, others: Callable[[], Iterable[FamilySamples]]) -> None:
        self._own = own
        self._others = others
        self._ended: Counted = {}

    def ended(self, counts: FamilySamples) -> None:
        """A process has ended: its counters stay in the sums, its gauges do not."""
        _add(self._ended, {name: samples for name, samples in counts.items() if name not in SUMMED_GAUGES})

    def exposition(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        counted: Counted = {name: dict(values) for name, values in self._ended.items()}
        for counts in self._others():
            _add(counted, counts)
        for family in self._own.collect():
            others = counted.get(family.name)
            yield family if not others else _summed(family, others)

    def forget_engine(self, engine: str) -> None:
        """Forget an engine of processes that ended: the router's own series of the engine are dropped, too."""
        for values in self._ended.values():
            for series in [series for series in values if ("engine", engine) in _pairs(series[1])]:
                del values[series]


def _add(counted: Counted, counts: FamilySamples) -> None:
    for name, samples in counts.items():
        values = counted.setdefault(name, {})
        for series, labels, value in samples:
            key = series, tuple(labels)
            values[key] = values.get(key, 0.0) + value


def _summed(family: Metric, others: dict[tuple[str, Labels], float]) -> Metric:
    summed = Metric(family.name, family.documentation, family.type)
    left = dict(others)
    for sample in family.samples:
        more = left.pop((sample.name, _flat(sample.labels)), 0.0)
        summed.samples.append(sample._replace(value=sample.value + more))
    for (series, labels), value in left.items():
        summed.samples.append(Sample(series, dict(_pairs(labels)), value))
    return summed


def _flat(labels: dict[str, str]) -> Labels:
    return tuple(part for pair in labels.items() for part in pair)


def _pairs(labels: Labels) -> list[tuple[str, str]]:
    return list(zip(labels[::2], labels[1::2], strict=True))
