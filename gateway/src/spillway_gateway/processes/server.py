"""The router process: the gateway without clients, and the fronts that serve them.

SIGTERM: /ready turns 503, the fronts drain as a single process does, and this one ends after the last of them. A second
signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msgspec import structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from spillway_gateway.api.application import http_error
from spillway_gateway.app import Gateway
from spillway_gateway.background import supervised
from spillway_gateway.config.certificate import Certificate
from spillway_gateway.config.settings import GatewayConfig
from spillway_gateway.listeners.server import AFTER_DRAIN_SECONDS, KEEP_ALIVE_SECONDS
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.ops.server import OperationsServer
from spillway_gateway.ops.serving import Processes
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import HANDLED_PER_ITERATION
from spillway_gateway.processes.counts import SummedCounts
from spillway_gateway.processes.front_session import FrontSession
from spillway_gateway.processes.fronts import Fronts, Spawn, spawn
from spillway_gateway.processes.messages import Message
from spillway_gateway.processes.state_publisher import StatePublisher
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.local_router import LocalRouter
from spillway_gateway.upstream.suspects import Fingerprint
from spillway_settings.typed import settings_json

logger = logging.getLogger(__name__)

END_SECONDS_MAX = 5.0  # beyond what a drain may take


def front_config(config: GatewayConfig) -> bytes:
    """The configuration of one front, as JSON. Bounds of connections, memory and retries are divided, so that all
    fronts together keep within them; what tenants and engines are allowed is counted by the router alone, so fronts do
    not know what shares the limits of replicas."""
    fronts = config.processes
    connections, limits, continuation = config.connections, config.limits, config.continuation

    def share(whole: int) -> int:
        return math.ceil(whole / fronts)

    divided = structs.replace(
        config,
        auth=structs.replace(config.auth, shared_limits=None),
        connections=structs.replace(
            connections,
            open_max=share(connections.open_max),
            per_address_max=share(connections.per_address_max),
        ),
        limits=structs.replace(
            limits,
            bodies_bytes_max=share(limits.bodies_bytes_max),
            replies_bytes_max=share(limits.replies_bytes_max),
            upstream_connections_max=share(limits.upstream_connections_max),
            retry_burst=share(limits.retry_burst),
        ),
        continuation=structs.replace(continuation, bytes_max=share(continuation.bytes_max)),
    )
    return settings_json(divided)


class ServingFronts:
    """ops.serving.Serving: the fronts. metrics: the router process's own."""

    def __init__(self, fronts: Fronts, metrics: GatewayMetrics) -> None:
        self._fronts = fronts
        self._summed = SummedCounts(metrics.registry, fronts.counts)
        fronts.hand_counts_to(self._summed.ended)
        metrics.on_removed.append(self._summed.forget_engine)

    def processes(self) -> Processes:
        return Processes(self._fronts.listening, self._fronts.restarts_total)

    def not_serving(self) -> str | None:
        return None if self._fronts.listening else "no process accepts connections yet"

    async def exposition(self) -> bytes:
        await self._fronts.count()
        return self._summed.exposition()


