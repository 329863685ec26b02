from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from spillway_gateway.routing.fleet_view import (
    NOTHING_HELD,
    EngineRates,
    EngineView,
    FleetView,
    HeldPrefix,
    RouteRequest,
)
from spillway_gateway.routing.load import cost_of, crowding, uncached_tokens
from spillway_gateway.routing.route import Decision, RouteReason, plan_route, usable_engines

RATES = EngineRates(5000.0, 100_000.0, 40_000.0, 10.0)
FACTOR = 1.25


def engine(name: str, held: HeldPrefix = NOTHING_HELD, running: int = 0, queued: int = 0) -> EngineView:
    return EngineView(name, True, running, queued, RATES, held)


held_prefixes = st.builds(
    HeldPrefix,
    device_tokens=st.integers(0, 4000),
    cpu_tokens=st.integers(0, 4000),
    shared_tokens=st.integers(0, 4000),
)
views = st.lists(
    st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 20_000), held_prefixes), min_size=0, max_size=6
).map(
    lambda rows: FleetView(
        tuple(EngineView(f"e{at}", up, run, queued, RATES, held) for at, (up, run, queued, held) in enumerate(rows))
    )
)
requests = st.builds(
    RouteRequest,
    prompt_tokens=st.integers(1, 20_000),
    spread_key=st.integers(0, 2**64 - 1),
    tried=st.frozensets(st.sampled_from(["e0", "e1", "e2"])),
)


@given(requests, views)
def test_a_usable_engine_is_always_found_and_never_another(request: RouteRequest, view: FleetView) -> None:
    usable = {candidate.name for candidate in usable_engines(request, view)}
    decision = plan_route(request, view, FACTOR)

    assert (decision is None) == (not usable)
    if decision is not None:
        assert decision.engine_name in usable
        assert decision.uncached_tokens >= 1
        assert plan_route(request, view, FACTOR) == decision


@given(st.integers(1, 20_000), held_prefixes, st.integers(0, 4000))
def test_a_longer_device_prefix_never_costs_more(prompt_tokens: int, held: HeldPrefix, more: int) -> None:
    longer = structs.replace(held, device_tokens=held.device_tokens + more)

    shorter_cost = cost_of(engine("a", held), prompt_tokens).total_ms
    assert cost_of(engine("a", longer), prompt_tokens).total_ms <= shorter_cost + 1e-9


@given(st.integers(200, 20_000), st.integers(1, 100))
def test_device_beats_cpu_beats_shared_beats_nothing(prompt_tokens: int, tokens: int) -> None:
    costs = [
        cost_of(engine("a", held), prompt_tokens).total_ms
        for held in (HeldPrefix(tokens, 0, 0), HeldPrefix(0, tokens, 0), HeldPrefix(0, 0, tokens), HeldPrefix())
    ]

    assert costs == sorted(costs)
    assert len(set(costs)) == 4


def test_the_holder_is_chosen_while_it_is_free() -> None:
    view = FleetView((engine("a"), engine("b", HeldPrefix(2048, 0, 0))))

    decision = plan_route(RouteRequest(2100, 1), view, FACTOR)

    assert decision is not None
    assert (decision.engine_name, decision.reason) == ("b", RouteReason.PREFIX)
    assert decision.uncached_tokens == 52


@given(st.integers(0, 2**64 - 1), st.integers(1, 2_000), st.permutations(["device", "cpu", "shared"]))
def test_of_equal_prefixes_the_nearest_is_chosen(spread_key: int, tokens: int, tiers: list[str]) -> None:
    """This holds for a short prefix, too, whose load takes less than any difference between engines that would
    count."""
    view = FleetView(tuple(engine(tier, HeldPrefix(**{f"{tier}_tokens": tokens})) for tier in tiers))

    decision = plan_route(RouteRequest(tokens + 1, spread_key), view, FACTOR)
    without_device = plan_route(RouteRequest(tokens + 1, spread_key, frozenset({"device"})), view, FACTOR)

    assert decision is not None and without_device is not None
    assert (decision.engine_name, without_device.engine_name) == ("device", "cpu")


def test_what_only_the_tier_below_has_is_priced_at_its_own_rate() -> None:
    rates = structs.replace(RATES, below_load_tokens_per_second=2_000.0)
    above, below, both = (HeldPrefix(shared_tokens=4_000, below_tokens=tokens) for tokens in (0, 4_000, 1_000))
    costs = [cost_of(EngineView("a", True, 0, 0, rates, held), 4_001).load_ms for held in (above, below, both)]
    assert costs == [100.0, 2_000.0, 500.0]  # both are read at the same time
    unmeasured = cost_of(engine("a", below), 4_001).load_ms
    assert unmeasured == 100.0


def test_of_equally_long_prefixes_in_shared_tiers_the_nearer_is_chosen_however_short() -> None:
    near, far = HeldPrefix(shared_tokens=16), HeldPrefix(shared_tokens=16, below_tokens=16)
    for view in ((engine("a", far), engine("b", near)), (engine("b", near), engine("a", far))):
        decision = plan_route(RouteRequest(17, 7), FleetView(view), FACTOR)
        assert decision is not None and decision.engine_name == "b"


