"""Reports what discovery found: for operators on /spillway/config, and as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from spillway_gateway.discovery.found import SourceStatus
from spillway_gateway.fleet.model_fleet import ModelFleet


def discovered(sources: Mapping[str, SourceStatus], fleets: Sequence[ModelFleet]) -> dict[str, Any]:
    """The report of each model: `heardAt` says when the source last confirmed the list, `error` why the last attempt
    failed."""
    return {
        fleet.name: {
            "source": status.description,
            "heardAt": datetime.fromtimestamp(status.heard_at, UTC).isoformat()
            if status.heard_at is not None
            else None,
            "error": status.error,
            "engines": [
                {
                    "name": engine.name,
                    "url": engine.config.url,
                    "role": engine.config.role.value,
                    "kvEvents": engine.config.kv_events,
                    "kvReplay": engine.config.kv_replay,
                    "instance": engine.instance,
                    "withheld": engine.withheld,
                }
                for engine in fleet.engines.values()
            ],
        }
        for fleet in fleets
        if (status := sources.get(fleet.name)) is not None
    }


def discovery_families(
    sources: Mapping[str, SourceStatus], fleets: Sequence[ModelFleet]
) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """Empty families if every engine is listed in the configuration."""
    engines = GaugeMetricFamily(
        "spillway_gateway_discovered_engines",
        "Engines found, by whether their source wants new requests to go there.",
        labels=("model", "state"),
    )
    heard = GaugeMetricFamily(
        "spillway_gateway_discovery_heard_timestamp_seconds",
        "When the source last confirmed what is known; 0 before the first time.",
        labels=("model",),
    )
    failing = GaugeMetricFamily(
        "spillway_gateway_discovery_failing", "1 while the source cannot be asked.", labels=("model",)
    )
    updates = CounterMetricFamily(
        "spillway_gateway_discovery_updates", "Times the set of engines changed.", labels=("model",)
    )
    failures = CounterMetricFamily(
        "spillway_gateway_discovery_failures", "Tries that failed.", labels=("model", "reason")
    )
    for fleet in fleets:
        status = sources.get(fleet.name)
        if status is None:
            continue
        withheld = sum(engine.withheld is not None for engine in fleet.engines.values())
        engines.add_metric((fleet.name, "offered"), len(fleet.engines) - withheld)
        engines.add_metric((fleet.name, "withheld"), withheld)
        heard.add_metric((fleet.name,), status.heard_at or 0.0)
        failing.add_metric((fleet.name,), float(status.error is not None))
        updates.add_metric((fleet.name,), status.updates_total)
        for reason, count in status.failures.items():
            failures.add_metric((fleet.name, reason), count)
    return (engines, heard, failing, updates, failures)
