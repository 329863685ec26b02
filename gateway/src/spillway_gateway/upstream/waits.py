"""What a request waits for, and how that wait ends from outside: client disconnected, engine down, deadline, shutdown.

All of them go through `abort`, which cancels the request's own task with a cause. The task takes the cause up and
closes its connection to the engine in the same step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from spillway_gateway.errors import EngineEnding, EngineFirstByteTimeout, EngineIdleTimeout, EngineWentDown
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.upstream.outbound import UpstreamServices

SILENT_SECONDS = 1.0  # after which a begun stream of an engine that answers no polls counts as halted


class ClientDisconnected(Exception):
    """The client closed its connection; there is no one to answer."""


class ClientStalled(ClientDisconnected):
    """The client read nothing for longer than the idle timeout."""


class RequestWaits:
    """The waits of one request; created in the task that serves it, and used on the event loop only.

    Set by that task as it proceeds: `engine` (the one that has the request), `sending` (a write to the client is not
    finished), `bytes_sent` (the client has an event of this engine's answer, so that no other one may begin it anew),
    `begun` (the first part of the answer has come), `answered` (the client has all of it), and `deadline` (loop time by
    which the current wait must end).

    A begun stream that is silent for longer than the idle timeout ends, unless its engine works meanwhile, as the
    engine's metrics or its other streams show: a parser may hold the arguments of a tool call back until they are
    whole. It is then as silent as a plain reply, and has that one's bound.

    Of a begun reply that another engine may continue, `movable` tells whether one could do so now, and `stall_seconds`
    is its bound between two events; where none could, the bound of any other stream holds. `joining_seconds`: bound of
    the wait for the engine that continues; 0 at any other time.
    """

    __slots__ = (
        "_cause",
        "_fleet",
        "_loop",
        "_put_off",
        "_services",
        "_silent_since",
        "_stream",
        "_task",
        "_timer",
        "abortable",
        "answered",
        "begun",
        "bytes_sent",
        "deadline",
        "disconnected",
        "engine",
        "joining_seconds",
        "movable",
        "sending",
        "stall_seconds",
    )

    def __init__(self, fleet: ModelFleet, services: UpstreamServices, *, stream: bool) -> None:
        self._fleet = fleet
        self._services = services
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._cause: Exception | None = None
        self.abortable = False
        self.disconnected = False
        self.engine: Engine | None = None
        self.sending = False
        self.bytes_sent = False
        self.begun = False
        self.answered = False
        self.deadline = 0.0
        self.movable: Callable[[], bool] | None = None
        self.stall_seconds = 0.0
        self.joining_seconds = 0.0
        self._put_off = 0.0  # a deadline that was put off
        self._silent_since = 0.0  # of the silence in which it was

    def abort(self, cause: Exception) -> None:
        """End the current wait with `cause`. Does nothing outside an abortable wait."""
        if self.abortable and self._cause is None and self._task is not None and not self.answered:
            self._cause = cause
            self._task.cancel()

    def take_cause(self) -> Exception | None:
        """At a CancelledError: the cause to raise instead, or None where the task itself was cancelled."""
        cause, self._cause = self._cause, None
        if cause is not None and self._task is not None:
            self._task.uncancel()
        return cause

    def close(self) -> None:
        """Cancel the deadline. Called once the request is answered."""
        if self._timer is not None:
            self._timer.cancel()

    # -- causes ------------------------------------------------------------------------------------------------------

    def client_disconnected(self) -> None:
        self.disconnected = True
        self.abort(ClientDisconnected())

    def engine_went_down(self, engine: Engine) -> None:
        """The engine no longer answers polls. Aborts only where another engine is ready, and a reply that has begun
        only where it has halted and can be continued."""
        if self.bytes_sent:
            if self.movable is None or not (self.joining_seconds or self._halted()) or not self.movable():
                return
        elif not any(other.routable for other in self._fleet.engines.values() if other is not engine):
            return
        self.abort(EngineWentDown(f"Engine {engine.name} stopped answering"))

    def _halted(self) -> bool:
        return not self.sending and self._loop.time() - self._since() >= SILENT_SECONDS

    def _since(self) -> float:
        """When the last event of a begun stream came, in loop time."""
        if self.deadline == self._put_off:
            return self._silent_since
        idle = self._services.timeouts.idle_seconds
        return self.deadline - (idle if self.movable is None else min(idle, self.stall_seconds))

    def engine_ends(self, engine: Engine) -> None:
        """The engine terminates, and the time for its running requests is over."""
        self.abort(EngineEnding(f"Engine {engine.name} is shutting down, and this reply was not finished in time"))

    def expect_within(self, seconds: float) -> None:
        """Bound the next wait. A later deadline may also be set directly: the timer reads it when it fires."""
        self.deadline = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= self.deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self.deadline, self._on_timer)

    def _on_timer(self) -> None:
        if self._loop.time() < self.deadline:
            self._timer = self._loop.call_at(self.deadline, self._on_timer)
            return
        self._timer = None
        name = self.engine.name if self.engine is not None else "?"
        timeouts = self._services.timeouts
        if self.sending:
            self.abort(ClientStalled())
        elif self.joining_seconds:
            seconds = self.joining_seconds
            self.abort(EngineFirstByteTimeout(f"Engine {name} did not continue the answer within {seconds:g} s"))
        elif self.begun:
            self._silent(name)
        else:
            seconds = timeouts.first_byte_seconds if self._stream else timeouts.plain_seconds
            self.abort(EngineFirstByteTimeout(f"Engine {name} sent no reply within {seconds:g} s"))

    def _silent(self, name: str) -> None:
        """A begun stream has reached its deadline. Ends it, or puts the deadline off."""
        timeouts, since, now = self._services.timeouts, self._since(), self._loop.time()
        until, seconds = since + timeouts.idle_seconds, timeouts.idle_seconds
        if self.movable is not None and self.movable():
            until, seconds = since, min(seconds, self.stall_seconds)
        elif self.engine is not None and self.engine.progressed_by is not self:
            until = max(until, min(since + timeouts.plain_seconds, self.engine.progressed_at + timeouts.idle_seconds))
        if until > now:
            self._silent_since = since
            self.deadline = self._put_off = until
            self._timer = self._loop.call_at(until, self._on_timer)
        else:
            self.abort(EngineIdleTimeout(f"Engine {name} sent nothing for {round(max(seconds, now - since), 1):g} s"))