def test_a_queue_longer_than_the_recompute_outbids_the_prefix() -> None:
    view = FleetView((engine("a"), engine("b", HeldPrefix(256, 0, 0), running=3, queued=50_000)))

    decision = plan_route(RouteRequest(300, 1), view, FACTOR)

    assert decision is not None
    assert (decision.engine_name, decision.reason) == ("a", RouteReason.LOAD)


def test_unknown_prompts_spread_by_hash_within_the_bound() -> None:
    running = {"a": 0, "b": 0, "c": 0}
    for _ in range(60):  # one hot key: the bound has to spread it
        view = FleetView(tuple(engine(name, running=count) for name, count in running.items()))
        decision = plan_route(RouteRequest(100_000, 42), view, FACTOR)
        assert decision is not None
        running[decision.engine_name] += 1

    assert max(running.values()) <= 26
    assert min(running.values()) >= 10


def test_equal_holders_share_by_load() -> None:
    held = HeldPrefix(1024, 0, 0)
    free = replace_running(engine("a", held), 0)
    busy = replace_running(engine("b", held), 3)

    decision = plan_route(RouteRequest(1024, 5), FleetView((busy, free)), FACTOR)

    assert decision is not None and decision.engine_name == "a"


def replace_running(view: EngineView, running: int) -> EngineView:
    return structs.replace(view, running_requests=running)


def test_only_and_retry_are_named() -> None:
    view = FleetView((engine("a"), engine("b")))

    once = plan_route(RouteRequest(10, 1), structs.replace(view, engines=view.engines[:1]), FACTOR)
    again = plan_route(RouteRequest(10, 1, frozenset({"a"})), view, FACTOR)

    assert once is not None and once.reason is RouteReason.ONLY
    assert again is not None and (again.engine_name, again.reason) == ("b", RouteReason.RETRY)
    assert plan_route(RouteRequest(10, 1, frozenset({"a", "b"})), view, FACTOR) is None


shares = st.floats(-0.5, 3.0)


@given(held_prefixes, st.integers(1, 20_000), shares, shares, st.floats(0, 1), st.integers(0, 10**6))
def test_every_term_is_a_finite_time_and_crowding_is_bounded(
    held: HeldPrefix, prompt_tokens: int, busy: float, usage: float, token_ms: float, link: int
) -> None:
    view = structs.replace(
        engine("a", held),
        busy_share=busy,
        shared_busy_share=busy,
        kv_usage=usage,
        kv_token_ms=token_ms,
        cpu_link_tokens=link,
        shared_link_tokens=link,
    )
    cost = cost_of(view, prompt_tokens)

    assert all(0 <= part < float("inf") for part in structs.astuple(cost))
    assert (
        cost.displaced_ms
        <= 4 * (cost.load_ms + cost.prefill_ms + uncached_tokens(held, prompt_tokens) * token_ms) + 1e-6
    )


@given(shares, shares)
def test_crowding_grows_with_the_share(one: float, other: float) -> None:
    low, high = sorted((one, other))

    assert crowding(low) <= crowding(high)
    assert (crowding(0.0), crowding(0.5)) == (0, 1)


def test_a_load_displaces_others_on_a_busy_link() -> None:
    view = engine("a", HeldPrefix(0, 0, 4_000))
    busy = structs.replace(view, shared_busy_share=0.5)

    assert cost_of(view, 4_001).displaced_ms == 0
    assert cost_of(busy, 4_001).displaced_ms == cost_of(busy, 4_001).load_ms == 100


def test_a_hot_prefix_spreads_while_engines_are_idle_and_stays_when_they_are_not() -> None:
    held = HeldPrefix(4_000, 0, 0)
    for busy, chosen in ((0.0, "b"), (0.9, "a")):
        views = (engine("a", held, queued=4_200), engine("b"))
        view = FleetView(tuple(structs.replace(item, busy_share=busy) for item in views))
        decision = plan_route(RouteRequest(4_010, 1), view, FACTOR)
        assert decision is not None and decision.engine_name == chosen


def test_a_queue_on_the_link_counts_for_those_who_load_alone() -> None:
    loads = structs.replace(engine("a", HeldPrefix(0, 0, 4_000)), shared_link_tokens=400_000)
    other = engine("b", HeldPrefix(3_000, 0, 0))

    assert cost_of(loads, 4_001).link_ms == 10_000
    assert cost_of(structs.replace(loads, held=NOTHING_HELD), 4_001).link_ms == 0
    assert cost_of(structs.replace(loads, shared_link_tokens=0, store_wait_ms=7.0), 4_001).link_ms == 7
    decision = plan_route(RouteRequest(4_001, 1), FleetView((loads, other)), FACTOR)
    assert decision is not None and decision.engine_name == "b"


