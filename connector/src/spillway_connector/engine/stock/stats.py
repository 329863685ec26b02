"""The metrics of one tier in vLLM's own tiering: those of a shared tier, under their usual names."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingMetricMetadata

from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.shared_tiers.tier_stats import REPORTED, TierReport
from spillway_connector.engine.v030.stats import connector_stats, metric_definitions


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The definitions of what a TierReport fills in, by name, for vLLM to register in its API server.

    The others are of Spillway's own connector: its device copies, CPU tier and load gate.
    """
    defined = metric_definitions()
    return {metric.name: defined[metric.name] for metric in REPORTED}


def take_stats(report: TierReport) -> OffloadingConnectorStats | None:
    """What changed since the last call; None if nothing did."""
    samples = Samples()
    report.add_to(samples)
    return connector_stats(samples)
