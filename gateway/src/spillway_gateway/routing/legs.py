"""Whether a request takes one leg or two: its prompt on one engine, and its answer on another one.

The first leg computes the prompt on a prefill engine, whose chunks reach a shared tier; the second one loads them on a
decode engine and answers. Both ways are priced as routing prices everything (load.py), in milliseconds until the first
token:

    one leg  = the lowest cost on an engine that may serve the whole request
    two legs = cost on the prefill engine + hand-over + cost on the decode engine, which then has to load the prompt

The hand-over is what such requests took lately, by the tokens that the second engine loads (fleet/hand_over.py).
What a prompt displaces on an engine that answers others is a part of its cost, so that two legs are cheaper if a decode
engine is busy and prefill engines answer nothing (Disaggregation.roles_bind). If they do, the whole request costs
less on the prefill engine than two legs that begin there: no price splits a request, and `auto` chooses as it would
among engines without roles. What waits on the decode engine now is computed while the first leg is under way, so of it
the second leg waits for the rest. It loads at the CPU tier's rate from a store of the node or by the engines' own
connectors, and at the shared tier's from any other store. `always` does not compare, and neither does `auto` if tokens
of answers already take longer than the operator's bound. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from spillway_gateway.routing.fleet_view import EngineView, HeldPrefix, Leg, SplitTerms
from spillway_gateway.routing.load import Cost, cost_of
from spillway_settings.roles import EngineRole
from spillway_settings.wire import names_a_node


class LegsReason(StrEnum):
    """Reasons for which a request took one leg or two. Values of the metric's label."""

    # Two legs.
    PRICE = "price"  # of one leg too, if that was no dearer
    SLOW_ANSWERS = "slow_answers"  # the decode engine's answers are slower than the bound
    ALWAYS = "always"
    # One leg.
    OFF = "off"
    SHORT = "short"  # little of the prompt is to be computed
    NO_PREFILL_ENGINE = "no_prefill_engine"  # none takes requests
    NO_DECODE_ENGINE = "no_decode_engine"
    NO_COMMON_STORE = "no_common_store"  # no decode engine loads what a prefill engine stores
    PREFILL_FAILED = "prefill_failed"  # the first leg's engine did
    PREFILL_REFUSED = "prefill_refused"  # it answered with an error
    PREFILL_LATE = "prefill_late"
    NO_TRANSFER = "no_transfer"  # its connector does not say from which place the prompt's KV can be read
    # One leg, whatever the engines.
    DIALECT = "dialect"  # the route has no two legs
    BODY = "body"  # asks for what a first leg does not serve
    TEXT = "text"  # the prompt's tokens are not known
    PROXY = "proxy"  # which sends a request to one engine


class Legs(msgspec.Struct, frozen=True, gc=False):
    """The decision. prefill: the first leg's engine, decode_engine: the expected one of the second; None: one leg.
    two_legs_ms: None: not priced."""

    reason: LegsReason
    one_leg_ms: float
    two_legs_ms: float | None = None
    prefill: EngineView | None = None
    prefill_cost: Cost | None = None
    decode_engine: str | None = None

    @property
    def decision(self) -> str:
        """Value of the metric's label."""
        return "one" if self.prefill is None else "two"