def test_loads_from_the_tier_below_are_waited_for_at_its_rate_by_those_who_load_from_it() -> None:
    rates = structs.replace(RATES, below_load_tokens_per_second=2_000.0)
    queued = EngineView("a", True, 0, 0, rates, shared_link_tokens=44_000, below_link_tokens=4_000)
    above, below, both = HeldPrefix(0, 0, 10), HeldPrefix(0, 0, 10, 10), HeldPrefix(0, 0, 20, 10)
    links = [cost_of(structs.replace(queued, held=held), 4_001).link_ms for held in (above, below, both)]
    assert links == [1_000.0, 2_000.0, 2_000.0]


def test_an_unknown_prompt_goes_to_an_idle_engine() -> None:
    """Such a prompt goes to one of the cheapest engines, whichever its hash prefers."""
    for key in range(50):
        view = FleetView((engine("a", queued=100), engine("b"), engine("c")))
        decision = plan_route(RouteRequest(50_000, key), view, FACTOR)
        assert decision is not None and decision.engine_name in "bc"


def test_what_enters_the_device_counts_for_what_it_evicts_and_is_loaded_again() -> None:
    """Each block causes three loads in the end if three of four tokens on devices are cached; the share is bounded."""
    held = HeldPrefix(cpu_tokens=1_000, shared_tokens=2_000)
    plain = cost_of(EngineView("e", True, 0, 0, RATES, held), 4_000)
    for share, loads in ((0.0, 0.0), (0.75, 3.0), (1.0, 4.0)):
        view = EngineView("e", True, 0, 0, RATES, held, device_share=share, reload_token_ms=0.02)
        for prefix, entering in (
            (held, 4_000),
            (NOTHING_HELD, 4_000),
            (HeldPrefix(device_tokens=3_000), 1_000),
        ):
            cost = cost_of(structs.replace(view, held=prefix), 4_000)
            assert cost.displaced_ms == pytest.approx(plain.displaced_ms + loads * entering * 0.02)


@given(
    less=held_prefixes,
    device_tokens=st.integers(0, 4_000),
    cpu_tokens=st.integers(0, 4_000),
    prefill_rate=st.floats(1_000, 100_000),
    busy_share=shares,
    kv_usage=shares,
    device_share=shares,
    reload_token_ms=st.floats(0, 10),
)
def test_of_two_engines_alike_the_one_that_holds_more_never_costs_more(
    less: HeldPrefix, device_tokens: int, cpu_tokens: int, prefill_rate: float, **state: float
) -> None:
    """A turn leaves the engine of its prefix for a shorter queue alone, however busy and full the engines are, as long
    as a load is faster than computing."""
    rates = EngineRates(prefill_rate, 100_000.0, 40_000.0, 10.0)
    view = structs.replace(EngineView("e", True, 3, 1_000, rates, less, kv_token_ms=0.1), **state)
    more = HeldPrefix(less.device_tokens + device_tokens, less.cpu_tokens + cpu_tokens, less.shared_tokens)
    prompt_tokens = more.total_tokens + 1_000

    holder = cost_of(structs.replace(view, held=more), prompt_tokens)

    assert holder.total_ms <= cost_of(view, prompt_tokens).total_ms + 1e-6


def decision_of(held: HeldPrefix, text_tokens: int | None) -> Decision:
    return Decision("e0", RouteReason.PREFIX, held, 1000, 1, (), text_tokens=text_tokens)


@given(held_prefixes, st.integers(1, 20_000), st.integers(0, 20_000))
def test_prompts_matched_by_token_ids_are_compared_as_they_are(
    held: HeldPrefix, prompt_tokens: int, cached_tokens: int
) -> None:
    assert decision_of(held, None).expected(prompt_tokens, cached_tokens) == held
    assert decision_of(held, 0).expected(prompt_tokens, cached_tokens) is None


@given(held_prefixes, st.floats(0.3, 3.0))
def test_the_language_of_a_text_does_not_make_cached_tokens_missing(held: HeldPrefix, tokens_per_guess: float) -> None:
    """Chinese has fewer tokens than a byte count says, code has more: either way all of it is found, or a half is."""
    text_tokens = held.total_tokens + 100
    prompt_tokens = int(text_tokens * tokens_per_guess) + 1
    found = int(held.total_tokens * tokens_per_guess)

    expected = decision_of(held, text_tokens).expected(prompt_tokens, found)
    half = decision_of(held, text_tokens).expected(prompt_tokens, found // 2)

    assert expected is not None and expected.tier_of_first_missing(found) is None
    assert half is not None
    if found > 100:
        assert 0.4 * found < half.total_tokens - found // 2 < 0.6 * found
        assert half.tier_of_first_missing(found // 2) is not None


@given(held_prefixes, st.integers(0, 20_000))
def test_the_first_tokens_of_a_prefix_are_those_of_the_nearer_tiers(held: HeldPrefix, tokens: int) -> None:
    first = held.first(tokens)

    assert first.total_tokens == min(tokens, held.total_tokens)
    assert not first.cpu_tokens or first.device_tokens == held.device_tokens
    assert not first.shared_tokens or first.cpu_tokens == held.cpu_tokens
