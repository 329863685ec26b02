"""Counts of several processes in one exposition."""

from __future__ import annotations

from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.processes.counts import SummedCounts, counts_of
from spillway_gateway.processes.messages import FamilySamples


def counted(requests: int, seconds: float | None = None) -> FamilySamples:
    metrics = GatewayMetrics()
    metrics.request("m", "e", "prefix", "2xx").inc(requests)
    if seconds is not None:
        metrics.overhead("m").observe(seconds)
    metrics.event_last_batch.labels("e").set(99)
    return counts_of(metrics.registry)


def exposed(summed: SummedCounts) -> list[str]:
    return [line for line in summed.exposition().decode().splitlines() if not line.startswith("#")]


REQUESTS = 'spillway_gateway_requests_total{engine="e",model="m",route="prefix",status="2xx"}'


def test_counters_and_histograms_are_added_and_gauges_of_engines_are_not() -> None:
    own = GatewayMetrics()
    own.request("m", "e", "prefix", "2xx").inc(1)
    fronts = [counted(2, 0.0002), counted(4, 0.02)]
    lines = exposed(SummedCounts(own.registry, lambda: fronts))

    assert f"{REQUESTS} 7.0" in lines
    assert 'spillway_gateway_overhead_seconds_count{model="m"} 2.0' in lines
    assert 'spillway_gateway_overhead_seconds_bucket{le="0.00025",model="m"} 1.0' in lines
    assert 'spillway_gateway_overhead_seconds_bucket{le="+Inf",model="m"} 2.0' in lines
    assert not any(line.startswith("spillway_gateway_event_last_batch") for line in lines)
    assert len(lines) == len(set(lines))


def test_a_process_that_ended_stays_counted_until_its_engine_is_forgotten() -> None:
    own = GatewayMetrics()
    fronts = [counted(2)]
    summed = SummedCounts(own.registry, lambda: fronts)
    own.on_removed.append(summed.forget_engine)
    summed.ended(fronts.pop())
    fronts.append(counted(1))
    assert f"{REQUESTS} 3.0" in exposed(summed)

    fronts.clear()
    own.remove_engine("e")
    assert not any(line.startswith(REQUESTS) for line in exposed(summed))