class RouterServer:
    """The process of the router, from its start to its end. Raises ConfigError for a configuration that cannot be used.

    Args:
        config: the configuration at the start.
        config_path: the file to follow, if any.
        listener: reserved for the fronts.
        ops_listener: the listener of operators' routes, if they have one.
        picker_listener: reserved for the fronts, if proxies ask the endpoint picker.
        spawn: starts a front.
    """

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None,
        listener: socket.socket,
        ops_listener: socket.socket | None = None,
        picker_listener: socket.socket | None = None,
        *,
        spawn: Spawn = spawn,
    ) -> None:
        if config.listen.tls is not None:
            Certificate(config.listen.tls)  # each front loads it; one that cannot be used is refused here
        self.fronts = Fronts(config.processes, self._new_session, self._first_messages, spawn)
        gateway = self.gateway = Gateway(config, config_path, serving=partial(ServingFronts, self.fronts))
        assert isinstance(gateway.router, LocalRouter)
        self._router = gateway.router
        self._turns = Turns(HANDLED_PER_ITERATION)
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = host, port
        self._picker_port: int | None = picker_listener.getsockname()[1] if picker_listener is not None else None
        self._operators = Starlette(
            routes=[
                *gateway.operations.operator_routes(require_key=True),
                *gateway.page.routes(require_key=True),
            ],
            exception_handlers={HTTPException: http_error},
        )
        self.publisher = StatePublisher(gateway.roster, gateway.engines, self.fronts.tell)
        gateway.on_applied.append(self._applied)
        gateway.suspects.announce(lambda *suspect: self.fronts.tell(_suspected(*suspect)))
        self._ops = (
            OperationsServer(gateway.ops_app, gateway.operations, ops_listener, config.connections)
            if ops_listener is not None
            else None
        )
        self._signals = 0
        self._first_signal = asyncio.Event()
        self.started = False

    def _new_session(self, on_listening: Callable[[], None], on_closed: Callable[[FrontSession], None]) -> FrontSession:
        return FrontSession(
            self.gateway,
            self._router,
            self.publisher,
            self._operators,
            self._turns,
            on_listening=on_listening,
            on_closed=on_closed,
        )

    def _first_messages(self) -> Iterator[Message]:
        yield messages.Start(front_config(self.gateway.config), *self.address, self._picker_port)
        yield from self.publisher.everything()
        for suspect in self.gateway.suspects.all():
            yield _suspected(*suspect)

    def _applied(self, config: GatewayConfig) -> None:
        self.publisher.publish_changes()
        self.fronts.tell(messages.Configure(front_config(config)))

    async def serve(self) -> None:
        """Serve until the fronts have ended after a signal, or could not be started: `started` is then False."""
        loop = asyncio.get_running_loop()
        async with self.gateway.running():
            if self._ops is not None:
                self._ops.start()
            following = asyncio.create_task(supervised(self.publisher.follow, "state of engines for other processes"))
            with self._signal_handlers(loop):
                try:
                    self.fronts.start()
                    await self._until_signal_or_failure()
                    if not self.fronts.failed.is_set():
                        self.started = True
                        await self._drain()
                finally:
                    await self.fronts.kill()
                    following.cancel()
                    if self._ops is not None:
                        await self._ops.stop()

    async def _until_signal_or_failure(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._first_signal, self.fronts.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    @contextlib.contextmanager
    def _signal_handlers(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        numbers = [signal.SIGTERM, signal.SIGINT]
        for number in numbers:
            loop.add_signal_handler(number, self.begin_shutdown)
        if self.gateway.follower is not None:
            numbers.append(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self.gateway.follower.read_soon)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def begin_shutdown(self) -> None:
        """Drain at the first call, and end now at the second."""
        self._signals += 1
        self.gateway.lifecycle.drain()
        self._first_signal.set()
        if self._signals > 1:
            self.fronts.drain(now=True)

    async def _drain(self) -> None:
        shutdown = self.gateway.config.shutdown
        logger.info(
            "shutting down: listening for %g s more, then up to %g s for requests to finish",
            shutdown.drain_delay_seconds,
            shutdown.drain_timeout_seconds,
        )
        self.fronts.drain(now=False)
        seconds = shutdown.drain_delay_seconds + shutdown.drain_timeout_seconds
        seconds += AFTER_DRAIN_SECONDS + KEEP_ALIVE_SECONDS + END_SECONDS_MAX
        try:
            async with asyncio.timeout(seconds):
                await self.fronts.ended()
        except TimeoutError:
            logger.error("processes that did not end within %g s are killed", seconds)


def _suspected(fingerprint: Fingerprint, until: float) -> messages.Suspected:
    return messages.Suspected(*fingerprint, until)
