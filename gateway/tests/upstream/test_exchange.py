"""The states of an exchange: what each step leads to, when each state ends, and what ends a wait from outside."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spillway_gateway.config.live import LiveConfig
from spillway_gateway.config.settings import GatewayConfig, TimeoutsConfig
from spillway_gateway.errors import (
    EngineEnding,
    EngineFirstByteTimeout,
    EngineIdleTimeout,
    EngineWentDown,
    GatewayDraining,
)
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.exchange import (
    DEADLINES,
    ENDS,
    SILENT_SECONDS,
    TRANSITIONS,
    ClientDisconnected,
    ClientStalled,
    Event,
    Exchange,
    State,
    Step,
)
from spillway_gateway.upstream.outbound import ENDS_PER_ITERATION

TIMEOUTS = TimeoutsConfig()
STALL_SECONDS, PAUSE_SECONDS = 30.0, 20.0
UNBOUNDED = {State.QUEUED, State.ROUTING, State.DONE}  # bounded elsewhere, as the table says
TO: dict[State, list[Step]] = {
    State.QUEUED: [],
    State.ROUTING: [Step.ROUTE],
    State.SENT: [Step.ROUTE, Step.ASK],
    State.PREAMBLE: [Step.ROUTE, Step.ASK, Step.COMMIT],
    State.ANSWERING: [Step.ROUTE, Step.ASK, Step.BEGIN, Step.COMMIT],
    State.BRIDGING: [Step.ROUTE, Step.ASK, Step.BEGIN, Step.BREAK],
    State.DONE: [Step.FINISH],
}
LIVE = LiveConfig(GatewayConfig(models=(), timeouts=TIMEOUTS))


class Clock:
    """The running loop's time, stepped by the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: self.now

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        await settle()


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class Waiting:
    """An exchange whose task waits, until something ends that wait."""

    def __init__(self, *, others_ready: bool = True, continuable: bool = True, stream: bool = True) -> None:
        self.clock = Clock()
        self.engine: Any = SimpleNamespace(
            name="a", routable=True, progressed_by=None, progressed_at=0.0, progressed=self._progressed
        )
        self.other: Any = SimpleNamespace(name="b", routable=others_ready)
        self.continuation: Any = SimpleNamespace(
            stall_seconds=STALL_SECONDS, pause_seconds=PAUSE_SECONDS, allowed=continuable
        )
        self.continuation.possible = lambda engine: self.continuation.allowed
        self.stream = stream
        self.exchange: Exchange
        self.task = asyncio.create_task(self._serve())

    def _progressed(self, now: float, by: object) -> None:
        self.engine.progressed_at, self.engine.progressed_by = now, by

    async def _serve(self) -> None:
        fleet: Any = SimpleNamespace(engines={"a": self.engine, "b": self.other})
        services: Any = SimpleNamespace(live=LIVE, ends=Turns(ENDS_PER_ITERATION))

        async def send(message: Any) -> None: ...

        self.exchange = Exchange(fleet, services, send, stream=self.stream, continuation=self.continuation)
        with self.exchange:
            await asyncio.Event().wait()

    async def take(self, *steps: Step) -> Waiting:
        await settle()
        for step in steps:
            self.exchange.ask(self.engine) if step is Step.ASK else self.exchange.take(step)
        return self

    async def happens(self, event: Event) -> None:
        exchange = self.exchange
        {
            Event.CLIENT_LEFT: exchange.client_disconnected,
            Event.SHUTDOWN: lambda: exchange.abort(GatewayDraining("closing")),
            Event.ENGINE_ENDS: lambda: exchange.engine_ends(self.engine),
            Event.ENGINE_DOWN: lambda: exchange.engine_went_down(self.engine),
        }[event]()
        await settle()

    async def cause(self) -> type[BaseException] | None:
        """End the task, and return the error that ended its wait; None if it still waited."""
        if not self.task.done():
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            return None
        return type(self.task.exception())


@pytest.mark.parametrize("state", State)
def test_the_tables_answer_every_state(state: State) -> None:
    for step in Step:
        assert TRANSITIONS[step].keys() <= set(State)
    assert state is State.QUEUED or any(state in to.values() for to in TRANSITIONS.values()), "no step leads there"
    assert any(state in TRANSITIONS[step] for step in Step), "no step leads out of it"
    assert (DEADLINES[state] is None) == (state in UNBOUNDED)
    for event in Event:
        assert state in ENDS[event], event


@pytest.mark.parametrize("state", State)
async def test_a_passed_deadline_blames_the_side_that_was_waited_for(state: State) -> None:
    causes = {
        State.SENT: EngineFirstByteTimeout,
        State.PREAMBLE: EngineFirstByteTimeout,
        State.ANSWERING: EngineIdleTimeout,
        State.BRIDGING: EngineFirstByteTimeout,
    }
    for sending in (False, True):
        waiting = await Waiting().take(*TO[state])
        assert waiting.exchange.state is state
        waiting.exchange.sending = sending
        await waiting.clock.advance(10 * TIMEOUTS.plain_seconds)
        expected = causes.get(state)
        assert await waiting.cause() is (ClientStalled if sending and expected is not None else expected)


