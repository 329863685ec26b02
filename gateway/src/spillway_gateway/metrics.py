"""Every metric of the gateway, under the prefix spillway_gateway_.

Labels come from closed sets: configured models and engines, route reasons, status classes. Labelled children are
cached, because the look-up costs more than the increment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_HAND_OVER_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)


class Collected(Protocol):
    """A registry or collector whose metrics an exposition shows."""

    def collect(self) -> Iterable[Metric]: ...


class GatewayMetrics:
    """Counters and histograms of the data plane; `collect_from` adds families that are read at each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[MetricWrapperBase, _lru_cache_wrapper[Any]] = {}
        self.request = self._counter(
            "spillway_gateway_requests",
            "Finished requests by model, engine, route reason and status class.",
            ("model", "engine", "route", "status"),
        )
        self.first_byte = self._histogram(
            "spillway_gateway_time_to_first_byte_seconds",
            "From the whole request read to the first body byte of the engine; streams only.",
            ("model", "engine"),
            buckets=_FIRST_BYTE_BUCKETS,
        )
        self.overhead = self._histogram(
            "spillway_gateway_overhead_seconds",
            "The gateway's own time per request: parsing, hashing, routing and header work.",
            ("model",),
            buckets=_OVERHEAD_BUCKETS,
        )
        self.retry = self._counter(
            "spillway_gateway_retries",
            "Attempts made again on another engine, by the failed engine and the reason.",
            ("engine", "reason"),
        )
        self.suspect = self._counter(
            "spillway_gateway_suspect_requests",
            "Requests that an engine ended of (found), and the same requests again (refused).",
            ("model", "outcome"),
        )
        self.disconnect = self._counter(
            "spillway_gateway_client_disconnects",
            "Requests whose client went away, by whether a body byte had been sent.",
            ("model", "phase"),
        )
        self.broken = self._counter(
            "spillway_gateway_broken_replies",
            "Replies that an engine broke off after the first byte.",
            ("engine", "reason"),
        )
        self.continued = self._counter(
            "spillway_gateway_continued_answers",
            "Answers that another engine continued after the first byte, by the first engine's failure.",
            ("model", "reason"),
        )
        self.not_continued = self._counter(
            "spillway_gateway_not_continued_answers",
            "Answers that broke after the first byte while continuation was on and ended, by what prevented it.",
            ("model", "why"),
        )
        self.legs = self._counter(
            "spillway_gateway_legs",
            "Requests of models whose engines have roles, by whether they took one leg or two, and why.",
            ("model", "decision", "reason"),
        )
        self.hand_over = self._histogram(
            "spillway_gateway_hand_over_seconds",
            "From the end of a first leg until the second one's engine was chosen.",
            ("model",),
            buckets=_HAND_OVER_BUCKETS,
        )
        self.promotion_hint = self._counter(
            "spillway_gateway_promotion_hints",
            "Prefixes that engines were sent to promote, by what they answered; dropped: too many at once.",
            ("model", "outcome"),
        )
        self.session = self._counter(
            "spillway_gateway_session_choices",
            "Choices of an engine for a request that names a session, by whether it stayed with the last one.",
            ("model", "outcome"),
        )
        self.retentions = self._counter(
            "spillway_gateway_retentions",
            "Requests that ask to retain their prompt: as long as they ask, shortened, or not at all (refused).",
            ("model", "outcome"),
        )
        self.retained_token_hours = self._counter(
            "spillway_gateway_retained_token_hours",
            "Prompt tokens times the hours for which their retention was granted.",
            ("model",),
        )
        self.pause = self._histogram(
            "spillway_gateway_continuation_pause_seconds",
            "From an engine's failure to the first event of the engine that continues the answer.",
            ("model",),
            buckets=_FIRST_BYTE_BUCKETS,
        )
        self.predicted_tokens = self._counter(
            "spillway_gateway_predicted_cached_tokens",
            "Prompt tokens expected to be cached for the chosen engine, by tier, if the reply reported the actual "
            "number.",
            ("model", "tier"),
        )
        self.actual_tokens = self._counter(
            "spillway_gateway_actual_cached_tokens",
            "Prompt tokens that the engine's usage reported as cached; it does not say in which tier.",
            ("model",),
        )
        self.missing_tokens = self._counter(
            "spillway_gateway_missing_cached_tokens",
            "Prompt tokens by which requests found less than routing had expected for them, by the tier in which the "
            "first of them was expected.",
            ("model", "tier"),
        )
        self.event_batches = Counter(
            "spillway_gateway_event_batches", "KV event batches applied.", ("engine",), registry=self.registry
        )
        self.event_gaps = Counter(
            "spillway_gateway_event_gaps",
            "Gaps seen in an engine's event sequence.",
            ("engine",),
            registry=self.registry,
        )
        self.event_replays = Counter(
            "spillway_gateway_event_replays",
            "Replays asked for, by outcome.",
            ("engine", "outcome"),
            registry=self.registry,
        )
        self.event_restarts = Counter(
            "spillway_gateway_event_restarts",
            "Times an engine's event stream began again.",
            ("engine",),
            registry=self.registry,
        )
        self.events_undecodable = Counter(
            "spillway_gateway_events_undecodable",
            "Events or batches of unknown shape; an engine upgrade that blinds the gateway shows here.",
            ("engine",),
            registry=self.registry,
        )
        self.event_last_batch = Gauge(
            "spillway_gateway_event_last_batch_timestamp_seconds",
            "The engine's own clock on the last batch applied.",
            ("engine",),
            registry=self.registry,
        )
        self.tokenizer_usable = Gauge(
            "spillway_gateway_tokenizer_usable",
            "1 when prompts are matched by the model's tokens; 0 when the configured tokenizer failed to load or "
            "disagrees with the engine and text blocks are used.",
            ("model",),
            registry=self.registry,
        )
        self.on_removed: list[Callable[[str], None]] = []  # called with each engine that is gone

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> _lru_cache_wrapper[Counter]:
        """Declare it; its children by the values of its labels."""
        metric = Counter(name, text, labels, registry=self.registry)
        self._children[metric] = children = cache(metric.labels)
        return children

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> _lru_cache_wrapper[Histogram]:
        """The same for a histogram."""
        metric = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
        self._children[metric] = children = cache(metric.labels)
        return children

    def remove_engine(self, engine: str) -> None:
        """Drop every series of an engine that is gone for good: pod names are never reused, and would accumulate."""
        for metric in (*self._children, *vars(self).values()):
            if isinstance(metric, MetricWrapperBase) and "engine" in metric._labelnames:
                metric.remove_by_labels({"engine": engine})
                if metric in self._children:
                    self._children[metric].cache_clear()
        for forget in self.on_removed:
            forget(engine)

    def collect_from(self, read: Callable[[], Iterable[GaugeMetricFamily | CounterMetricFamily]]) -> None:
        """Add families read from live state at each scrape."""
        self.registry.register(_Reader(read))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Reader:
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        return ()
