"""The metrics of one tier in vLLM's own tiering: those of a shared tier, under their usual names."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingMetricMetadata

from spillway_connector import metrics
from spillway_connector.engine.samples import Samples
from spillway_connector.engine.tier_stats import TierReport
from spillway_connector.engine.v030.stats import connector_stats, metric_definitions

# What TierReport fills in. The others are of Spillway's own connector: its device copies, CPU tier and load gate.
TIER_METRICS = (
    metrics.TIER_LOOKUPS,
    metrics.TIER_MISSES,
    metrics.TIER_STORES_SKIPPED,
    metrics.TIER_READ_BYTES,
    metrics.TIER_READ_SECONDS,
    metrics.TIER_WRITTEN_BYTES,
    metrics.TIER_WRITE_SECONDS,
    metrics.TIER_DEADLINES_EXPIRED,
    metrics.TIER_FAILURES,
    metrics.TIER_SHED,
    metrics.TIER_EVICTED_FRAMES,
    metrics.TIER_QUARANTINED,
    metrics.TIER_RESIDENT_BYTES,
    metrics.TIER_QUEUE_BYTES,
    metrics.TIER_QUEUE_AGE,
    metrics.TIER_READY,
    metrics.TIER_WEIGHTS_CHANGED,
    metrics.TIER_BREAKER_OPEN,
)


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The definitions of TIER_METRICS, by name, for vLLM to register in its API server."""
    defined = metric_definitions()
    return {metric.name: defined[metric.name] for metric in TIER_METRICS}


def take_stats(report: TierReport) -> OffloadingConnectorStats | None:
    """What changed since the last call; None if nothing did."""
    samples = Samples()
    report.add_to(samples)
    return connector_stats(samples)