@pytest.mark.parametrize(("stream", "seconds"), [(True, TIMEOUTS.first_byte_seconds), (False, TIMEOUTS.plain_seconds)])
async def test_a_preamble_does_not_put_the_deadline_of_an_answer_off(stream: bool, seconds: float) -> None:
    waiting = await Waiting(stream=stream).take(Step.ROUTE, Step.ASK)
    await waiting.clock.advance(seconds - 1)
    await waiting.take(Step.COMMIT)
    assert await waiting.clock.advance(0) is None and not waiting.task.done()
    await waiting.clock.advance(1)
    assert await waiting.cause() is EngineFirstByteTimeout


async def test_a_part_of_an_answer_puts_its_deadline_off() -> None:
    waiting = await Waiting().take(*TO[State.ANSWERING])
    for _ in range(5):
        await waiting.clock.advance(STALL_SECONDS - 1)
        waiting.exchange.heard(waiting.clock.now)
    assert not waiting.task.done()
    await waiting.clock.advance(STALL_SECONDS)
    assert await waiting.cause() is EngineIdleTimeout


async def test_a_silence_is_as_long_as_that_of_a_plain_reply_while_the_engine_works_and_no_other_is_ready() -> None:
    waiting = await Waiting(continuable=False).take(*TO[State.ANSWERING])
    began = waiting.clock.now
    waiting.exchange.heard(began)
    while not waiting.task.done():
        waiting.engine.progressed(waiting.clock.now, None)  # as its metrics show
        await waiting.clock.advance(TIMEOUTS.idle_seconds / 2)
    assert waiting.clock.now - began == pytest.approx(TIMEOUTS.plain_seconds, abs=TIMEOUTS.idle_seconds)
    assert await waiting.cause() is EngineIdleTimeout


async def test_attempts_to_bridge_a_failure_share_one_deadline() -> None:
    waiting = await Waiting().take(*TO[State.BRIDGING])
    for _ in range(3):
        await waiting.clock.advance(PAUSE_SECONDS / 4)
        await waiting.take(Step.ROUTE, Step.ASK, Step.BREAK)
    assert not waiting.exchange.overdue
    await waiting.clock.advance(PAUSE_SECONDS / 4)
    assert waiting.exchange.overdue and await waiting.cause() is EngineFirstByteTimeout


@pytest.mark.parametrize(
    ("state", "change", "ends"),
    [
        (State.ROUTING, {}, False),
        (State.SENT, {}, True),
        (State.SENT, {"others_ready": False}, False),
        (State.PREAMBLE, {}, False),
        (State.ANSWERING, {}, True),
        (State.ANSWERING, {"continuable": False}, False),
        (State.BRIDGING, {}, True),
        (State.BRIDGING, {"continuable": False}, False),
        (State.DONE, {}, False),
    ],
)
async def test_an_engine_that_goes_down_ends_what_another_one_can_do(
    state: State, change: dict[str, bool], ends: bool
) -> None:
    waiting = await Waiting(**change).take(*TO[state])
    if state is State.ANSWERING:
        await waiting.happens(Event.ENGINE_DOWN)  # it may only be slow to answer polls
        assert not waiting.task.done()
        waiting.clock.now += SILENT_SECONDS
        waiting.exchange.sending = True
        await waiting.happens(Event.ENGINE_DOWN)  # the client is waited for
        assert not waiting.task.done()
        waiting.exchange.sending = False
    await waiting.happens(Event.ENGINE_DOWN)
    assert await waiting.cause() is (EngineWentDown if ends else None)


@pytest.mark.parametrize("state", State)
async def test_nothing_ends_a_finished_exchange(state: State) -> None:
    waiting = await Waiting().take(*TO[state], Step.FINISH)
    assert waiting.exchange._timer is None
    for event in Event:
        await waiting.happens(event)
    await waiting.clock.advance(10 * TIMEOUTS.plain_seconds)
    assert await waiting.cause() is None


async def test_the_first_cause_counts_and_a_client_that_left_in_between_ends_the_next_wait() -> None:
    waiting = await Waiting().take()
    waiting.exchange.client_disconnected()
    waiting.exchange.abort(GatewayDraining("later"))
    await settle()
    assert await waiting.cause() is ClientDisconnected

    async def send(message: Any) -> None: ...

    fleet: Any = SimpleNamespace(engines={})
    services: Any = SimpleNamespace(live=LIVE, ends=Turns(ENDS_PER_ITERATION))
    exchange = Exchange(fleet, services, send, stream=True)
    exchange.client_disconnected()
    with pytest.raises(ClientDisconnected), exchange:
        raise AssertionError("it waits for nothing")


async def test_a_cancelled_task_is_no_cause_of_the_exchange() -> None:
    waiting = await Waiting().take()
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)
    assert waiting.task.cancelled()


