"""Request and fleet view -> engine and reason: filter, score, pick.

Each stage is a pure function over frozen values. fleet/model_fleet.py applies the decision and counts the request in
the same step, without an await between, so two requests never decide on the same counters.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from spillway_gateway.routing.fleet_view import EngineView, FleetView, HeldPrefix, Leg, RouteRequest
from spillway_gateway.routing.legs import Legs, plan_legs, serving
from spillway_gateway.routing.load import Cost, cost_of, uncached_tokens
from spillway_gateway.routing.rendezvous import load_bound, pick_bounded, weight

# Tokens per byte of one prompt's parts differ: prose, code and figures of one model by a third.
TEXT_TOLERANCE = 0.35
TIE_MS = 1.0  # differences below are noise of the estimate


class RouteReason(StrEnum):
    """Reasons for which an engine was chosen. Value of the header x-spillway-route and of the metric's label."""

    ONLY = "only"  # no other engine could take it
    PREFIX = "prefix"  # cheapest because it holds the longest prefix
    LOAD = "load"  # cheapest although another engine holds more of the prompt, or none holds any and loads differ
    RENDEZVOUS = "rendezvous"  # no engine holds any of it: by hash of the first block among equally cheap engines
    SESSION = "session"  # it served the request's session last, and the index knows of no better one
    RETRY = "retry"  # another engine failed before the first byte, or a proxy in front leaves some out
    PREFILL = "prefill"  # it computes the prompt, and another engine answers
    PINNED = "pinned"  # it stores what the request asks for


class SessionOutcome(StrEnum):
    """The outcome of a request that names a session. Value of the metric's label."""

    NEW = "new"  # no engine is known to have served it
    KEPT = "kept"  # the engine that served it last
    MOVED = "moved"  # another one


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
    session: SessionOutcome | None = None
    text_tokens: int | None = None  # as in PromptBlocks
    legs: Legs | None = None  # None: the whole request, without a choice

    def expected(self, prompt_tokens: int, cached_tokens: int) -> HeldPrefix | None:
        """Return the tokens that the prompt was to find, to compare with those found; None: they cannot be compared.

        A prompt matched by its text was expected to find a share of it, whose tokens are unknown: those of the whole
        prompt are divided evenly over its text. As text is not even, what was found within TEXT_TOLERANCE of that
        counts as all that was expected.

        Args:
            prompt_tokens: Tokens of the whole prompt, as the engine counted them.
            cached_tokens: How many of them the engine did not compute.
        """
        if self.text_tokens is None:
            return self.held
        if not self.text_tokens:
            return None
        held = self.held.scaled(prompt_tokens, self.text_tokens)
        return held.first(cached_tokens) if cached_tokens >= (1 - TEXT_TOLERANCE) * held.total_tokens else held


def plan_route(request: RouteRequest, view: FleetView, bounded_load_factor: float) -> Decision | None:
    """Choose an engine, or None when no engine may take the request. Pure: no clock, socket or lock."""
    candidates = score(request, usable_engines(request, view))
    if not candidates:
        return None
    chosen, reason = pick(request, candidates, bounded_load_factor)
    legs = _legs(request, view, chosen, candidates)
    if legs is not None and legs.prefill is not None and legs.prefill_cost is not None:
        chosen, reason = Candidate(legs.prefill, legs.prefill_cost), RouteReason.PREFILL
        candidates = candidates if chosen in candidates else (*candidates, chosen)
    held = chosen.engine.held
    return Decision(
        engine_name=chosen.engine.name,
        reason=_reason(request, reason),
        held=held,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=uncached_tokens(held, request.prompt_tokens),
        candidates=candidates,
        session=_session_outcome(request, chosen.engine.name) if reason is not RouteReason.PREFILL else None,
        text_tokens=request.text_tokens,
        legs=legs,
    )


def _reason(request: RouteRequest, reason: RouteReason) -> RouteReason:
    if request.only:
        return RouteReason.PINNED
    return RouteReason.RETRY if request.tried and reason is not RouteReason.PREFILL else reason


def _legs(request: RouteRequest, view: FleetView, whole: Candidate, candidates: tuple[Candidate, ...]) -> Legs | None:
    """Price one and two legs; None: the request takes one leg, whatever the engines. One leg has the cheapest engine's
    cost, even if the request stays with its session's engine, which may hold more than the index knows."""
    if request.splitting is None or request.leg is not Leg.OPEN or request.only is not None:
        return None
    prompt = request.prompt_tokens, request.computed_from, request.computed_to
    uncached = uncached_tokens(whole.engine.held, request.prompt_tokens)
    usable = _untried(request, view)
    one_leg_ms = min(each.cost.total_ms for each in candidates)
    return plan_legs(usable, whole.engine, one_leg_ms, uncached, prompt=prompt, terms=request.splitting)


