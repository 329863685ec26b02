"""One engine on the event loop: advances its model's time, passes tokens on, publishes events, applies faults."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import zmq.asyncio

from spillway_simulator.errors import SimulatorError
from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.request import EngineRequest, Progress
from spillway_simulator.model.tiers import SharedTier
from spillway_simulator.server.faults import (
    DRAINING,
    Clear,
    DieInStream,
    Drain,
    DropEvents,
    Fault,
    FaultState,
    Hang,
    Kill,
    NotReady,
    Refuse,
    ResetPrefixCache,
    Restart,
    Slow,
)
from spillway_simulator.server.http_connection import HttpConnection
from spillway_simulator.settings import Settings
from spillway_simulator.wire.event_publisher import EventPublisher
from spillway_simulator.wire.kv_event_encoding import encode_batch

logger = logging.getLogger(__name__)


class Reply(Protocol):
    """The receiver of a request's tokens."""

    def progressed(self, progress: Progress) -> None: ...
    def drained(self) -> None:
        """The engine had no time left for it."""


class CannotNow(SimulatorError):
    """A fault that does not fit the engine's state."""


class VirtualClock:
    """Virtual time from the event loop's clock: `speed` virtual seconds pass per real second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speed: float) -> None:
        self._loop = loop
        self._speed = speed
        self._start = loop.time()

    def now(self) -> float:
        return (self._loop.time() - self._start) * self._speed

    def real_time(self, virtual: float) -> float:
        """The loop's time at a virtual time."""
        return self._start + virtual / self._speed

    def real_seconds(self, virtual_seconds: float) -> float:
        return virtual_seconds / self._speed


class EngineHost:
    """connect: makes the protocol of a connection to this engine."""

    def __init__(
        self,
        position: int,
        settings: Settings,
        *,
        shared: SharedTier | None,
        clock: VirtualClock,
        context: zmq.asyncio.Context,
        connect: Callable[[EngineHost], asyncio.Protocol],
    ) -> None:
        self.name = f"engine-{position}"
        self.settings = settings
        self.shared = shared
        self.model = SimulatedEngine(self.name, settings.shape, settings.engine_rates, shared)
        self.faults = FaultState()
        self.connections: set[HttpConnection] = set()
        self.port = settings.port + position if settings.port else 0
        self.lag_seconds = 0.0
        self.publisher: EventPublisher | None = None
        self._ports = (
            settings.kv_events_port + position if settings.kv_events_port else 0,
            settings.kv_replay_port + position if settings.kv_replay_port else 0,
        )
        self._clock = clock
        self._context = context
        self._connect = connect
        self._replies: dict[str, Reply] = {}
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._revival: asyncio.TimerHandle | None = None
        self._drain_end: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{self.settings.host}:{self.port}"

    @property
    def up(self) -> bool:
        return self._server is not None

    def virtual_seconds(self) -> float:
        return self._clock.now()

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken."""
        await self._open_events()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._connect(self), self.settings.host, self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _open_events(self) -> None:
        if not self.settings.kv_events:
            return
        if self.publisher is None:
            settings = self.settings
            form, batches = settings.event_form, settings.replay_batches
            self.publisher = EventPublisher(self._context, settings.host, self._ports, form, batches)
        else:
            await self.publisher.restart()
        self._publish()  # from which stores it loads, as engines with Spillway's connector say before their first step

    def stop(self) -> None:
        """The process dies: connections break, the port refuses, requests and caches are gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._stop_timers()
        self._replies.clear()
        for connection in list(self.connections):
            connection.kill()
        self.model.restart()

    def close(self) -> None:
        """Close the engine for good."""
        self.stop()
        for task in self._tasks:
            task.cancel()
        if self.publisher is not None:
            self.publisher.close()

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._revival, self._drain_end):
            if timer is not None:
                timer.cancel()
        self._timer = self._revival = self._drain_end = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, reply: Reply) -> None:
        """Raises RequestTooLong."""
        self.model.submit(request, self._clock.now())
        self._replies[request.id] = reply
        self._set_timer()

    def cancel(self, request_id: str) -> None:
        if self._replies.pop(request_id, None) is not None:
            self.model.cancel(request_id, self._clock.now())
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.model.next_time
        if due is not None and not self.faults.hanging:
            self._timer = asyncio.get_running_loop().call_at(self._clock.real_time(due), self._tick)

    def _tick(self) -> None:
        self._timer = None
        due = self.model.next_time
        if due is not None:
            # Due work is done at its own times, not at the present: a busy process delays answers, never the model.
            self.lag_seconds = max(0.0, self._clock.real_seconds(self._clock.now() - due))
            progress = self.model.advance(due)
            self._publish()
            for item in progress:
                self._hand_out(item)
        self._set_timer()

    def _hand_out(self, item: Progress) -> None:
        reply = self._replies.pop(item.request_id, None) if item.finished else self._replies.get(item.request_id)
        if reply is not None:
            reply.progressed(item)

    def _publish(self) -> None:
        events = self.model.take_events()
        if events and self.publisher is not None:
            block_tokens = self.settings.block_tokens
            self.publisher.publish(encode_batch(time.time(), events, block_tokens, self.settings.event_form))

    # -- faults ------------------------------------------------------------------------------------------------------

    def apply(self, fault: Fault) -> None:
        """Raises CannotNow."""
        faults = self.faults
        if isinstance(fault, Kill):
            self.stop()
            if fault.down_seconds is not None:
                loop = asyncio.get_running_loop()
                self._revival = loop.call_later(fault.down_seconds, self._revive)
        elif isinstance(fault, Restart):
            self.stop()
            self._revive()
        elif isinstance(fault, Hang):
            faults.hanging = True
            self._set_timer()
        elif isinstance(fault, Slow):
            self.model.slowdown = fault.factor
        elif isinstance(fault, Refuse):
            faults.refuse, faults.refusals_left = fault, fault.requests
        elif isinstance(fault, NotReady):
            faults.not_ready = fault.reason
        elif isinstance(fault, Drain):
            faults.not_ready, faults.refuse, faults.refusals_left = DRAINING, Refuse(503), None
            loop = asyncio.get_running_loop()
            self._drain_end = loop.call_later(fault.timeout_seconds, self._end_drain)
        elif isinstance(fault, DropEvents):
            if self.publisher is None:
                raise CannotNow(f"{self.name} publishes no events; set kvEvents: true")
            self.publisher.drop(fault.batches, replayable=fault.replayable)
        elif isinstance(fault, DieInStream):
            faults.die, faults.deaths_left = fault, fault.requests
        elif isinstance(fault, ResetPrefixCache):
            if not self.model.reset_prefix_cache():
                raise CannotNow(f"{self.name} has running requests; reset its prefix cache when it is idle")
            self._publish()
        else:
            self._clear(fault)

    def _end_drain(self) -> None:
        self._drain_end = None
        for request_id, reply in list(self._replies.items()):
            self.cancel(request_id)
            reply.drained()

    def _clear(self, _: Clear) -> None:
        if self._drain_end is not None:
            self._drain_end.cancel()
            self._drain_end = None
        was_hanging = self.faults.hanging
        self.faults = FaultState()
        self.model.slowdown = 1.0
        if not self.up:
            self._revive()
        elif was_hanging:
            for connection in list(self.connections):
                connection.kill()  # what was asked meanwhile was never read; its callers have gone or will retry
            self._set_timer()

    def _revive(self) -> None:
        self._revival = None
        if not self.up and not self._tasks:
            task = asyncio.get_running_loop().create_task(self.start())
            self._tasks.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s cannot start again: %s", self.name, task.exception())