def expected_cause(waiting: Waiting, event: Event) -> type[BaseException] | None:
    """The error that an exchange promises for this event in its state; the tables are not consulted."""
    exchange = waiting.exchange
    state = exchange.state
    if state is State.DONE:
        return None
    if event in (Event.CLIENT_LEFT, Event.SHUTDOWN):
        return ClientDisconnected if event is Event.CLIENT_LEFT else GatewayDraining
    if state in (State.QUEUED, State.ROUTING):
        return None
    if event is Event.ENGINE_ENDS:
        return EngineEnding
    halted = waiting.clock.now - exchange.since >= SILENT_SECONDS and not exchange.sending
    goes_on = waiting.continuation.allowed
    ends = {
        State.SENT: waiting.other.routable,
        State.PREAMBLE: False,
        State.ANSWERING: halted and goes_on,
        State.BRIDGING: goes_on,
    }[state]
    return EngineWentDown if ends else None


ACTIONS = st.one_of(
    st.sampled_from(Step),
    st.sampled_from(Step),
    st.sampled_from(Event),
    st.sampled_from(["sending", "continuable", "other", "heard"]),
    st.floats(0.1, 50.0),
)


@example(State.SENT, False, [Step.BEGIN, "continuable", 30.0, "sending", 1.0])
@given(st.sampled_from(State), st.booleans(), st.lists(ACTIONS, max_size=15))
def test_in_any_order_of_steps_and_events_a_wait_ends_as_promised(
    start: State, others_ready: bool, actions: list[Any]
) -> None:
    async def run() -> None:
        waiting = await Waiting(others_ready=others_ready).take(*TO[start])
        expected: type[BaseException] | None = None
        for action in actions:
            exchange = waiting.exchange
            if isinstance(action, Step):
                if exchange.state in TRANSITIONS[action]:
                    await waiting.take(action)
            elif isinstance(action, Event):
                expected = expected_cause(waiting, action)
                await waiting.happens(action)
            elif isinstance(action, float):
                due, timer = exchange.due, exchange._timer
                await waiting.clock.advance(action)
                # A deadline that became sooner ends the wait when its timer looks, which is at the one before.
                looked = timer is None or waiting.clock.now >= timer.when()
                if due is not None and waiting.clock.now >= due and looked and exchange.overdue:
                    expected = {State.ANSWERING: EngineIdleTimeout}.get(exchange.state, EngineFirstByteTimeout)
                    expected = ClientStalled if exchange.sending else expected
            elif action == "sending":
                exchange.sending = not exchange.sending
            elif action == "continuable":
                waiting.continuation.allowed = not waiting.continuation.allowed
            elif action == "other":
                waiting.other.routable = not waiting.other.routable
            elif exchange.state is State.ANSWERING:
                exchange.heard(waiting.clock.now)
            assert exchange.due is None or exchange.due <= exchange.since + TIMEOUTS.plain_seconds
            if expected is not None or waiting.task.done():
                break
        assert await waiting.cause() is expected
        waiting.exchange.take(Step.FINISH)
        assert waiting.exchange.state is State.DONE and waiting.exchange._timer is None

    asyncio.run(run())


@pytest.mark.parametrize("event", [Event.SHUTDOWN, Event.ENGINE_ENDS, Event.ENGINE_DOWN])
async def test_what_happens_to_all_requests_ends_a_few_of_them_in_each_iteration(event: Event) -> None:
    """Each is sent again, or its client gets an error; streams of other engines would wait for all of them. One that
    has left the engine when its turn comes goes on."""
    engine: Any = SimpleNamespace(name="a", routable=True, requests=set())
    fleet: Any = SimpleNamespace(engines={"a": engine, "b": SimpleNamespace(name="b", routable=True)})
    services: Any = SimpleNamespace(live=LIVE, ends=Turns(ENDS_PER_ITERATION))
    exchanges: list[Exchange] = []
    ended = [0]

    async def send(message: Any) -> None: ...

    async def serve() -> None:
        exchange = Exchange(fleet, services, send, stream=True)
        exchanges.append(exchange)
        exchange.take(Step.ROUTE)
        exchange.ask(engine)
        engine.requests.add(exchange)
        try:
            with exchange:
                await asyncio.Event().wait()
        finally:
            ended[-1] += 1
            exchange.take(Step.FINISH)

    serving = [asyncio.create_task(serve()) for _ in range(3 * ENDS_PER_ITERATION)]
    await settle()
    for exchange in exchanges:
        {
            Event.SHUTDOWN: lambda exchange=exchange: exchange.abort(GatewayDraining("closing")),
            Event.ENGINE_ENDS: lambda exchange=exchange: exchange.engine_ends(engine),
            Event.ENGINE_DOWN: lambda exchange=exchange: exchange.engine_went_down(engine),
        }[event]()
    engine.requests.discard(exchanges[-1])
    for _ in range(10):
        ended.append(0)
        await asyncio.sleep(0)
    serving[-1].cancel()
    await asyncio.gather(*serving, return_exceptions=True)

    assert max(ended) <= ENDS_PER_ITERATION
    assert sum(ended) == len(serving)
    assert serving[-1].cancelled() == (event is not Event.SHUTDOWN)
