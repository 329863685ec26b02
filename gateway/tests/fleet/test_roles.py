"""Engines with roles beside engines without: what a model's engines are chosen for under one load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.disaggregation import DisaggregationConfig
from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.event_decoder import BlockStored, Tier
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.fleet_view import Leg
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_settings.roles import EngineRole

BLOCK, NODE = 128, "node/0123456789abcdef"
ROLES = ("both", "prefill", "decode")


def fleet_of(roles: Sequence[str], mode: str, now: list[float], **terms: object) -> ModelFleet:
    """Engines of one node that are ready."""
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=BLOCK, clock=lambda: now[0])
    engines = tuple(
        EngineConfig(f"e{at}", f"http://127.0.0.1:{1 + at}", role=EngineRole(role)) for at, role in enumerate(roles)
    )
    terms = {"mode": mode, "uncached_tokens_min": BLOCK, **terms}
    fleet = ModelFleet(
        ModelConfig("m", engines),
        RoutingConfig(),
        index,
        clock=lambda: now[0],
        disaggregation=DisaggregationConfig(**terms),
    )
    for engine in fleet.engines.values():
        engine.set_state(EngineState.READY, "ready")
        engine.events_live = True
        index.apply(engine.name, BlockStored([], None, [], 0, Tier.CPU, None, [], 0, None, NODE))
    return fleet


class Load:
    """The requests to one fleet, and the engines that it chose for them."""

    def __init__(self, fleet: ModelFleet, now: list[float], leg: Leg) -> None:
        self._fleet, self._now, self._leg = fleet, now, leg
        self._open: list[Attempt] = []
        self.chosen: list[tuple[str, str]] = []

    def ask(self, blocks: int, group: int) -> None:
        keys = [group * 1_000_000 + at + 1 for at in range(blocks)]
        prompt = PromptBlocks(keys, BLOCK, blocks * BLOCK + 5, keys[0] if keys else group)
        turn = ColdTurn(urgent=True)
        attempt = self._fleet.choose_unless_held(prompt, frozenset(), turn=turn, leg=self._leg)
        assert attempt is not None
        decision = attempt.decision
        assert decision.legs is None or decision.legs.prefill is None, "two legs were taken"
        self.chosen.append((decision.engine_name, decision.reason))
        self._open.append(attempt)

    def first_byte(self, at: int) -> None:
        if self._open:
            attempt = self._open[at % len(self._open)]
            attempt.accepted(self._now[0])
            attempt.first_byte(self._now[0], measures_prefill=True)

    def end(self, at: int) -> None:
        if self._open:
            self._open.pop(at % len(self._open)).close(self._now[0])

    def read(self, at: int, rate: float, usage: float) -> None:
        engine = list(self._fleet.engines.values())[at % len(self._fleet.engines)]
        engine.observed(EngineReading(0, 0, usage, 256_000, rate), engine.running_requests)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 64), st.integers(0, 5)),
        st.tuples(st.just("first_byte"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("read"), st.integers(0, 3), st.floats(1_000, 50_000), st.floats(0, 1)),
        st.tuples(st.just("wait"), st.floats(0, 2)),
    ),
    max_size=60,
)


@given(st.lists(st.sampled_from(ROLES), min_size=2, max_size=4), steps, st.floats(0, 100))
def test_auto_sends_each_request_to_the_engine_that_equal_engines_without_roles_would_get(
    roles: list[str], load: list[tuple], hand_over_ms: float
) -> None:
    """Promised blocks, queues, rates and busy shares of the two fleets stay equal, whatever came before."""
    now = [100.0]
    split = Load(fleet_of(roles, "auto", now, hand_over_ms=hand_over_ms), now, Leg.OPEN)
    plain = Load(fleet_of(["both"] * len(roles), "off", now), now, Leg.WHOLE)
    for name, *arguments in load:
        if name == "wait":
            now[0] += arguments[0]
            continue
        for each in (split, plain):
            getattr(each, name)(*arguments)
    assert split.chosen == plain.chosen


def two_legs(
    fleet: ModelFleet, now: list[float], seconds: float, *, stream: bool = True, hidden: float | None = None
) -> Attempt:
    """A prompt over a connector; its second leg's first token comes after so many seconds, and shows in streams.
    hidden: the seconds before, after which one comes that does not show."""
    prompt = PromptBlocks([1 + at for at in range(64)], BLOCK, 64 * BLOCK + 5, 1)
    first = fleet.choose_unless_held(prompt, frozenset(), turn=ColdTurn(urgent=True), leg=Leg.OPEN)
    assert first is not None and first.engine.name == "e0"
    first.first_byte(now[0], measures_prefill=True)
    first.close()
    second = fleet.choose_unless_held(prompt, frozenset(), turn=ColdTurn(urgent=True), leg=Leg.SECOND)
    assert second is not None and second.engine.name == "e1"
    assert second.decision.uncached_tokens == 5 and second.engine.queued_tokens == 5, "the rest is transferred"
    if not stream:
        second.prefill_assumed()
    if hidden is not None:
        now[0] += hidden
        second.computed()
    now[0] += seconds
    if stream:
        second.first_byte(now[0], measures_prefill=True)
    return second


def test_a_transferred_prompt_is_not_taken_for_one_that_its_engine_computes() -> None:
    now = [100.0]
    fleet = fleet_of(["prefill", "decode"], "always", now, hand_over="connector")
    before = fleet.engines["e1"].rates.prefill_tokens_per_second
    for _ in range(20):
        two_legs(fleet, now, 0.05).close(now[0])
    assert fleet.engines["e1"].rates.prefill_tokens_per_second == before


def test_slow_transfers_raise_the_price_of_two_legs() -> None:
    prices = []
    for seconds, stream, hidden in ((0.1, True, None), (10.0, True, None), (10.0, False, None), (9.9, True, 0.1)):
        now = [100.0]
        fleet = fleet_of(["prefill", "decode"], "always", now, hand_over="connector")
        answered = two_legs(fleet, now, seconds, stream=stream, hidden=hidden)
        if stream:
            answered.close(now[0])
        now[0] = 111.0
        prompt = PromptBlocks([1_000 + at for at in range(64)], BLOCK, 64 * BLOCK + 5, 1_000)
        attempt = fleet.choose_unless_held(prompt, frozenset(), turn=ColdTurn(urgent=True), leg=Leg.OPEN)
        assert attempt is not None and attempt.decision.legs is not None
        prices.append(attempt.decision.legs.two_legs_ms or 0.0)
    assert prices[1] > prices[0] + 2000.0
    assert prices[2] == pytest.approx(prices[0], abs=20.0), "a whole answer takes as long as it takes"
    assert prices[3] == pytest.approx(prices[0], abs=20.0), "and so does reasoning that is hidden"


@pytest.mark.parametrize(
    ("mode", "strict_roles", "binds"),
    [("auto", False, False), ("auto", True, True), ("always", False, True), ("off", False, False)],
)
def test_prefill_engines_answer_whole_requests_unless_roles_bind(mode: str, strict_roles: bool, binds: bool) -> None:
    fleet = fleet_of(["prefill", "decode"], mode, [100.0], strict_roles=strict_roles)
    fleet.engines["e1"].busy.add(60.0, 100.0)
    chosen = fleet.choose(PromptBlocks([], BLOCK, 100, 1), frozenset()).engine.name
    assert chosen == ("e1" if binds else "e0")
    fleet.engines["e1"].set_state(EngineState.DOWN, "it died")
    assert fleet.choose(PromptBlocks([], BLOCK, 100, 1), frozenset()).engine.name == "e0"
