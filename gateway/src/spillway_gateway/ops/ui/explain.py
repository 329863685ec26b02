"""A decision in one sentence. Pure."""

from __future__ import annotations

from spillway_gateway.routing.route import Candidate, Decision, RouteReason


def explain(decision: Decision) -> str:
    """Explain the choice of this engine, with the numbers that decided."""
    chosen = _chosen(decision)
    others = [each for each in decision.candidates if each is not chosen]
    held, tokens = decision.held.total_tokens, decision.prompt_tokens
    holds = f"holds {held:,} of {tokens:,} tokens"
    match decision.reason:
        case RouteReason.ONLY:
            return f"The only engine that could take it; {holds}."
        case RouteReason.PREFILL:
            return _by_legs(decision)
        case RouteReason.PINNED:
            return "It keeps what the request asks for."
        case RouteReason.RETRY:
            return f"Another engine failed before the first byte; of the others the cheapest, {holds}."
        case RouteReason.RENDEZVOUS:
            return f"No engine holds any of {tokens:,} tokens; by hash among engines that cost the same."
        case RouteReason.SESSION:
            return f"It served the session last; {holds}, and no other engine more{_against(chosen, others)}."
        case RouteReason.PREFIX:
            return f"Cheapest: {holds}{_against(chosen, others)}."
        case RouteReason.LOAD:
            return _by_load(decision, chosen, others)


def _by_legs(decision: Decision) -> str:
    legs = decision.legs
    if legs is None or legs.two_legs_ms is None:
        return "It computes the prompt, with which another engine goes on."
    price = f"{legs.two_legs_ms:.1f} ms against {legs.one_leg_ms:.1f} ms on one engine"
    return f"It computes the prompt, with which {legs.decode_engine} goes on; {price}."


def _by_load(decision: Decision, chosen: Candidate | None, others: list[Candidate]) -> str:
    most = max(others, key=lambda each: each.engine.held.total_tokens, default=None)
    if most is None or not most.engine.held.total_tokens:
        return f"No engine holds any of {decision.prompt_tokens:,} tokens; the least loaded{_against(chosen, others)}."
    cost = f", but would cost {most.cost.total_ms:.1f} ms" if chosen is not None else ""
    here = f" against {chosen.cost.total_ms:.1f} ms here" if chosen is not None else ""
    return f"{most.engine.name} holds more ({most.engine.held.total_tokens:,} tokens){cost}{here}."


def _against(chosen: Candidate | None, others: list[Candidate]) -> str:
    if chosen is None or not others:
        return ""
    next_best = min(others, key=lambda each: each.cost.total_ms)
    return f"; {chosen.cost.total_ms:.1f} ms against {next_best.cost.total_ms:.1f} ms on {next_best.engine.name}"


def _chosen(decision: Decision) -> Candidate | None:
    return next((each for each in decision.candidates if each.engine.name == decision.engine_name), None)
