"""A pool of keep-alive connections to engines, bounded in number and idle time. On the event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from spillway_gateway.errors import EngineConnectTimeout, EngineRefused, GatewayError
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.upstream.connection import EngineConnection, Reading

# Below uvicorn's 5 s keep-alive timeout, which vLLM uses: the gateway closes first, so that an engine rarely closes a
# connection that is just being reused.
IDLE_SECONDS_MAX = 4.0
# Loading the CA certificates takes about 20 ms. Changed ones are loaded within this time.
TLS_CONTEXT_SECONDS = 300.0

# A loop that starts hundreds of requests at once runs its timers late, and sees the other side's answers as late.
LATE_SECONDS = 0.05
EXTENSIONS_MAX = 3


class TooManyConnections(GatewayError):
    """connections_max connections are in use."""

    status = 503
    kind = "service_unavailable"
    code = "gateway_overloaded"
    retry_after_seconds = 1


class ConnectionPool:
    """Each connection taken or opened has to be released.

    connections_max: reads the bound of open connections to all engines together. connect_timeout_seconds: reads the
    bound of one connect.
    """

    reach_another = True

    def __init__(
        self,
        connections_max: Callable[[], int],
        connect_timeout_seconds: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._connections_max = connections_max
        self._connect_timeout_seconds = connect_timeout_seconds
        self._clock = clock
        self._idle: dict[Engine, deque[EngineConnection]] = {}  # by the object: a name may get another address
        self._in_use = 0
        self._reading = Reading()
        self._tls: asyncio.Task[ssl.SSLContext] | None = None
        self._tls_since = 0.0

    def unreachable(self, engines: Mapping[str, Engine]) -> frozenset[str]:
        return frozenset()

    def take_idle(self, engine: Engine) -> EngineConnection | None:
        """A connection from the pool, or None. Does not wait."""
        idle = self._idle.get(engine)
        while idle:
            connection = idle.pop()
            if connection.alive and self._clock() - connection.idle_since < IDLE_SECONDS_MAX:
                self._in_use += 1
                return connection
            connection.abort()
        return None

    async def open(self, engine: Engine) -> EngineConnection:
        """A new connection. Raises EngineRefused, EngineConnectTimeout or TooManyConnections."""
        if self._in_use >= (connections_max := self._connections_max()):
            raise TooManyConnections(
                f"limits.upstreamConnectionsMax: all {connections_max} connections to engines are in use"
            )
        self._in_use += 1
        try:
            return await self._connect(engine)
        except BaseException:
            self._in_use -= 1
            raise

    async def _connect(self, engine: Engine) -> EngineConnection:
        seconds = self._connect_timeout_seconds()
        try:
            async with _patient_timeout(seconds):
                context = await self._tls_context() if engine.tls else None
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(self._reading), engine.host, engine.port, ssl=context
                )
        except TimeoutError as error:
            raise EngineConnectTimeout(f"Engine {engine.name} accepted no connection within {seconds:g} s") from error
        except OSError as error:
            raise EngineRefused(f"Engine {engine.name} cannot be reached ({error.strerror or error})") from error
        return connection

    async def _tls_context(self) -> ssl.SSLContext:
        """Load the TLS context that all connections share, in a thread; connects that wait for it share the load."""
        now = self._clock()
        failed = self._tls is not None and self._tls.done() and (self._tls.cancelled() or self._tls.exception())
        if self._tls is None or failed or now - self._tls_since >= TLS_CONTEXT_SECONDS:
            self._tls = asyncio.create_task(asyncio.to_thread(ssl.create_default_context))
            self._tls_since = now
        return await asyncio.shield(self._tls)  # the end of one request must not cancel it for others

    def release(self, engine: Engine, connection: EngineConnection) -> None:
        """Keep the connection after an exchange if it can be reused, else close it."""
        self._in_use -= 1
        if connection.reusable:
            connection.idle_since = self._clock()
            self._idle.setdefault(engine, deque()).append(connection)
        else:
            connection.abort()

    def trim(self) -> None:
        """Close connections that have been idle for too long. Called every second."""
        now = self._clock()
        for engine, idle in list(self._idle.items()):
            while idle and (not idle[0].alive or now - idle[0].idle_since >= IDLE_SECONDS_MAX):
                idle.popleft().abort()
            if not idle:
                del self._idle[engine]

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()


def loop_was_late(now: float, deadline: float, extensions: int) -> bool:
    """Whether a timer ran late by the loop's own fault, and the full time should be granted again."""
    return now - deadline > LATE_SECONDS and extensions < EXTENSIONS_MAX


@asynccontextmanager
async def _patient_timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, extended if loop_was_late."""
    loop = asyncio.get_running_loop()
    extensions = 0
    timer: asyncio.TimerHandle

    def due(deadline: float) -> None:
        nonlocal timer, extensions
        now = loop.time()
        if loop_was_late(now, deadline, extensions):
            extensions += 1
            timer = loop.call_at(now + seconds, due, now + seconds)
        else:
            limit.reschedule(now)

    timer = loop.call_later(seconds, due, loop.time() + seconds)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        timer.cancel()
