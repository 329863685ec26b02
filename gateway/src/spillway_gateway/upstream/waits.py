"""What a request waits for, and how that wait ends from outside: client disconnected, engine down, deadline, shutdown.

All of them go through `abort`, which cancels the request's own task with a cause. The task takes the cause up and
closes its connection to the engine in the same step.
"""

from __future__ import annotations

import asyncio
from typing import Any

from spillway_gateway.errors import EngineEnding, EngineFirstByteTimeout, EngineIdleTimeout, EngineWentDown
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.upstream.outbound import UpstreamServices


class ClientDisconnected(Exception):
    """The client closed its connection; there is no one to answer."""


class ClientStalled(ClientDisconnected):
    """The client read nothing for longer than the idle timeout."""


class RequestWaits:
    """Of one request; created in the task that serves it, and used on the event loop only.

    Set by that task as it proceeds: `engine` (the one that has the request), `sending` (a write to the client is not
    finished), `bytes_sent` (the client has a byte of the reply's body), `answered` (the client has all of it), and
    `deadline` (loop time by which the current wait must end).
    """

    __slots__ = (
        "_cause",
        "_fleet",
        "_loop",
        "_services",
        "_stream",
        "_task",
        "_timer",
        "abortable",
        "answered",
        "bytes_sent",
        "deadline",
        "disconnected",
        "engine",
        "sending",
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
        self.answered = False
        self.deadline = 0.0

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
        """The engine no longer answers polls. Aborts only where nothing was sent yet and another engine is ready."""
        if not self.bytes_sent and any(other.routable for other in self._fleet.engines.values() if other is not engine):
            self.abort(EngineWentDown(f"Engine {engine.name} stopped answering"))

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
        elif self.bytes_sent:
            self.abort(EngineIdleTimeout(f"Engine {name} sent nothing for {timeouts.idle_seconds:g} s"))
        else:
            seconds = timeouts.first_byte_seconds if self._stream else timeouts.plain_seconds
            self.abort(EngineFirstByteTimeout(f"Engine {name} sent no reply within {seconds:g} s"))
