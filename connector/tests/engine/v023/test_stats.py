from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import VllmConfig

from spillway_connector import metrics
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats


def sample() -> SpillwayStats:
    stats = SpillwayStats()
    stats.record_transfer(10, 0.5, ("GPU", "CPU"))
    stats.add(metrics.TIER_READ_BYTES, 7, "nvme")
    stats.add(metrics.CPU_TIER_BLOCKS, 3, "used")
    return stats


def test_counters_add_up_and_gauges_are_replaced():
    total = sample()
    newer = sample()
    newer.add(metrics.CPU_TIER_BLOCKS, 9, "used")
    total.aggregate(newer)
    reduced = total.reduce()
    assert reduced["tier_read_bytes|nvme"] == 14
    assert reduced["cpu_tier_blocks|used"] == 9
    assert reduced["GPU_to_CPU_total_bytes"] == 20


def test_stats_survive_the_way_between_processes_and_reach_prometheus():
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(sample().data))
    registry = CollectorRegistry()

    def into(kind):
        return lambda **options: kind(registry=registry, **options)

    prom = SpillwayPromMetrics(
        VllmConfig(),
        {Counter: into(Counter), Gauge: into(Gauge), Histogram: into(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    prom.observe(data)
    prom.observe(data)
    text = generate_latest(registry).decode()
    assert 'spillway_tier_read_bytes_total{engine="0",model_name="m",tier="nvme"} 14.0' in text
    assert 'spillway_cpu_tier_blocks{engine="0",model_name="m",state="used"} 3.0' in text
    assert "vllm:kv_offload_total_bytes_total" in text


def test_every_metric_is_declared_once_and_named_by_the_rules():
    assert len(metrics.BY_NAME) == len(metrics.ALL)
    for metric in metrics.ALL:
        assert metric.name.startswith("spillway_")
        assert not metric.name.endswith("_total")  # Prometheus adds it to counters
        assert metric.help.endswith(".")
