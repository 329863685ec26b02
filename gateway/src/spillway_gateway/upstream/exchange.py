"""The exchange of one client request with engines, as a state machine: what its task waits for, until when, and what
ends that wait from outside.

The task reports its steps, and TRANSITIONS says which state each of them leads to. DEADLINES says when a state ends at
the latest, and with what. ENDS says which events from outside end a wait in which state: the client disconnects, the
engine goes down or is about to end, the gateway shuts down. Every end goes through `abort`, which cancels the task with
a cause; the task then raises the cause and closes its connection to the engine in the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import IntEnum, auto
from types import TracebackType
from typing import Any, NamedTuple

from spillway_gateway.errors import EngineEnding, EngineFirstByteTimeout, EngineIdleTimeout, EngineWentDown
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.upstream.continuation.continuing import Continuing
from spillway_gateway.upstream.outbound import Message, Send, UpstreamServices

SILENT_SECONDS = 1.0  # after which a begun stream of an engine that answers no polls counts as halted


class ClientDisconnected(Exception):
    """The client closed its connection; there is no one to answer."""


class ClientStalled(ClientDisconnected):
    """The client read nothing until the deadline."""


class State(IntEnum):  # whose hash costs a tenth of that of an Enum
    """PREAMBLE: the client has events that come before the first part of an answer, so no other engine may start over.
    ANSWERING: the first part has come. BRIDGING: the engine failed within its answer, and another one is to go on."""

    QUEUED = auto()
    ROUTING = auto()
    SENT = auto()
    PREAMBLE = auto()
    ANSWERING = auto()
    BRIDGING = auto()
    DONE = auto()


class Step(IntEnum):
    """A step that the task reports."""

    ENTER = auto()
    ROUTE = auto()
    ASK = auto()
    COMMIT = auto()
    BEGIN = auto()
    BREAK = auto()
    RESUME = auto()
    FINISH = auto()


class Event(IntEnum):
    """An event outside the task."""

    CLIENT_LEFT = auto()
    SHUTDOWN = auto()
    ENGINE_ENDS = auto()
    ENGINE_DOWN = auto()


TRANSITIONS: Mapping[Step, Mapping[State, State]] = {
    Step.ENTER: dict.fromkeys((State.QUEUED, State.ROUTING, State.SENT), State.QUEUED),
    Step.ROUTE: {State.QUEUED: State.ROUTING, State.SENT: State.ROUTING, State.BRIDGING: State.BRIDGING},
    Step.ASK: {State.ROUTING: State.SENT, State.BRIDGING: State.BRIDGING},
    Step.COMMIT: {State.SENT: State.PREAMBLE, State.ANSWERING: State.ANSWERING},
    Step.BEGIN: {State.SENT: State.ANSWERING, State.PREAMBLE: State.ANSWERING},
    Step.BREAK: dict.fromkeys((State.PREAMBLE, State.ANSWERING, State.BRIDGING), State.BRIDGING),
    Step.RESUME: {State.BRIDGING: State.ANSWERING},
    Step.FINISH: dict.fromkeys(State, State.DONE),
}
_COMMITTED = frozenset({State.PREAMBLE, State.ANSWERING, State.BRIDGING, State.DONE})


class Exchange:
    """The exchange of one request; created in the task that serves it, and used on the event loop only.

    As a context manager it encloses each wait that may be ended from outside, and raises the cause that ended it. A
    client that disconnected in between ends the next wait at once.

    engine: the one that was asked last. sending: a write to the client is not finished. since: loop time of the state's
    beginning, or of the last part of an answer.
    """

    __slots__ = (
        "_cause",
        "_continuation",
        "_disconnected",
        "_fleet",
        "_loop",
        "_send",
        "_services",
        "_stream",
        "_task",
        "_timer",
        "_waiting",
        "engine",
        "sending",
        "since",
        "state",
    )

    def __init__(
        self,
        fleet: ModelFleet,
        services: UpstreamServices,
        send: Send,
        *,
        stream: bool,
        continuation: Continuing | None = None,
    ) -> None:
        self._fleet = fleet
        self._services = services
        self._send = send
        self._stream = stream
        self._continuation = continuation
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._cause: Exception | None = None
        self._waiting = False
        self._disconnected = False
        self.sending = False
        self.since = self._loop.time()
        self.engine: Engine | None = None
        self.state = State.QUEUED

    @property
    def committed(self) -> bool:
        """Whether the client has events of an answer, so that no other engine may start it over."""
        return self.state in _COMMITTED

    @property
    def due(self) -> float | None:
        """The loop time at which the state ends; None if it has no deadline."""
        deadline = DEADLINES[self.state]
        return None if deadline is None else deadline.due(self, self._loop.time())

    @property
    def overdue(self) -> bool:
        due = self.due
        return due is not None and self._loop.time() >= due

    # -- waits of the task -------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        if self._disconnected:
            raise ClientDisconnected
        self._waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiting = False
        if self._cause is not None and isinstance(error, asyncio.CancelledError):
            cause, self._cause = self._cause, None
            if self._task is not None:
                self._task.uncancel()
            try:
                raise cause from None
            finally:
                del cause  # this frame is in its traceback, with those of the request: they would keep each other

    async def send(self, message: Message) -> None:
        """Send to the client. A deadline that passes meanwhile is the client's fault, not the engine's."""
        self.sending = True
        try:
            await self._send(message)
        finally:
            self.sending = False

    # -- steps of the task -------------------------------------------------------------------------------------------

    def ask(self, engine: Engine) -> None:
        """The engine is about to get the request, or what continues it."""
        self.engine = engine
        self.take(Step.ASK)

    def heard(self, now: float) -> None:
        """The engine has sent a further part of its answer. now: loop time."""
        self.since = now
        assert self.engine is not None
        self.engine.progressed(now, self)

    def take(self, step: Step) -> None:
        before = self.state
        state = self.state = TRANSITIONS[step][before]
        deadline = DEADLINES[state]
        if state is State.DONE and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if state is before or deadline is None:
            return
        now = self._loop.time()
        if not deadline.goes_on:
            self.since = now
        due = deadline.due(self, now)
        if self._timer is not None:
            if self._timer.when() <= due:  # a timer that fires early looks again
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self.on_timer)

    # -- events from outside -----------------------------------------------------------------------------------------

    def client_disconnected(self) -> None:
        self._disconnected = True
        self._happens(Event.CLIENT_LEFT, ClientDisconnected())

    def engine_went_down(self, engine: Engine) -> None:
        """The engine no longer answers polls."""
        self._happens(Event.ENGINE_DOWN, EngineWentDown(f"Engine {engine.name} stopped answering"), engine)

    def engine_ends(self, engine: Engine) -> None:
        """The engine terminates, and the time for its running requests is over."""
        self._happens(Event.ENGINE_ENDS, EngineEnding.of(engine.name), engine)

    def abort(self, cause: Exception) -> None:
        """The gateway shuts down."""
        self._happens(Event.SHUTDOWN, cause)

    def on_timer(self) -> None:
        """The timer has fired: end the wait if its deadline has passed, else look again at the deadline."""
        self._timer = None
        deadline = DEADLINES[self.state]
        if deadline is None:
            return
        now = self._loop.time()
        due = deadline.due(self, now)
        if now < due:
            self._timer = self._loop.call_at(due, self.on_timer)
        else:
            self._end(ClientStalled() if self.sending else deadline.cause(self, now))

    def _happens(self, event: Event, cause: Exception, engine: Engine | None = None) -> None:
        """End the wait if the event does. It may have happened to all requests, so that one has to wait for its turn:
        by then the answer may go on, or come from another engine than the event's."""

        def turn_came() -> None:
            if self._ends_by(event) and (engine is None or self in engine.requests):
                self._end(cause)

        if self._ends_by(event) and self._services.ends.take(self._loop, turn_came):
            self._end(cause)

    def _ends_by(self, event: Event) -> bool:
        ends = ENDS[event][self.state]
        return ends is not None and ends(self)

    def _end(self, cause: Exception) -> None:
        """The first cause of a wait counts."""
        if self._waiting and self._cause is None and self._task is not None:
            self._cause = cause
            self._task.cancel()

    # -- what the tables ask -----------------------------------------------------------------------------------------

    def always(self) -> bool:
        return True

    def another_could_answer(self) -> bool:
        return any(other.routable for other in self._fleet.engines.values() if other is not self.engine)

    def another_could_continue(self) -> bool:
        continuation = self._continuation
        return continuation is not None and self.engine is not None and continuation.possible(self.engine)

    def has_halted(self) -> bool:
        """Whether the engine has sent nothing for a while of an answer that another one could continue."""
        silent = not self.sending and self._loop.time() - self.since >= SILENT_SECONDS
        return silent and self.another_could_continue()

    def answer_due(self, now: float) -> float:
        return self.since + self._answer_seconds

    def no_answer(self, now: float) -> Exception:
        return EngineFirstByteTimeout(f"Engine {self._engine_name} sent no reply within {self._answer_seconds:g} s")

    def silence_due(self, now: float) -> float:
        """Return when a silent stream is given up: sooner if another engine could go on; later if this one works
        meanwhile, as its metrics or its other streams show, because a parser may hold the arguments of a tool call
        back until they are whole. The stream is then as silent as a plain reply, and has the bound of one."""
        timeouts, since = self._services.live.timeouts, self.since
        idle = due = since + timeouts.idle_seconds
        if self._continuation is not None:
            due = min(due, since + self._continuation.stall_seconds)
        if now < due or self.sending or self.another_could_continue():
            return due
        if self.engine is not None and self.engine.progressed_by is not self:
            worked_until = self.engine.progressed_at + timeouts.idle_seconds
            return max(idle, min(since + timeouts.plain_seconds, worked_until))
        return idle

    def silent(self, now: float) -> Exception:
        return EngineIdleTimeout(f"Engine {self._engine_name} sent nothing for {round(now - self.since, 1):g} s")

    def pause_due(self, now: float) -> float:
        return self.since + self._pause_seconds

    def not_continued(self, now: float) -> Exception:
        return EngineFirstByteTimeout(
            f"Engine {self._engine_name} did not continue the answer within {self._pause_seconds:g} s"
        )

    @property
    def _answer_seconds(self) -> float:
        timeouts = self._services.live.timeouts
        return timeouts.first_byte_seconds if self._stream else timeouts.plain_seconds

    @property
    def _pause_seconds(self) -> float:
        assert self._continuation is not None
        return self._continuation.pause_seconds

    @property
    def _engine_name(self) -> str:
        return self.engine.name if self.engine is not None else "?"


