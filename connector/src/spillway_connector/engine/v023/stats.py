"""Brings the connector's counts to vLLM's `/metrics`: deltas travel worker -> scheduler -> API server."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import SAMPLES_KEY, SampledStats, metric_of
from spillway_connector.metrics import Kind


class SpillwayStats(SampledStats, OffloadingConnectorStats):
    """vLLM's offload records plus, under one key, Spillway's samples of one engine step."""

    data: dict[str, Any]

    @override
    def record_transfer(self, num_bytes: int, time: float, transfer_type: tuple[str, str]) -> None:
        # Plain data from the start: vLLM's records only become that when stats cross a process boundary, and
        # its own observer refuses them when they do not (an engine inside the API server's process).
        self.data.setdefault("_to_".join(transfer_type), []).append({"op_size": num_bytes, "op_time": time})

    @override
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        upstream = dict(other.data)
        samples = upstream.pop(SAMPLES_KEY, {})
        super().aggregate(OffloadingConnectorStats(data=upstream) if upstream else OffloadingConnectorStats())
        self.merge(samples)
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        """vLLM's totals and Spillway's counters that changed, for its periodic log line; settings are no news."""
        upstream = {key: value for key, value in self.data.items() if key != SAMPLES_KEY}
        reduced = OffloadingConnectorStats(data=upstream).reduce() if upstream else {}
        for key, amount in self.data.get(SAMPLES_KEY, {}).items():
            if amount and metric_of(key)[0] is not metrics.PROCESS_SETTING:
                reduced[key.removeprefix("spillway_")] = round(amount, 4)
        return reduced


class SpillwayPromMetrics(OffloadPromMetrics):
    """Registers every metric of metrics.py beside vLLM's `vllm:kv_offload_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {Kind.COUNTER: metric_types[Counter], Kind.GAUGE: metric_types[Gauge]}
        self._families = {
            metric.name: classes[metric.kind](
                name=metric.name, documentation=metric.help, labelnames=[*labelnames, *metric.labels]
            )
            for metric in metrics.ALL
        }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        upstream = {key: value for key, value in transfer_stats_data.items() if key != SAMPLES_KEY}
        super().observe(upstream, engine_idx)
        for key, amount in transfer_stats_data.get(SAMPLES_KEY, {}).items():
            metric, label_values = metric_of(key)
            series = self._families[metric.name].labels(*self.per_engine_labelvalues[engine_idx], *label_values)
            if metric.kind is Kind.COUNTER:
                series.inc(amount)
            else:
                series.set(amount)
