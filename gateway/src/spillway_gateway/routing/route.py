"""Request and fleet view -> engine and reason: filter, score, pick.

Each stage is a pure function over frozen values. fleet/model_fleet.py applies the decision and counts the request in
the same step, without an await between, so two requests never decide on the same counters.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from spillway_gateway.routing.fleet_view import EngineView, FleetView, HeldPrefix, RouteRequest
from spillway_gateway.routing.load import Cost, cost_of, uncached_tokens
from spillway_gateway.routing.rendezvous import pick_bounded, weight

TIE_MS = 1.0  # differences below are noise of the estimate


class RouteReason(StrEnum):
    """Why an engine was chosen. Value of the header x-spillway-route and of the metric's label."""

    ONLY = "only"  # no other engine could take it
    PREFIX = "prefix"  # cheapest because it holds the longest prefix
    LOAD = "load"  # cheapest although another engine holds more of the prompt, or none holds any and loads differ
    RENDEZVOUS = "rendezvous"  # no engine holds any of it: by hash of the first block among equally cheap engines
    RETRY = "retry"  # another engine failed before the first byte
    PINNED = "pinned"  # it stores what the request asks for


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A usable engine and what it would cost."""

    engine: EngineView
    cost: Cost


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The chosen engine, why, and every candidate."""

    engine_name: str
    reason: RouteReason
    held: HeldPrefix
    prompt_tokens: int
    uncached_tokens: int
    candidates: tuple[Candidate, ...]  # every engine that was considered, with its cost


def plan_route(request: RouteRequest, view: FleetView, bounded_load_factor: float) -> Decision | None:
    """Choose an engine, or None when no engine may take the request. Pure: no clock, socket or lock."""
    candidates = score(request, usable_engines(request, view))
    if not candidates:
        return None
    chosen, reason = pick(request, candidates, bounded_load_factor)
    held = chosen.engine.held
    return Decision(
        engine_name=chosen.engine.name,
        reason=RouteReason.PINNED if request.only else RouteReason.RETRY if request.tried else reason,
        held=held,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=uncached_tokens(held, request.prompt_tokens),
        candidates=candidates,
    )


def usable_engines(request: RouteRequest, view: FleetView) -> list[EngineView]:
    """Filter: routable, not tried for this request, and the pinned engine if there is one."""
    usable = [engine for engine in view.engines if engine.routable and engine.name not in request.tried]
    return usable if request.only is None else [engine for engine in usable if engine.name == request.only]


def score(request: RouteRequest, engines: list[EngineView]) -> tuple[Candidate, ...]:
    """The cost of each engine for this request."""
    prompt_tokens = request.prompt_tokens
    return tuple([Candidate(engine, cost_of(engine, prompt_tokens)) for engine in engines])


def pick(
    request: RouteRequest, candidates: tuple[Candidate, ...], bounded_load_factor: float
) -> tuple[Candidate, RouteReason]:
    """The cheapest candidate and the reason; ties by held tokens, the nearer tier, load and rendezvous weight.

    A short prefix is loaded within TIE_MS, so without the tier it would leave the device that has it.
    """
    if len(candidates) == 1:
        return candidates[0], RouteReason.ONLY
    most_held = max(candidate.engine.held.total_tokens for candidate in candidates)
    cheapest_ms = min(candidate.cost.total_ms for candidate in candidates)
    if most_held == 0:
        return _pick_unknown(request, candidates, cheapest_ms, bounded_load_factor)
    tied = [candidate for candidate in candidates if candidate.cost.total_ms <= cheapest_ms + TIE_MS]
    chosen = min(
        tied,
        key=lambda candidate: (
            -candidate.engine.held.total_tokens,
            -candidate.engine.held.device_tokens,
            -candidate.engine.held.cpu_tokens,
            candidate.engine.running_requests,
            -weight(candidate.engine.name, request.spread_key),
            candidate.engine.name,
        ),
    )
    held = chosen.engine.held.total_tokens
    return chosen, RouteReason.PREFIX if held == most_held else RouteReason.LOAD


def _pick_unknown(
    request: RouteRequest, candidates: tuple[Candidate, ...], cheapest_ms: float, bounded_load_factor: float
) -> tuple[Candidate, RouteReason]:
    """No engine holds any of the prompt. The hash decides only among engines of equal cost, so no request waits for the
    sake of its hash, and replicas of the gateway agree where they see equal load."""
    tied = {
        candidate.engine.name: candidate for candidate in candidates if candidate.cost.total_ms <= cheapest_ms + TIE_MS
    }
    running = {name: candidate.engine.running_requests for name, candidate in tied.items()}
    chosen = tied[pick_bounded(running, request.spread_key, bounded_load_factor)]
    return chosen, RouteReason.RENDEZVOUS if len(tied) > 1 else RouteReason.LOAD
