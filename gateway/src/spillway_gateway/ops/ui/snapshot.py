"""The page's state as one JSON document. Reads live objects and changes none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spillway_gateway.access.admission import Admission
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.last_hour import LastHour
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.recent import NotedDecision, NotedFirstByte, PromptTokens, Recent
from spillway_gateway.ops.ui.explain import explain
from spillway_gateway.routing.fleet_view import HeldPrefix, TierLabel
from spillway_gateway.routing.route import Candidate

FIRST_BYTE_SECONDS = 300.0  # percentiles cover the last five minutes


def snapshot(
    fleets: Iterable[ModelFleet],
    admissions: Mapping[str, Admission],
    recent: Recent,
    *,
    draining: bool,
    now: float,
    monotonic: float,
) -> dict[str, Any]:
    """now: time(); monotonic: monotonic(). Times in milliseconds, rates per second, sizes in bytes; newest decision
    first. Holds no prompt, answer or tenant."""
    fresh = [noted for noted in recent.first_bytes if now - noted.at <= FIRST_BYTE_SECONDS]
    return {
        "time": now,
        "draining": draining,
        "firstByteSeconds": FIRST_BYTE_SECONDS,
        "models": [
            _model(fleet, admissions.get(fleet.name), recent, fresh, now=now, monotonic=monotonic) for fleet in fleets
        ],
        "decisions": [_decision(noted) for noted in reversed(recent.decisions)],
    }


def _model(
    fleet: ModelFleet,
    admission: Admission | None,
    recent: Recent,
    first_bytes: Sequence[NotedFirstByte],
    *,
    now: float,
    monotonic: float,
) -> dict[str, Any]:
    of_model = [noted for noted in first_bytes if noted.model == fleet.name]
    tokens = recent.prompt_tokens.get(fleet.name) or PromptTokens()
    index = fleet.index
    return {
        "name": fleet.name,
        "waitingRequests": admission.waiting_requests if admission is not None else 0,
        "refusedRequests": admission.refused_total if admission is not None else 0,
        "promptTokens": {
            "device": tokens.device,
            "cpu": tokens.cpu,
            "shared": tokens.shared,
            "computed": tokens.computed,
        },
        "cachedTokens": {"expected": tokens.expected, "reported": tokens.reported},
        "lastHour": _last_hour(tokens.last_hour, now),
        "firstByte": percentiles([noted.seconds for noted in of_model]),
        "continuationPause": percentiles(
            [noted.seconds for noted in recent.continuations if noted.model == fleet.name]
        ),
        "index": {"blocks": index.blocks, "bytes": index.estimated_bytes, "bytesMax": index.bytes_max},
        "engines": [_engine(engine, index, of_model, monotonic) for engine in fleet.engines.values()],
    }


def _last_hour(hour: LastHour, now: float) -> dict[str, Any]:
    """Tokens of each minute, the current one last; as many of each kind."""
    minutes = hour.minutes(now)
    return {
        "expected": [minute.expected for minute in minutes],
        "reported": [minute.reported for minute in minutes],
        "missing": {tier.value: [minute.missing[tier] for minute in minutes] for tier in TierLabel},
    }


def _engine(
    engine: Engine, index: PrefixIndex, first_bytes: Sequence[NotedFirstByte], monotonic: float
) -> dict[str, Any]:
    view = engine.view(HeldPrefix(), monotonic, ejected=not engine.breaker.closed)
    rates = view.rates
    shared = index.shared_reach_of(engine.name)
    return {
        "name": engine.name,
        "routable": view.routable,
        "says": "kept away by its breaker" if engine.routable and not view.routable else engine.reason,
        "eventsLive": engine.events_live,
        "slowStart": engine.is_warming(monotonic),
        "runningRequests": engine.running_requests,
        "foreignRequests": engine.foreign.requests,
        "queuedTokens": view.queued_tokens,
        "busyShare": view.busy_share,
        "kvUsage": min(1.0, max(0.0, view.kv_usage)),
        "prefillTokensPerSecond": rates.prefill_tokens_per_second,
        "cpuLoadTokensPerSecond": rates.cpu_load_tokens_per_second,
        "sharedLoadTokensPerSecond": rates.shared_load_tokens_per_second,
        "belowLoadTokensPerSecond": rates.below_load_tokens_per_second or None,
        "sharedBlocks": shared.blocks,
        "declinedTiers": sorted(engine.declined_tiers),
        "nodeBlocks": shared.node_blocks,
        "firstByte": percentiles([noted.seconds for noted in first_bytes if noted.engine == engine.name]),
        "tiers": [
            {"tier": path.tier, "direction": path.direction, "bytesPerSecond": rate}
            for path, rate in sorted(engine.traffic.bytes_per_second(monotonic).items())
        ],
    }


def percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles of the samples themselves, by nearest rank; without samples only their count."""
    if not seconds:
        return {"samples": 0}
    ordered = sorted(seconds)

    def at(percent: int) -> float:
        return 1000.0 * ordered[-(-len(ordered) * percent // 100) - 1]

    return {"samples": len(ordered), "p50Ms": at(50), "p90Ms": at(90), "p99Ms": at(99)}


def _decision(noted: NotedDecision) -> dict[str, Any]:
    decision = noted.decision
    return {
        "time": noted.at,
        "model": noted.model,
        "requestId": noted.request_id.decode("latin-1"),
        "engine": decision.engine_name,
        "reason": decision.reason.value,
        "why": explain(decision),
        "promptTokens": decision.prompt_tokens,
        "held": _held(decision.held),
        "candidates": [_candidate(each) for each in decision.candidates],
    }


def _held(held: HeldPrefix) -> dict[str, int]:
    return {
        "device": held.device_tokens,
        "cpu": held.cpu_tokens,
        "shared": held.shared_tokens,
        "below": held.below_tokens,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    cost = candidate.cost
    return {
        "engine": candidate.engine.name,
        "held": _held(candidate.engine.held),
        "runningRequests": candidate.engine.running_requests,
        "queueMs": cost.queue_ms,
        "linkMs": cost.link_ms,
        "loadMs": cost.load_ms,
        "prefillMs": cost.prefill_ms,
        "displacedMs": cost.displaced_ms,
        "laterMs": cost.later_ms,
        "totalMs": cost.total_ms,
    }
