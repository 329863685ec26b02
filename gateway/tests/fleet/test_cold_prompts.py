from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import COLD_SECONDS, COLD_TOKENS_MIN, ROUTED_PER_ITERATION, ColdTurn
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_settings.queue_order import OVERTAKE_SECONDS

RATE = 10_000.0
BOUND = int(COLD_SECONDS * RATE)  # tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fleet_of(*names: str, clock: Clock | None = None) -> ModelFleet:
    clock = clock or Clock()
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=4, clock=clock)
    engines = tuple(EngineConfig(name, "http://127.0.0.1:1") for name in names)
    routing = RoutingConfig(prefill_tokens_per_second=RATE)
    fleet = ModelFleet(ModelConfig("m", engines), routing, index, clock=clock)
    for engine in fleet.engines.values():
        engine.set_state(EngineState.READY, "ready")
        for _ in range(300):
            engine.means.found(10_000, 0, 0.0)  # others find much
    return fleet


def prompt(tokens: int) -> PromptBlocks:
    return PromptBlocks([], 4, tokens, tokens)


def ask(fleet: ModelFleet, tokens: int, turn: ColdTurn | None = None) -> Attempt | None:
    return fleet.choose_unless_held(prompt(tokens), frozenset(), turn=turn or ColdTurn())


def sent(fleet: ModelFleet, tokens: int) -> Attempt:
    attempt = ask(fleet, tokens)
    assert attempt is not None
    return attempt


def test_an_engine_gets_no_more_cold_prompts_than_keep_it_busy_and_short_ones_pass() -> None:
    fleet = fleet_of("a")
    sent(fleet, BOUND - 1)
    first = sent(fleet, BOUND)
    assert ask(fleet, BOUND) is None
    assert sent(fleet, COLD_TOKENS_MIN - 1)
    first.first_byte(1.0, measures_prefill=False)
    assert fleet.engines["a"].prefills.cold_tokens == BOUND - 1


def test_a_prompt_of_which_the_engine_holds_most_passes() -> None:
    fleet = fleet_of("a")
    keys = list(range(1, 2_401))
    whole = PromptBlocks(keys, 4, 10_000, 1)  # of which 9,600 are expected there as soon as one of them was sent
    assert fleet.choose_unless_held(whole, frozenset(), turn=ColdTurn()) is not None
    assert ask(fleet, BOUND) is None
    assert fleet.choose_unless_held(whole, frozenset(), turn=ColdTurn()) is not None


def test_if_nothing_is_found_anywhere_nothing_is_protected() -> None:
    fleet = fleet_of("a")
    for _ in range(300):
        sent(fleet, COLD_TOKENS_MIN - 1)
        fleet.engines["a"].means.found(0, 0, 0.0)
    for _ in range(10):
        sent(fleet, BOUND)


async def test_those_that_wait_are_sent_in_order_of_arrival_as_prompts_leave_the_queue() -> None:
    fleet = fleet_of("a")
    running = [sent(fleet, BOUND)]
    order: list[int] = []

    async def request(number: int) -> None:
        turn = ColdTurn()
        try:
            while (attempt := ask(fleet, BOUND, turn)) is None:
                await fleet.cold.wait(turn)
        finally:
            fleet.cold.leave(turn)
        order.append(number)
        running.append(attempt)

    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()  # its client went away: its place is the next one's
    for _ in range(4):
        await asyncio.sleep(0)
        running.pop(0).close(1.0)
        for _ in range(4):
            await asyncio.sleep(0)
    assert order == [0, 2, 3]
    assert len(fleet.cold.waiting) == 0


def test_none_waits_for_longer_than_the_bound_and_urgent_ones_do_not_wait() -> None:
    clock = Clock()
    fleet = fleet_of("a", clock=clock)
    sent(fleet, BOUND)
    turn = ColdTurn()
    assert ask(fleet, BOUND, turn) is None
    assert ask(fleet, BOUND, ColdTurn(urgent=True)) is not None
    clock.now = OVERTAKE_SECONDS - 0.01
    assert ask(fleet, BOUND, turn) is None
    clock.now = OVERTAKE_SECONDS
    assert ask(fleet, BOUND, turn) is not None
    assert len(fleet.cold.waiting) == 0