def _session_outcome(request: RouteRequest, chosen: str) -> SessionOutcome | None:
    if not request.in_session:
        return None
    if request.session_engine is None:
        return SessionOutcome.NEW
    return SessionOutcome.KEPT if request.session_engine == chosen else SessionOutcome.MOVED


def usable_engines(request: RouteRequest, view: FleetView) -> list[EngineView]:
    """Filter: routable, not tried for this request, of a role for it, and the pinned engine if there is one."""
    usable = _untried(request, view)
    if request.only is not None:
        return [engine for engine in usable if engine.name == request.only]
    return serving(usable, request.leg, any_role=request.any_role)


def _untried(request: RouteRequest, view: FleetView) -> list[EngineView]:
    return [engine for engine in view.engines if engine.routable and engine.name not in request.tried]


def score(request: RouteRequest, engines: list[EngineView]) -> tuple[Candidate, ...]:
    """The cost of each engine for this request."""
    prompt = request.prompt_tokens, request.computed_from, request.computed_to
    return tuple([Candidate(engine, cost_of(engine, *prompt)) for engine in engines])


def pick(
    request: RouteRequest, candidates: tuple[Candidate, ...], bounded_load_factor: float
) -> tuple[Candidate, RouteReason]:
    """The cheapest candidate and the reason; ties by held tokens, the nearer tier, the session, load and rendezvous
    weight.

    A short prefix is loaded within TIE_MS, so without the tier it would leave the device that has it.
    """
    if len(candidates) == 1:
        return candidates[0], RouteReason.ONLY
    most_held = max([candidate.engine.held.total_tokens for candidate in candidates])
    cheapest_ms = min([candidate.cost.total_ms for candidate in candidates])
    own = _of_session(request, candidates, bounded_load_factor) if request.session_engine is not None else None
    if own is not None and _index_is_silent(own, most_held) and own.cost.total_ms <= cheapest_ms + _margin_ms(own):
        return own, RouteReason.SESSION
    if most_held == 0:
        return _pick_unknown(request, candidates, cheapest_ms, bounded_load_factor)
    tied = [candidate for candidate in candidates if candidate.cost.total_ms <= cheapest_ms + TIE_MS]
    chosen = tied[0]
    if len(tied) > 1:
        chosen = min(tied, key=lambda candidate: _preference(candidate, own, request.spread_key))
    held = chosen.engine.held
    if chosen is own and any(each.engine.held == held for each in tied if each is not own):
        return chosen, RouteReason.SESSION
    return chosen, RouteReason.PREFIX if held.total_tokens == most_held else RouteReason.LOAD


def _preference(candidate: Candidate, own: Candidate | None, spread_key: int) -> tuple[int | str, ...]:
    """Smallest for the best of equally cheap ones. own: that of the session."""
    engine = candidate.engine
    held = engine.held
    return (
        -held.total_tokens,
        -held.device_tokens,
        -held.cpu_tokens,
        held.below_tokens,
        candidate is not own,
        engine.running_requests,
        -weight(engine.name, spread_key),
        engine.name,
    )


def _of_session(
    request: RouteRequest, candidates: tuple[Candidate, ...], bounded_load_factor: float
) -> Candidate | None:
    """The candidate that served the session last, while its load is within the bound of choices by hash."""
    for candidate in candidates:
        if candidate.engine.name == request.session_engine:
            running = [each.engine.running_requests for each in candidates]
            fits = candidate.engine.running_requests + 1 <= load_bound(running, bounded_load_factor)
            return candidate if fits else None
    return None


def _index_is_silent(own: Candidate, most_held: int) -> bool:
    """Whether the index names no better engine than the session's, and none as good for certain."""
    return most_held == 0 or (not own.engine.events_live and own.engine.held.total_tokens == most_held)


def _margin_ms(own: Candidate) -> float:
    """Return how much more the session's engine may cost than the cheapest one. An engine without events may hold the
    whole session, whatever the index knows, which would save the prefill."""
    return TIE_MS if own.engine.events_live else max(TIE_MS, own.cost.prefill_ms)


def _pick_unknown(
    request: RouteRequest, candidates: tuple[Candidate, ...], cheapest_ms: float, bounded_load_factor: float
) -> tuple[Candidate, RouteReason]:
    """No engine holds any of the prompt. The hash decides only among engines of equal cost, so no request waits for the
    sake of its hash, and replicas of the gateway agree if they see equal load."""
    tied = {
        candidate.engine.name: candidate for candidate in candidates if candidate.cost.total_ms <= cheapest_ms + TIE_MS
    }
    running = {name: candidate.engine.running_requests for name, candidate in tied.items()}
    chosen = tied[pick_bounded(running, request.spread_key, bounded_load_factor)]
    return chosen, RouteReason.RENDEZVOUS if len(tied) > 1 else RouteReason.LOAD