def plan_legs(
    engines: Sequence[EngineView],
    whole: EngineView,
    one_leg_ms: float,
    uncached_tokens: int,
    *,
    prompt: tuple[int, int, int],
    terms: SplitTerms,
) -> Legs | None:
    """Decide. None: the engines have no roles.

    Args:
        engines: all engines that the request may be sent to.
        whole: the engine that would serve the whole request.
        one_leg_ms: the cheapest cost on one engine.
        uncached_tokens: the prompt's tokens that `whole` does not hold.
        prompt: the arguments of `cost_of` after the engine.
        terms: the terms of two legs.
    """
    if all(engine.role is EngineRole.BOTH for engine in engines):
        return None
    if uncached_tokens < terms.uncached_tokens_min:
        return Legs(LegsReason.SHORT, one_leg_ms)
    prefill, decode = _of(engines, EngineRole.PREFILL), _of(engines, EngineRole.DECODE)
    if not prefill or not decode:
        return Legs(LegsReason.NO_PREFILL_ENGINE if not prefill else LegsReason.NO_DECODE_ENGINE, one_leg_ms)
    best: tuple[float, EngineView, Cost, EngineView] | None = None
    cheapest_first = sorted(((cost_of(engine, *prompt), engine) for engine in prefill), key=lambda one: one[0].total_ms)
    for second in decode:
        for cost, first in cheapest_first:
            if second is first:
                continue
            common = first.stores & second.stores - second.declined_stores
            if common or terms.by_connector:
                near = terms.by_connector or any(map(names_a_node, common))
                later = handed_over(second.held, prompt[0], terms.block_tokens, near=near)
                loaded_ms = terms.hand_over_token_ms * (later.cpu_tokens + later.shared_tokens)
                hand_over_ms = max(0.0, terms.hand_over_ms + loaded_ms)
                begins_ms = cost.total_ms - cost.displaced_ms + hand_over_ms
                price = cost.total_ms + hand_over_ms + _second_leg_ms(second, later, prompt[0], begins_ms)
                if best is None or price < best[0]:
                    best = price, first, cost, second
                break
    if best is None:
        return Legs(LegsReason.NO_COMMON_STORE, one_leg_ms)
    two_legs_ms, first, cost, second = best
    if terms.always:
        reason = LegsReason.ALWAYS
    elif terms.token_ms_max is not None and whole.token_ms > terms.token_ms_max:
        reason = LegsReason.SLOW_ANSWERS
    elif two_legs_ms < one_leg_ms:
        reason = LegsReason.PRICE
    else:
        return Legs(LegsReason.PRICE, one_leg_ms, two_legs_ms)
    return Legs(reason, one_leg_ms, two_legs_ms, first, cost, second.name)


def serving(engines: list[EngineView], leg: Leg, *, any_role: bool) -> list[EngineView]:
    """Return the usable engines that may answer. A second leg goes to a decode engine if there is one.

    Args:
        engines: usable ones.
        leg: the part of the request.
        any_role: prefill engines answer whole requests as others do; else only if nothing else can.
    """
    if any_role and leg is not Leg.SECOND:
        return engines
    if leg is Leg.SECOND and (decode := [engine for engine in engines if engine.role is EngineRole.DECODE]):
        return decode
    return [engine for engine in engines if engine.role is not EngineRole.PREFILL] or engines


def _of(engines: Sequence[EngineView], role: EngineRole) -> list[EngineView]:
    """Engines for a leg: the engines of its role, or, if there are none, engines that take whole requests."""
    return [engine for engine in engines if engine.role is role] or [
        engine for engine in engines if engine.role is EngineRole.BOTH
    ]


def handed_over(held: HeldPrefix, prompt_tokens: int, block_tokens: int, *, near: bool) -> HeldPrefix:
    """Return what a second leg's engine can use of a prompt: all whole blocks but the one with the last token. near: it
    loads what it does not hold at the CPU tier's rate."""
    loadable = (prompt_tokens - 1) // block_tokens * block_tokens
    new = max(0, loadable - held.total_tokens)
    return msgspec.structs.replace(
        held, cpu_tokens=held.cpu_tokens + new * near, shared_tokens=held.shared_tokens + new * (not near)
    )


def _second_leg_ms(engine: EngineView, held: HeldPrefix, prompt_tokens: int, begins_ms: float) -> float:
    """Cost on an engine from `begins_ms` from now on. held: by then."""
    rates = engine.rates

    def left(tokens: int, tokens_per_second: float) -> int:
        return max(0, tokens - int(begins_ms / 1000.0 * tokens_per_second))

    above = left(engine.shared_link_tokens - engine.below_link_tokens, rates.shared_load_tokens_per_second)
    below = left(engine.below_link_tokens, rates.below_load_tokens_per_second or rates.shared_load_tokens_per_second)
    after = msgspec.structs.replace(
        engine,
        held=held,
        queued_tokens=left(engine.queued_tokens, rates.prefill_tokens_per_second),
        cpu_link_tokens=left(engine.cpu_link_tokens, rates.cpu_load_tokens_per_second),
        shared_link_tokens=above + below,
        below_link_tokens=below,
        store_wait_ms=max(0.0, engine.store_wait_ms - begins_ms),
    )
    return cost_of(after, prompt_tokens).total_ms