@pytest.mark.parametrize("state", [EngineState.DOWN, EngineState.NOT_READY])
def test_when_an_engine_comes_or_goes_all_are_routed_anew(state: EngineState) -> None:
    fleet = fleet_of("a", "b")
    fleet.engines["b"].set_state(EngineState.DOWN, "away")
    sent(fleet, BOUND)
    turns = [ColdTurn() for _ in range(2)]
    assert [ask(fleet, BOUND, turn) for turn in turns] == [None, None]
    fleet.engines["b"].set_state(EngineState.READY, "ready")
    fleet.engines["a"].set_state(state, "away")
    assert all(turn.woken for turn in turns)
    assert [ask(fleet, BOUND, turn) is not None for turn in turns] == [True, False]


def test_room_that_the_woken_one_does_not_take_is_the_next_ones() -> None:
    fleet = fleet_of("a")
    running = sent(fleet, BOUND)
    turns = [ColdTurn() for _ in range(3)]
    assert [ask(fleet, BOUND, turn) for turn in turns] == [None] * 3
    running.close(1.0)
    assert [turn.woken for turn in turns] == [True, False, False]
    fleet.cold.leave(turns[0])  # its client went away meanwhile
    assert [turn.woken for turn in turns[1:]] == [True, False]
    fleet.remove_engine("a")
    assert turns[2].woken


@given(st.lists(st.one_of(st.integers(1, 2 * BOUND), st.none()), max_size=60))
def test_whatever_comes_and_goes_nobody_is_forgotten_and_no_engine_gets_more(steps: list[int | None]) -> None:
    """A number is a prompt of so many tokens, None the end of the oldest one on an engine."""
    fleet = fleet_of("a", "b")
    running: list[Attempt] = []
    waiting: list[tuple[int, ColdTurn]] = []

    def route_woken() -> None:
        while woken := next((each for each in waiting if each[1].woken), None):
            attempt = ask(fleet, *woken)
            if attempt is not None:
                waiting.remove(woken)
                running.append(attempt)

    for step in [*steps, *[None] * 2 * len(steps)]:
        if step is None:
            if running:
                running.pop(0).close(1.0)
        else:
            turn = ColdTurn()
            attempt = ask(fleet, step, turn)
            if attempt is None:
                waiting.append((step, turn))
            else:
                running.append(attempt)
        route_woken()
        for engine in fleet.engines.values():
            assert engine.prefills.cold_tokens < BOUND + 2 * BOUND
    assert not waiting
    assert not running
    assert len(fleet.cold.waiting) == 0


def test_callers_without_an_event_loop_are_woken_at_once() -> None:
    """The simulations in bench/ have a clock of their own and no event loop."""
    fleet, turn, woken = fleet_of("a"), ColdTurn(), list[bool]()
    attempt = sent(fleet, BOUND)
    turn.wake = lambda: woken.append(True)
    assert ask(fleet, BOUND, turn) is None
    attempt.first_byte(1.0, measures_prefill=False)
    assert woken == [True]


async def test_all_that_wait_are_routed_anew_over_iterations_of_the_event_loop() -> None:
    fleet = fleet_of("a", "b")
    for _ in range(2):
        sent(fleet, BOUND)
    routed = [0]

    async def request() -> None:
        turn = ColdTurn()
        try:
            while ask(fleet, BOUND, turn) is None:
                await fleet.cold.wait(turn)
                routed[-1] += 1
        finally:
            fleet.cold.leave(turn)

    tasks = [asyncio.create_task(request()) for _ in range(3 * ROUTED_PER_ITERATION)]
    await asyncio.sleep(0)
    assert len(fleet.cold.waiting) == len(tasks)
    fleet.engines["b"].set_state(EngineState.DOWN, "gone")
    for _ in range(10):
        routed.append(0)
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert max(routed) <= ROUTED_PER_ITERATION
    assert sum(routed) == len(tasks)


async def test_a_prompt_takes_one_turn_however_often_engines_change() -> None:
    fleet = fleet_of("a")
    sent(fleet, BOUND)
    turns = [ColdTurn() for _ in range(3 * ROUTED_PER_ITERATION)]
    for turn in turns:
        assert ask(fleet, BOUND, turn) is None
    waiting = [asyncio.create_task(fleet.cold.wait(turn)) for turn in turns]
    await asyncio.sleep(0)
    for _ in range(100):
        fleet.cold.changed()
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(task.done() for task in waiting) and not fleet.cold._turns._waiting
