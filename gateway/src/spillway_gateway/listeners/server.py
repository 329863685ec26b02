"""Runs the gateway under uvicorn, with a shutdown that loses no stream.

SIGTERM: /ready turns 503 and new requests are served for the drain delay. Then the listening socket closes, running
streams get the drain timeout, and those still open end with an error event. A second signal ends them at once.

Idle keep-alive connections are not closed at once, since their clients may be sending at that moment: from SIGTERM on
every reply has `connection: close`, and a connection that stays idle is closed some seconds after the last request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn

from spillway_gateway.app import Gateway
from spillway_gateway.background import supervised
from spillway_gateway.client.connection import ClientConnection, DrainingState
from spillway_gateway.client.open_connections import Connection
from spillway_gateway.config.certificate import Certificate
from spillway_gateway.listeners.accepting import Listener, NewConnection, TlsListener
from spillway_gateway.ops.server import OperationsServer

if TYPE_CHECKING:
    from spillway_gateway.picker.server import Picker

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 4096
UNSENT_BYTES = 128 * 1024  # of a reply, in the kernel
AFTER_DRAIN_SECONDS = 5.0  # to send the last error events
POLL_SECONDS = 0.05
KEEP_ALIVE_SECONDS = 3.0  # for idle clients to send once more and get `connection: close`


class PortInUse(Exception):
    """The listening address is in use; the message names it, and what to change."""


def bind(host: str, port: int, setting: str = "listen.port") -> socket.socket:
    """A non-blocking socket that listens. Raises PortInUse if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _set_for_replies(listener)
    try:
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"listen: cannot listen on {host}:{port} ({error.strerror}); stop what uses it or change {setting}"
        ) from error
    listener.setblocking(False)
    return listener


def reserve(host: str, port: int, setting: str = "listen.port") -> socket.socket:
    """A socket that keeps the address for bind_shared(), of this user's processes, and takes no connections. Raises
    PortInUse if another process listens there, even one that would share it."""
    with bind(host, port, setting) as alone:
        port = alone.getsockname()[1]
    return _shared(host, port, setting)


