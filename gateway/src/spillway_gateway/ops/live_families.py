"""Metric families read from live state at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.audit import AuditLog
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.fleet.model_fleet import ModelFleet


def live_families(fleets: list[ModelFleet]) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """Metric families read from the fleet at each scrape."""
    by_engine = ("model", "engine")
    up = GaugeMetricFamily("spillway_gateway_engine_up", "1 when requests may be routed there.", labels=by_engine)
    running = GaugeMetricFamily(
        "spillway_gateway_in_flight_requests", "Requests sent to an engine and not finished.", labels=by_engine
    )
    queued = GaugeMetricFamily(
        "spillway_gateway_queued_tokens", "Uncached prompt tokens sent and not yet answered.", labels=by_engine
    )
    rate = GaugeMetricFamily(
        "spillway_gateway_prefill_tokens_per_second", "Measured or default prefill rate.", labels=by_engine
    )
    live = GaugeMetricFamily(
        "spillway_gateway_events_connected", "1 when the engine's KV events are followed.", labels=by_engine
    )
    ejected = GaugeMetricFamily(
        "spillway_gateway_engine_ejected", "1 while the engine's breaker keeps requests away.", labels=by_engine
    )
    ejections = CounterMetricFamily(
        "spillway_gateway_engine_ejections", "Times the engine's breaker opened.", labels=by_engine
    )
    foreign = GaugeMetricFamily(
        "spillway_gateway_foreign_requests", "Requests on the engine that others sent, as last read.", labels=by_engine
    )
    loads_from = GaugeMetricFamily(
        "spillway_gateway_engine_shared_stores",
        "Stores of shared tiers from which the engine says it loads.",
        labels=by_engine,
    )
    in_reach = GaugeMetricFamily(
        "spillway_gateway_engine_shared_blocks",
        "Blocks that are known to lie in the stores from which the engine loads.",
        labels=(*by_engine, "tier"),
    )
    in_node = GaugeMetricFamily(
        "spillway_gateway_engine_node_blocks",
        "Blocks that are known to lie in the CPU tier of the node, from which the engine loads.",
        labels=by_engine,
    )
    stores = GaugeMetricFamily(
        "spillway_gateway_index_shared_stores",
        "Stores of shared tiers and nodes of which the prefix index knows anything.",
        labels=("model",),
    )
    held_back = GaugeMetricFamily(
        "spillway_gateway_cold_waiting_requests",
        "Requests of which much has to be computed, waiting while their engine has enough of such.",
        labels=("model",),
    )
    blocks = GaugeMetricFamily("spillway_gateway_index_blocks", "Blocks in the prefix index.", labels=("model",))
    size = GaugeMetricFamily("spillway_gateway_index_bytes", "Estimated size of the prefix index.", labels=("model",))
    evicted = CounterMetricFamily(
        "spillway_gateway_index_evicted_blocks", "Blocks dropped to stay within index.bytesMax.", labels=("model",)
    )
    ignored = CounterMetricFamily(
        "spillway_gateway_index_ignored_blocks",
        "Blocks of events that could not be indexed.",
        labels=("model", "reason"),
    )
    for fleet in fleets:
        for engine in fleet.engines.values():
            labels = (fleet.name, engine.name)
            up.add_metric(labels, float(engine.routable))
            running.add_metric(labels, engine.running_requests)
            queued.add_metric(labels, engine.queued_tokens)
            rate.add_metric(labels, engine.rates.prefill_tokens_per_second)
            live.add_metric(labels, float(engine.events_live))
            ejected.add_metric(labels, float(not engine.breaker.closed))
            ejections.add_metric(labels, engine.breaker.opened_total)
            foreign.add_metric(labels, engine.foreign.requests)
            shared = fleet.index.shared_reach_of(engine.name)
            loads_from.add_metric(labels, len(shared.blocks))
            for tier, blocks_there in shared.blocks.items():
                in_reach.add_metric((*labels, tier), blocks_there)
            if shared.node_blocks is not None:
                in_node.add_metric(labels, shared.node_blocks)
        index = fleet.index
        held_back.add_metric((fleet.name,), len(fleet.cold.waiting))
        stores.add_metric((fleet.name,), index.shared_stores)
        blocks.add_metric((fleet.name,), index.blocks)
        size.add_metric((fleet.name,), index.estimated_bytes)
        evicted.add_metric((fleet.name,), index.evicted_blocks_total)
        ignored.add_metric((fleet.name, "orphan"), index.orphans_dropped_total)
        ignored.add_metric((fleet.name, "unknown"), index.unknown_blocks_total)
        ignored.add_metric((fleet.name, "block_size"), index.mismatched_blocks_total)
    by_engines = (up, running, queued, rate, live, ejected, ejections, foreign, loads_from, in_reach, in_node)
    return (*by_engines, blocks, size, evicted, ignored, stores, held_back)


def connection_families(connections: OpenConnections) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """Clients' connections and the bodies that arrive on them. No label names an address."""
    yield GaugeMetricFamily("spillway_gateway_client_connections", "Open connections of clients.", len(connections))
    yield CounterMetricFamily(
        "spillway_gateway_client_connections_refused",
        "Connections refused at once because of connections.openMax or perAddressMax.",
        connections.refused_total,
    )
    yield CounterMetricFamily(
        "spillway_gateway_client_connections_ended_for_room",
        "Connections without a request that made room for others.",
        connections.evicted_total,
    )
    yield GaugeMetricFamily(
        "spillway_gateway_unread_reply_bytes",
        "Bytes of replies that clients have not read, as they count in limits.repliesBytesMax.",
        connections.reply_budget.held_bytes,
    )
    yield CounterMetricFamily(
        "spillway_gateway_client_connections_ended_unread",
        "Connections that were closed because limits.repliesBytesMax was exceeded and their clients read nothing.",
        connections.reply_budget.ended_total,
    )
    yield GaugeMetricFamily(
        "spillway_gateway_body_bytes",
        "Bytes that count in limits.bodiesBytesMax.",
        connections.body_budget.reserved_bytes,
    )


