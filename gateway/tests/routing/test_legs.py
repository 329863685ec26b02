"""One leg or two: the price decides, and what each engine is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from spillway_gateway.routing.fleet_view import (
    EngineRates,
    EngineView,
    FleetView,
    HeldPrefix,
    Leg,
    RouteRequest,
    SplitTerms,
)
from spillway_gateway.routing.legs import LegsReason, handed_over
from spillway_gateway.routing.route import Decision, RouteReason, plan_route
from spillway_settings.roles import EngineRole

RATES = EngineRates(5000.0, 100_000.0, 40_000.0, 10.0)
FACTOR, BLOCK = 1.25, 128
STORE = frozenset({"nvme/1"})
TERMS = SplitTerms(always=False, uncached_tokens_min=1024, hand_over_ms=50.0, token_ms_max=None, block_tokens=BLOCK)


def engine(name: str, role: str, *, queued: int = 0, busy: float = 0.0, held: int = 0, **fields: object) -> EngineView:
    view = EngineView(name, True, 0, queued, RATES, HeldPrefix(held, 0, 0), busy, role=EngineRole(role), stores=STORE)
    return structs.replace(view, **fields)


def plan(
    *engines: EngineView, tokens: int = 8192, leg: Leg = Leg.OPEN, any_role: bool = False, **terms: object
) -> Decision:
    request = RouteRequest(tokens, 7, leg=leg, any_role=any_role, splitting=structs.replace(TERMS, **terms))
    decision = plan_route(request, FleetView(engines), FACTOR)
    assert decision is not None
    return decision


def legs_of(decision: Decision) -> tuple[str, LegsReason]:
    assert decision.legs is not None
    return decision.legs.decision, decision.legs.reason


views = st.builds(
    engine,
    st.uuids().map(str),
    st.sampled_from(["both", "prefill", "decode"]),
    queued=st.just(0) | st.integers(0, 100_000),
    busy=st.floats(0, 2),
    held=st.integers(0, 8192),
    kv_usage=st.floats(0, 1),
    kv_token_ms=st.floats(0, 1),
    running_requests=st.integers(0, 50),
    routable=st.sampled_from([True, True, False]),
    stores=st.sampled_from([STORE, STORE, frozenset(), frozenset({"nvme/2"})]),
)


@given(st.lists(views, min_size=2, max_size=6), st.integers(1, 30_000), st.floats(0, 100))
def test_auto_never_takes_two_legs_that_cost_more(engines: list[EngineView], tokens: int, hand_over_ms: float) -> None:
    terms = structs.replace(TERMS, hand_over_ms=hand_over_ms)
    view = FleetView(tuple(engines))
    decision = plan_route(RouteRequest(tokens, 7, leg=Leg.OPEN, splitting=terms), view, FACTOR)
    whole = plan_route(RouteRequest(tokens, 7), view, FACTOR)
    assert (decision is None) == (whole is None)
    if decision is None or decision.legs is None or decision.legs.prefill is None:
        assert whole is None or decision.engine_name == whole.engine_name
        return
    legs = decision.legs
    price = min(each.cost.total_ms for each in whole.candidates)
    assert legs.two_legs_ms is not None and legs.two_legs_ms < legs.one_leg_ms == price
    assert decision.reason is RouteReason.PREFILL and decision.engine_name == legs.prefill.name != legs.decode_engine
    second = next(each for each in engines if each.name == legs.decode_engine)
    assert not second.stores.isdisjoint(legs.prefill.stores) and second.routable and legs.prefill.routable
    assert second.role is not EngineRole.PREFILL and legs.prefill.role is not EngineRole.DECODE


@given(
    st.lists(views, min_size=1, max_size=6), st.integers(1, 30_000), st.floats(0, 500), st.integers(0, 5), st.booleans()
)
def test_if_roles_do_not_bind_auto_chooses_as_among_engines_without_roles(
    engines: list[EngineView], tokens: int, hand_over_ms: float, last: int, silent: bool
) -> None:
    """Auto cannot be slower than they are."""
    if silent:  # engines without events keep their sessions at a price
        engines = [structs.replace(each, events_live=False) for each in engines]
    session = engines[last % len(engines)].name
    terms = structs.replace(TERMS, hand_over_ms=hand_over_ms)
    request = RouteRequest(tokens, 7, in_session=True, session_engine=session, leg=Leg.OPEN, any_role=True)
    decision = plan_route(structs.replace(request, splitting=terms), FleetView(tuple(engines)), FACTOR)
    alike = [structs.replace(each, role=EngineRole.BOTH) for each in engines]
    plain = plan_route(structs.replace(request, leg=Leg.WHOLE), FleetView(tuple(alike)), FACTOR)
    assert (decision is None) == (plain is None)
    if decision is not None and plain is not None:
        assert (decision.engine_name, decision.reason) == (plain.engine_name, plain.reason)
        assert decision.legs is None or decision.legs.prefill is None


def test_connectors_of_the_engines_need_no_common_store_and_read_at_the_near_rate() -> None:
    engines = engine("p", "prefill"), engine("d", "decode", stores=frozenset({"nvme/2"}))
    assert legs_of(plan(*engines, always=True)) == ("one", LegsReason.NO_COMMON_STORE)
    decision = plan(*engines, always=True, by_connector=True)
    assert legs_of(decision) == ("two", LegsReason.ALWAYS)
    node = frozenset({"node/1"})
    near = plan(engine("p", "prefill", stores=node), engine("d", "decode", stores=node), always=True)
    assert decision.legs is not None and near.legs is not None
    assert decision.legs.two_legs_ms == near.legs.two_legs_ms


def test_idle_engines_answer_alone_and_busy_decode_engines_have_prompts_computed_elsewhere() -> None:
    idle = plan(engine("p", "prefill"), engine("d", "decode"))
    assert legs_of(idle) == ("one", LegsReason.PRICE) and idle.engine_name == "d"
    busy = plan(engine("p", "prefill"), engine("d", "decode", busy=0.8))
    assert legs_of(busy) == ("two", LegsReason.PRICE) and busy.engine_name == "p"
    assert busy.legs is not None and busy.legs.decode_engine == "d"
    queue = plan(engine("p", "prefill", queued=200_000), engine("d", "decode", busy=0.8))
    assert legs_of(queue) == ("one", LegsReason.PRICE)


def test_what_a_decode_engine_computes_meanwhile_is_not_waited_for() -> None:
    """The queue would count in both ways otherwise, and two legs would never be cheaper because of it."""
    queued = plan(engine("p", "prefill"), engine("d", "decode", queued=8192))
    assert legs_of(queued) == ("two", LegsReason.PRICE)
    assert queued.legs is not None and queued.legs.two_legs_ms is not None
    idle = plan(engine("p", "prefill"), engine("d", "decode"), always=True)
    assert idle.legs is not None and queued.legs.two_legs_ms == pytest.approx(idle.legs.two_legs_ms, abs=1.0)
    assert legs_of(plan(engine("p", "prefill", queued=8192), engine("d", "decode", queued=8192)))[0] == "one"


def test_a_prompt_is_loaded_at_the_rate_of_the_store_in_common() -> None:
    def two_legs_ms(stores: frozenset[str]) -> float:
        engines = engine("p", "prefill", stores=stores), engine("d", "decode", stores=stores)
        legs = plan(*engines, always=True).legs
        assert legs is not None and legs.two_legs_ms is not None
        return legs.two_legs_ms

    of_node, of_shared = two_legs_ms(frozenset({"node/1"})), two_legs_ms(STORE)
    loaded = 8192 - BLOCK  # tokens
    per_second = 1 / RATES.shared_load_tokens_per_second - 1 / RATES.cpu_load_tokens_per_second
    assert of_shared - of_node == pytest.approx(1000.0 * loaded * per_second)
    assert two_legs_ms(frozenset({"node/1", "nvme/1"})) == of_node


@pytest.mark.parametrize("near", [True, False])
def test_what_the_second_engine_does_not_hold_is_handed_over_but_for_the_last_block(near: bool) -> None:
    held = HeldPrefix(2 * BLOCK, BLOCK, BLOCK)
    later = handed_over(held, 8 * BLOCK, BLOCK, near=near)  # seven blocks are before the one with the last token
    assert later == HeldPrefix(2 * BLOCK, (4 if near else 1) * BLOCK, (1 if near else 4) * BLOCK)
    assert handed_over(held, 4 * BLOCK, BLOCK, near=near) == held


def test_each_token_that_is_handed_over_has_its_price() -> None:
    def two_legs_ms(**terms: object) -> float:
        legs = plan(engine("p", "prefill"), engine("d", "decode"), always=True, **terms).legs
        assert legs is not None and legs.two_legs_ms is not None
        return legs.two_legs_ms

    assert two_legs_ms(hand_over_token_ms=0.01) - two_legs_ms() == pytest.approx(0.01 * (8192 - BLOCK))


def test_slow_answers_and_always_need_no_lower_price() -> None:
    slow = engine("d", "decode", token_ms=60.0)
    assert legs_of(plan(engine("p", "prefill"), slow, token_ms_max=50.0)) == ("two", LegsReason.SLOW_ANSWERS)
    assert legs_of(plan(engine("p", "prefill"), slow, token_ms_max=70.0)) == ("one", LegsReason.PRICE)
    assert legs_of(plan(engine("p", "prefill"), slow, always=True)) == ("two", LegsReason.ALWAYS)


@pytest.mark.parametrize(
    ("engines", "tokens", "reason"),
    [
        ([engine("p", "prefill"), engine("d", "decode")], 1000, LegsReason.SHORT),
        ([engine("p", "prefill"), engine("d", "decode", held=8000)], 8192, LegsReason.SHORT),
        ([engine("p", "prefill", routable=False), engine("d", "decode")], 8192, LegsReason.NO_PREFILL_ENGINE),
        ([engine("p", "prefill"), engine("d", "decode", routable=False)], 8192, LegsReason.NO_DECODE_ENGINE),
        ([engine("p", "prefill"), engine("d", "decode", stores=frozenset())], 8192, LegsReason.NO_COMMON_STORE),
        ([engine("p", "prefill"), engine("d", "decode", declined_stores=STORE)], 8192, LegsReason.NO_COMMON_STORE),
    ],
)
def test_one_leg_has_a_reason(engines: list[EngineView], tokens: int, reason: LegsReason) -> None:
    assert legs_of(plan(*engines, tokens=tokens, always=True)) == ("one", reason)


def test_a_prefill_engine_may_store_where_it_does_not_load() -> None:
    engines = engine("p", "prefill", declined_stores=STORE), engine("d", "decode")
    assert legs_of(plan(*engines, always=True)) == ("two", LegsReason.ALWAYS)


def test_engines_without_roles_take_whole_requests_and_are_asked_nothing() -> None:
    assert plan(engine("a", "both"), engine("b", "both"), always=True).legs is None


def test_engines_of_both_roles_stand_in_for_either() -> None:
    assert plan(engine("p", "prefill"), engine("b", "both"), always=True).legs.decode_engine == "b"
    prompt = plan(engine("b", "both"), engine("d", "decode"), always=True)
    assert (prompt.engine_name, prompt.legs.decode_engine) == ("b", "d")


def test_a_prefill_engine_answers_only_if_nothing_else_can() -> None:
    busy = engine("d", "decode", queued=1_000_000)
    assert plan(engine("p", "prefill"), busy, leg=Leg.WHOLE).engine_name == "d"
    assert plan(engine("p", "prefill"), structs.replace(busy, routable=False), leg=Leg.WHOLE).engine_name == "p"


def test_a_session_that_stays_at_a_price_is_no_reason_for_two_legs() -> None:
    """The session's engine may hold more than the index knows; the whole request is cheaper on the prefill engine."""
    own = engine("d", "decode", busy=0.45, events_live=False)
    request = RouteRequest(8192, 7, in_session=True, session_engine="d", leg=Leg.OPEN, any_role=True, splitting=TERMS)
    decision = plan_route(request, FleetView((engine("p", "prefill"), own)), FACTOR)
    assert decision is not None and (decision.engine_name, decision.reason) == ("d", RouteReason.SESSION)
    assert legs_of(decision) == ("one", LegsReason.PRICE)


