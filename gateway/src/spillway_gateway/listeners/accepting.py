"""Accepts clients on the main and the endpoint picker's listener, in place of the event loops' own servers.

uvloop's server accepts one connection in each event loop iteration. While streams make iterations long, the last of a
thousand new clients waits for a thousand of them. asyncio's accepts all that wait in one. Here it is a bounded number.

With TLS a client counts from its accept on: one that never completes its handshake holds a connection like any other,
and the event loops' servers report a connection only after its handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from typing_extensions import override

from spillway_gateway.client.open_connections import Connection, OpenConnections

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
PAUSE_SECONDS = 1.0  # if the process has no free file descriptor

# Given what was admitted in the connection's place: its TLS handshake, or None.
NewConnection = Callable[[Connection | None], asyncio.Protocol]


class Listener:
    """Accepts on `listener` from start() to close()."""

    def __init__(self, listener: socket.socket, new_connection: NewConnection) -> None:
        self._listener = listener
        self._new_connection = new_connection
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._beginning: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """uvicorn waits for the connections itself."""

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.error("no connection can be accepted (%s); trying again in %g s", error.strerror, PAUSE_SECONDS)
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE_SECONDS, self.start)
                return
            accepted.setblocking(False)
            self._take(accepted, address[0])

    def _take(self, accepted: socket.socket, address: str) -> None:
        """Serve a client."""
        self._begin(self._serve(accepted))

    def _begin(self, serving: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(serving)
        self._beginning.add(task)  # else nothing holds it
        task.add_done_callback(self._beginning.discard)
        return task

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._new_connection(None), accepted)
        except (OSError, asyncio.CancelledError):
            accepted.close()


class TlsListener(Listener):
    """Counts a client before its handshake."""

    def __init__(
        self,
        listener: socket.socket,
        new_connection: NewConnection,
        context: ssl.SSLContext,
        open_connections: OpenConnections,
    ) -> None:
        super().__init__(listener, new_connection)
        self._context = context
        self._open = open_connections

    @override
    def _take(self, accepted: socket.socket, address: str) -> None:
        handshake = _Handshake()
        if self._open.admit(handshake, address):
            handshake.task = self._begin(self._handshake(handshake, accepted))
        else:
            accepted.close()

    async def _handshake(self, handshake: _Handshake, accepted: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._open.bounds.head_seconds):
                await self._first_bytes(accepted)
            await self._open.request_turns.wait()
            await self._loop.connect_accepted_socket(
                lambda: self._new_connection(handshake),
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._open.bounds.head_seconds,
            )
        except (OSError, asyncio.CancelledError):  # ssl.SSLError is an OSError
            accepted.close()
        finally:
            self._open.remove(handshake)

    async def _first_bytes(self, accepted: socket.socket) -> None:
        """A handshake computes a signature as soon as they are here; until then it takes no turn."""
        readable = asyncio.Event()
        self._loop.add_reader(accepted, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(accepted)


class _Handshake:
    """A connection until its handshake is complete."""

    task: asyncio.Task[None]

    def is_expired(self, now: float) -> bool:
        return False  # the handshake has a timeout of its own

    def expire(self, now: float) -> None:
        self.task.cancel()

    def evict(self) -> None:
        self.task.cancel()

    def stalled_since(self) -> float | None:
        return None