def access_families(
    admissions: Mapping[str, Admission], gatekeeper: Gatekeeper
) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """The queue in front of full engines, and readings of the keys file. No label names a tenant."""
    waiting = GaugeMetricFamily(
        "spillway_gateway_admission_waiting_requests", "Requests waiting until an engine has room.", labels=("model",)
    )
    refused = CounterMetricFamily(
        "spillway_gateway_admission_refused", "Requests refused because all engines were full.", labels=("model",)
    )
    for model, admission in admissions.items():
        waiting.add_metric((model,), admission.waiting_requests)
        refused.add_metric((model,), admission.refused_total)
    reloads = CounterMetricFamily(
        "spillway_gateway_keys_reloads", "Times the changed keys file was read.", labels=("outcome",)
    )
    reloads.add_metric(("read",), gatekeeper.reloads_total)
    reloads.add_metric(("refused",), gatekeeper.failed_reloads_total)
    decided = CounterMetricFamily(
        "spillway_gateway_limit_decisions",
        "Requests of tenants with limits, by who decided: all replicas together, or this one alone.",
        labels=("by",),
    )
    connected = GaugeMetricFamily(
        "spillway_gateway_shared_limits_connected", "1 while replicas count limits together in Redis."
    )
    if gatekeeper.shared is not None:
        decided.add_metric(("all",), gatekeeper.shared.decided_total)
        decided.add_metric(("alone",), gatekeeper.shared.decided_alone_total)
        connected.add_metric((), float(gatekeeper.shared.connected))
    return waiting, refused, reloads, decided, connected


def audit_families(audit: AuditLog | None) -> Iterable[CounterMetricFamily]:
    """Lines that the audit log does not have."""
    dropped = CounterMetricFamily(
        "spillway_gateway_audit_dropped", "Audit lines that could not be written, or waited for too many others."
    )
    dropped.add_metric((), audit.dropped_total if audit is not None else 0)
    unwritten = CounterMetricFamily(
        "spillway_gateway_audit_refusals_unwritten",
        "Requests without a known API key beyond those that get an audit line.",
    )
    unwritten.add_metric((), audit.refusals_unwritten_total if audit is not None else 0)
    return (dropped, unwritten)


def process_families(serving: int, restarts: int) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """The processes that serve clients; they are started again if there are several."""
    yield GaugeMetricFamily(
        "spillway_gateway_serving_processes", "Processes of this gateway that accept connections.", serving
    )
    yield CounterMetricFamily(
        "spillway_gateway_process_restarts", "Times such a process ended and was started again.", restarts
    )


def config_families(
    applied: int, refused: int, *, refused_now: bool, restart_pending: bool
) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """Readings of the configuration file since the start."""
    reloads = CounterMetricFamily(
        "spillway_gateway_config_reloads", "Times the changed configuration file was read.", labels=("outcome",)
    )
    reloads.add_metric(("applied",), applied)
    reloads.add_metric(("refused",), refused)
    bad = GaugeMetricFamily(
        "spillway_gateway_config_refused", "1 while the file on disk is refused and an older one is in use."
    )
    bad.add_metric((), float(refused_now))
    pending = GaugeMetricFamily(
        "spillway_gateway_config_restart_pending", "1 while the file has changes that only a restart applies."
    )
    pending.add_metric((), float(restart_pending))
    return (reloads, bad, pending)