def test_a_prefill_engine_answers_at_its_price_if_roles_do_not_bind() -> None:
    idle, busy = engine("p", "prefill"), engine("d", "decode", queued=10_000)
    for leg in (Leg.WHOLE, Leg.OPEN):
        assert plan(idle, busy, leg=leg, any_role=True).engine_name == "p"
    assert plan(idle, busy, leg=Leg.SECOND, any_role=True).engine_name == "d"
    slow = engine("p", "prefill", token_ms=60.0), engine("d", "decode", queued=10_000)
    assert legs_of(plan(*slow, any_role=True, token_ms_max=50.0)) == ("two", LegsReason.SLOW_ANSWERS)


@given(st.lists(views, min_size=1, max_size=4, unique_by=lambda view: view.name), st.booleans(), st.booleans())
def test_each_engine_is_a_candidate_once(engines: list[EngineView], any_role: bool, always: bool) -> None:
    """A prefill engine that may answer, or one of both roles, is one before it is chosen for the first leg."""
    request = RouteRequest(
        8192, 7, leg=Leg.OPEN, any_role=any_role, splitting=structs.replace(TERMS, always=always, uncached_tokens_min=1)
    )
    decision = plan_route(request, FleetView(tuple(engines)), FACTOR)
    names = [each.engine.name for each in decision.candidates] if decision is not None else []
    assert len(names) == len(set(names)) and (decision is None or decision.engine_name in names)


def test_a_second_leg_goes_to_a_decode_engine() -> None:
    holder = engine("b", "both", held=8000)
    assert plan(engine("p", "prefill", held=8000), holder, engine("d", "decode"), leg=Leg.SECOND).engine_name == "d"
    assert plan(engine("p", "prefill", held=8000), holder, leg=Leg.SECOND).engine_name == "b"