class Deadline(NamedTuple):
    """The latest end of a state, and its cause. Both are given the present loop time. goes_on: the state shares its
    beginning with the one before."""

    due: Callable[[Exchange, float], float]
    cause: Callable[[Exchange, float], Exception]
    goes_on: bool = False


DEADLINES: Mapping[State, Deadline | None] = {
    State.QUEUED: None,  # access/admission.py bounds the wait
    State.ROUTING: None,  # decided at once, or by the router process, whose end ends the wait
    State.SENT: Deadline(Exchange.answer_due, Exchange.no_answer),
    State.PREAMBLE: Deadline(Exchange.answer_due, Exchange.no_answer, goes_on=True),
    State.ANSWERING: Deadline(Exchange.silence_due, Exchange.silent),
    State.BRIDGING: Deadline(Exchange.pause_due, Exchange.not_continued),
    State.DONE: None,  # reading.py bounds the end of the engine's reply
}

_NEVER: dict[State, Callable[[Exchange], bool] | None] = dict.fromkeys(State)
_AT_ENGINE = (State.SENT, State.PREAMBLE, State.ANSWERING, State.BRIDGING)
_UNFINISHED = (State.QUEUED, State.ROUTING, *_AT_ENGINE)

# Whether the event ends the wait; None: never, as no engine has the request, or the client has its answer.
ENDS: Mapping[Event, Mapping[State, Callable[[Exchange], bool] | None]] = {
    Event.CLIENT_LEFT: _NEVER | dict.fromkeys(_UNFINISHED, Exchange.always),
    Event.SHUTDOWN: _NEVER | dict.fromkeys(_UNFINISHED, Exchange.always),
    Event.ENGINE_ENDS: _NEVER | dict.fromkeys(_AT_ENGINE, Exchange.always),
    Event.ENGINE_DOWN: _NEVER  # also in PREAMBLE: an engine is silent before an answer, so it may not have halted
    | {
        State.SENT: Exchange.another_could_answer,
        State.ANSWERING: Exchange.has_halted,
        State.BRIDGING: Exchange.another_could_continue,
    },
}
