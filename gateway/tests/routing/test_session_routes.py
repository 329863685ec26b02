"""The influence of a session's last engine on a choice, and its limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from spillway_gateway.routing.fleet_view import EngineRates, EngineView, FleetView, HeldPrefix, RouteRequest
from spillway_gateway.routing.rendezvous import load_bound
from spillway_gateway.routing.route import TIE_MS, RouteReason, SessionOutcome, plan_route
from spillway_gateway.tracing.attributes import route_attributes

RATES = EngineRates(5000.0, 100_000.0, 40_000.0, 10.0)
FACTOR = 1.25
FEW = st.sampled_from([0, 0, 128, 1024])  # so that engines hold the same, or nothing
held_prefixes = st.builds(HeldPrefix, device_tokens=FEW, cpu_tokens=FEW, shared_tokens=FEW)
engine_rows = st.tuples(
    st.sampled_from([True, True, True, False]),
    st.sampled_from([0, 0, 1, 12]),  # some overloaded
    st.sampled_from([0, 0, 3, 2_000]),
    st.just(HeldPrefix()) | held_prefixes,
    st.sampled_from([True, False, False]),
)
# Engines that are all different, or of few kinds: among equal ones the session decides.
views = (
    st.lists(engine_rows, min_size=2, max_size=5)
    | st.lists(engine_rows, min_size=1, max_size=2).flatmap(
        lambda kinds: st.lists(st.sampled_from(kinds), min_size=2, max_size=5)
    )
).map(
    lambda rows: FleetView(
        tuple(
            EngineView(f"e{at}", up, running, queued, RATES, held, events_live=live)
            for at, (up, running, queued, held, live) in enumerate(rows)
        )
    )
)
requests = st.builds(
    RouteRequest,
    prompt_tokens=st.integers(1, 20_000),
    spread_key=st.integers(0, 2**64 - 1),
    tried=st.sampled_from([frozenset(), frozenset(), frozenset({"e0"})]),
    in_session=st.just(True),
    session_engine=st.sampled_from(["e0", "e0", "e1", "gone"]),
)


@given(requests, views)
def test_a_session_moves_a_choice_only_to_its_own_engine_and_never_to_a_worse_one(
    request: RouteRequest, view: FleetView
) -> None:
    decision = plan_route(request, view, FACTOR)
    without = plan_route(structs.replace(request, in_session=False, session_engine=None), view, FACTOR)

    assert (decision is None) == (without is None)
    if decision is None or without is None or decision.engine_name == without.engine_name:
        return
    assert decision.engine_name == request.session_engine
    own = next(each for each in decision.candidates if each.engine.name == decision.engine_name)
    engines = [each.engine for each in decision.candidates]
    assert own.engine.held.total_tokens >= next(
        each.held.total_tokens for each in engines if each.name == without.engine_name
    )
    assert own.engine.running_requests + 1 <= load_bound([each.running_requests for each in engines], FACTOR)
    margin_ms = TIE_MS if own.engine.events_live else max(TIE_MS, own.cost.prefill_ms)
    assert own.cost.total_ms <= min(each.cost.total_ms for each in decision.candidates) + margin_ms


@given(requests, views)
def test_the_outcome_names_what_became_of_the_session(request: RouteRequest, view: FleetView) -> None:
    decision = plan_route(request, view, FACTOR)
    if decision is None:
        return
    kept = decision.engine_name == request.session_engine
    assert decision.session is (SessionOutcome.KEPT if kept else SessionOutcome.MOVED)
    assert route_attributes(decision)["spillway.session"] == decision.session.value
    fresh = plan_route(structs.replace(request, session_engine=None), view, FACTOR)
    outside = plan_route(structs.replace(request, in_session=False, session_engine=None), view, FACTOR)
    assert fresh is not None and outside is not None
    assert (fresh.session, outside.session) == (SessionOutcome.NEW, None)
    assert fresh.engine_name == outside.engine_name
    assert "spillway.session" not in route_attributes(outside)


@given(st.integers(0, 2**64 - 1), st.sampled_from("abc"), st.booleans(), FEW)
def test_of_equal_engines_the_sessions_own_is_chosen(spread_key: int, last: str, live: bool, tokens: int) -> None:
    held = HeldPrefix(tokens, 0, 0)
    view = FleetView(tuple(EngineView(name, True, 2, 0, RATES, held, events_live=live) for name in "abc"))
    decision = plan_route(RouteRequest(2_000, spread_key, in_session=True, session_engine=last), view, FACTOR)
    assert decision is not None
    assert (decision.engine_name, decision.reason) == (last, RouteReason.SESSION)


def chosen(*engines: EngineView) -> str:
    """The engine that is chosen; the first one given served the session last."""
    request = RouteRequest(2_000, 1, in_session=True, session_engine=engines[0].name)
    decision = plan_route(request, FleetView(engines), FACTOR)
    assert decision is not None
    return decision.engine_name


def test_where_events_tell_what_an_engine_holds_a_session_waits_for_nothing() -> None:
    busy = EngineView("own", True, 3, 1_000, RATES)
    idle = [EngineView(f"idle-{at}", True, 2, 0, RATES) for at in range(3)]
    assert chosen(busy, *idle) != "own"
    assert chosen(structs.replace(busy, events_live=False), *idle) == "own"  # it may hold it all


def test_an_overloaded_engine_is_left_even_where_it_may_hold_all() -> None:
    own = EngineView("own", True, 4, 0, RATES, events_live=False)
    assert chosen(own, EngineView("other", True, 0, 0, RATES, events_live=False)) == "other"


def test_a_longer_prefix_elsewhere_goes_before_the_session() -> None:
    own = EngineView("own", True, 0, 0, RATES, HeldPrefix(128, 0, 0), events_live=False)
    assert chosen(own, EngineView("other", True, 0, 0, RATES, HeldPrefix(1_024, 0, 0))) == "other"


def test_the_nearer_tier_goes_before_the_session() -> None:
    own = EngineView("own", True, 0, 0, RATES, HeldPrefix(0, 64, 0))
    assert chosen(own, EngineView("other", True, 0, 0, RATES, HeldPrefix(64, 0, 0))) == "other"
