"""Spillway's metrics among vLLM's: since 0.30 a spec declares them, and the scheduler's process alone reports them."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import Samples, metric_of
from spillway_connector.metrics import Kind

_METADATA: dict[Kind, type[OffloadingMetricMetadata]] = {
    Kind.COUNTER: OffloadingCounterMetadata,
    Kind.GAUGE: OffloadingGaugeMetadata,
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics by name, as OffloadingSpec.build_metric_definitions does."""
    return {
        metric.name: _METADATA[metric.kind](documentation=metric.help, labelnames=metric.labels)
        for metric in metrics.ALL
    }


def add_samples(stats: OffloadingConnectorStats, samples: Samples) -> None:
    for key, amount in samples.samples().items():
        metric, label_values = metric_of(key)
        if metric.kind is Kind.COUNTER:
            stats.increase_counter(metric.name, amount, label_values)
        else:
            stats.set_gauge(metric.name, amount, label_values)


def connector_stats(samples: Samples) -> OffloadingConnectorStats | None:
    """Return the statistics, or None if there is nothing to report."""
    if not samples:
        return None
    stats = OffloadingConnectorStats()
    add_samples(stats, samples)
    return stats