def bind_shared(host: str, port: int, setting: str = "listen.port") -> socket.socket:
    """A non-blocking socket that listens beside those of other processes: the kernel spreads connections over them.
    Raises PortInUse."""
    listener = _shared(host, port, setting)
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def _set_for_replies(listener: socket.socket) -> None:
    """Set what connections that this socket accepts have from their start.

    Each event of a stream leaves at once: asyncio's own loop, which serves if uvloop is not installed, sets that for
    sockets of its own alone, and the kernel would hold a second event until the client has acknowledged the first, for
    40 ms. What the kernel takes of a reply is bounded: it takes megabytes of each one that a client does not read
    otherwise, which count in a pod's memory and in no budget of the gateway.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _shared(host: str, port: int, setting: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _set_for_replies(listener)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"listen: cannot share {host}:{port} ({error.strerror}); stop what uses it or change {setting}"
        ) from error
    return listener


class GatewayServer(uvicorn.Server):
    """uvicorn's server with the gateway's shutdown. Raises ConfigError for an unusable certificate.

    Args:
        gateway: what it serves.
        ops_listener: the listener of operators' routes, if they have one.
        picker_listener: the listener for proxies that ask the endpoint picker, if any do.
        on_listening: called once it accepts connections.
        on_signal: called for SIGTERM and SIGINT; None: begin_shutdown().
    """

    def __init__(
        self,
        gateway: Gateway,
        ops_listener: socket.socket | None = None,
        picker_listener: socket.socket | None = None,
        *,
        on_listening: Callable[[], None] = lambda: None,
        on_signal: Callable[[], None] | None = None,
    ) -> None:
        shutdown = gateway.config.shutdown
        tls = gateway.config.listen.tls
        self.certificate = Certificate(tls) if tls is not None else None
        self._certificates = [self.certificate] if self.certificate is not None else []
        self._picker_listener = picker_listener
        self._picker_certificate: Certificate | None = None
        self._picker: Picker | None = None
        if picker_listener is not None:
            from spillway_gateway.picker.server import Picker  # noqa: PLC0415 - needed only here

            self._picker = Picker(
                gateway.app,
                gateway.open_connections,
                gateway.lifecycle,
                gateway.operations.was_ready,
                lambda: gateway.live.limits.body_bytes_max,
            )
            if tls is not None:
                self._picker_certificate = Certificate(tls, "h2")
                self._certificates.append(self._picker_certificate)
        self._operations = (
            OperationsServer(gateway.ops_app, gateway.operations, ops_listener, gateway.config.connections)
            if ops_listener is not None
            else None
        )
        super().__init__(
            uvicorn.Config(
                gateway.app,
                http=ClientConnection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(shutdown.drain_timeout_seconds + AFTER_DRAIN_SECONDS + KEEP_ALIVE_SECONDS)
                + 1,
            )
        )
        self.server_state: DrainingState = DrainingState(gateway.lifecycle, gateway.open_connections, gateway.cors)
        self._gateway = gateway
        self._on_listening = on_listening
        self._on_signal = on_signal or self.begin_shutdown
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.config.loaded:
            self.config.load()
        following = [asyncio.create_task(supervised(each.follow, "certificate")) for each in self._certificates]
        if self._operations is not None:
            self._operations.start()
        try:
            await super().serve(sockets)
        finally:
            for task in following:
                task.cancel()
            if self._operations is not None:
                await self._operations.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])

        def new_connection(admitted_as: Connection | None) -> ClientConnection:
            made = ClientConnection(self.config, self.server_state, self.lifespan.state)
            made.admitted_as = admitted_as
            return made

        for listener in sockets or []:
            self._accept(listener, new_connection, self.certificate)
        if self._picker is not None and self._picker_listener is not None:
            self._accept(self._picker_listener, self._picker.connection, self._picker_certificate)
        if self.started:
            self._on_listening()

    def _accept(self, listener: socket.socket, new_connection: NewConnection, certificate: Certificate | None) -> None:
        accepting = (
            Listener(listener, new_connection)
            if certificate is None
            else TlsListener(listener, new_connection, certificate.context, self.server_state.open_connections)
        )
        accepting.start()
        self.servers.append(cast(asyncio.Server, accepting))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._picker is not None:
            await self._picker.close()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        self.server_state.open_connections.tick(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install handlers in place of uvicorn's, which close the listening socket at the first signal."""
        assert self._loop is not None
        signals = (signal.SIGTERM, signal.SIGINT)
        try:
            for number in signals:
                self._loop.add_signal_handler(number, self._on_signal)
            if self._gateway.follower is not None:
                self._loop.add_signal_handler(signal.SIGHUP, self._gateway.follower.read_soon)
        except (ValueError, RuntimeError):  # not the main thread: the caller ends the server
            yield
            return
        try:
            yield
        finally:
            for number in (*signals, signal.SIGHUP):
                self._loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()

    def begin_shutdown(self) -> None:
        """Drain at the first call, and end now at the second."""
        if self._drain is None:
            self.drain()
        else:
            self.end_now()

    def drain(self) -> None:
        """Serve what runs to its end, if that has not begun. May be called more than once."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_and_exit())

    def end_now(self) -> None:
        """End without waiting for running requests."""
        self.drain()
        self._gateway.lifecycle.close()
        self.should_exit = True

    async def _drain_and_exit(self) -> None:
        shutdown = self._gateway.config.shutdown
        self._gateway.lifecycle.drain()
        for connection in self.server_state.connections:
            cast(ClientConnection, connection).end_with_next_reply()
        logger.info(
            "shutting down: %d requests running, listening for %g s more, then up to %g s for them to finish",
            len(self._gateway.lifecycle.running),
            shutdown.drain_delay_seconds,
            shutdown.drain_timeout_seconds,
        )
        await asyncio.sleep(shutdown.drain_delay_seconds)
        for server in self.servers:
            server.close()  # no new connections
        if await self._gateway.lifecycle.wait_idle(shutdown.drain_timeout_seconds):
            await self._wait_for_idle_connections()
        else:
            logger.warning("drain timeout: ending %d requests", len(self._gateway.lifecycle.running))
        self.should_exit = True
        self._gateway.lifecycle.close()

    async def _wait_for_idle_connections(self) -> None:
        """Wait until every client has got `connection: close`, for at most KEEP_ALIVE_SECONDS."""
        for _ in range(int(KEEP_ALIVE_SECONDS / POLL_SECONDS)):
            if not self.server_state.connections:
                return
            await asyncio.sleep(POLL_SECONDS)  # uvicorn has no event for it
