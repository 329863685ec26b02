"""A client's connection: a bounded one, with what ASGI does not offer.

A reply's head is sent with the first bytes of its body, in one packet. A disconnect calls back, while ASGI needs a task
that waits for it: with a thousand streams that is a thousand tasks. A whole reply is one write, without messages. A
draining gateway closes each connection with its next reply.

What ends leaves no cycle of references: a request is some fifty objects, and with thousands of clients that leave, the
garbage collector would look for those of all of them in one go.

Subclasses uvicorn's protocol and uses its request cycle, which are no public API of uvicorn: the names used are listed
in tests/client/test_uvicorn_contract.py, and pyproject.toml bounds the version.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar, cast

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from spillway_gateway.client.bounded_connection import BoundedConnection, BoundedState
from spillway_gateway.client.cors import Cors
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.write_coalescing import WriteCoalescer

EXTENSION = "spillway.client"


class DrainingState(BoundedState):
    """A server's state, with the lifecycle and the CORS policy that its connections read."""

    def __init__(self, lifecycle: Lifecycle, open_connections: OpenConnections, cors: Cors) -> None:
        super().__init__(open_connections)
        self.lifecycle = lifecycle
        self.cors = cors


class ClientConnection(BoundedConnection):
    """Puts a ClientRequest into each request's scope, as extension EXTENSION. Its server's state is a DrainingState."""

    _on_disconnect: Callable[[], None] | None = None
    _served: RequestResponseCycle | None = None  # the request that runs, or ran last; `cycle` may be one behind it

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, HeadWithBody(transport, self.linger)))

    @override
    def ended(self, exc: Exception | None) -> None:
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
        super().ended(exc)
        self.report_disconnect()
        cast(HeadWithBody, self.transport).forget_connection()
        # A request that still runs holds its own.
        self.cycle = self._served = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    @override
    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:  # the head is parsed once more, without its Upgrade
            return
        # The request's task has not begun, and the next request may arrive before this one is answered.
        cast(MutableMapping[str, Any], self.scope)["extensions"] = {EXTENSION: ClientRequest(self, self.cycle)}
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unchunked(self.cycle).send  # type: ignore[method-assign]
        state = cast(DrainingState, self.server_state)
        if cors_headers := state.cors.answer_headers(self.headers):
            self.cycle.default_headers = [*self.cycle.default_headers, *cors_headers]
        if state.lifecycle.draining:
            self.end_with_next_reply()

    @override
    def refusal_headers(self) -> list[tuple[bytes, bytes]]:
        return cast(DrainingState, self.server_state).cors.refusal_headers(self.headers or [])

    def end_with_next_reply(self) -> None:
        """Send `connection: close` with the reply, unless it has begun."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def set_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._on_disconnect = callback

    def clear_disconnect_callback(self, callback: Callable[[], None]) -> None:
        if self._on_disconnect == callback:  # else the next request on this connection has set its own
            self._on_disconnect = None

    def report_disconnect(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()


class _Unchunked:
    """Sends the replies of a request cycle to a client of HTTP/1.0, which knows no chunks: the end of the connection is
    the end of a reply without length."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle_of_task = weakref.ref(cycle)  # which holds this as its send()
        self._unsized = False

    async def send(self, message: Any) -> None:
        cycle = self._cycle_of_task()
        assert cycle is not None  # the request's task holds it while it runs
        if message["type"] == "http.response.start":
            self._unsized = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._unsized:
                cycle.chunked_encoding = False
        elif self._unsized and cycle.scope["method"] != "HEAD":
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)


class ClientRequest:
    """One request on its connection. Used on the event loop, by the task that serves the request, which holds the
    request's cycle."""

    __slots__ = ("_connection", "_cycle_of_task")
    engine_connections: ClassVar[None] = None

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle_of_task = weakref.ref(cycle)

    @property
    def _cycle(self) -> RequestResponseCycle:
        cycle = self._cycle_of_task()
        assert cycle is not None  # the request's task holds it while it runs
        return cycle

    def take_whole_body(self) -> bytes | bytearray | None:
        """The body, as it arrived. None if it is not complete, or the client disconnected."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = cycle.body, bytearray()
        return body

    def expect_body(self, seconds: float) -> None:
        """Bound the wait for the rest of the body; see BoundedConnection.expect_body."""
        self._connection.expect_body(seconds)

    @property
    def body_timed_out(self) -> bool:
        return self._connection.body_timed_out

    def check_body_budget(self, body_bytes: int) -> None:
        """Raises BodyBudgetSpent if a body of that size would exceed the budget now."""
        self._connection.open_connections.body_budget.check(body_bytes, body_bytes)

    def reserve_body_bytes(self, more_bytes: int) -> None:
        """Reserve bytes until the request ends. Raises BodyBudgetSpent."""
        self._connection.reserve_body_bytes(more_bytes)

    def release_body_bytes(self) -> None:
        self._connection.release_body_bytes()

    def forget_given_body(self) -> None:
        """The engine gets another one. Nothing keeps it here."""

    def end_with_reply(self) -> None:
        """Send `connection: close` with the reply, unless it has begun."""
        cycle = self._cycle
        cycle.keep_alive = cycle.keep_alive and cycle.response_started

    def take_reply_bytes(self, more_bytes: int) -> bool:
        """Count bytes of a reply that is collected, until give_reply_bytes(). False if there is no room for them."""
        return self._connection.open_connections.reply_budget.take(more_bytes)

    def give_reply_bytes(self, taken_bytes: int) -> None:
        self._connection.open_connections.reply_budget.hold(-taken_bytes)

    def set_disconnect_callback(self, callback: Callable[[], None]) -> None:
        """Call back in the event loop iteration in which the connection is lost, or in the next one if it is lost
        already. It stays until clear_disconnect_callback()."""
        connection = self._connection
        connection.set_disconnect_callback(callback)
        if self._cycle.disconnected or connection.transport.is_closing():
            asyncio.get_running_loop().call_soon(connection.report_disconnect)
        else:
            connection.flow.resume_reading()  # a long body may have paused it, and EOF would not be read

    def clear_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._connection.clear_disconnect_callback(callback)

    @property
    def writable(self) -> bool:
        """Whether bytes that are sent now are written without waiting: the client is there, reads, and lacks the end of
        its reply."""
        connection, cycle = self._connection, self._cycle
        gone = cycle.disconnected or cycle.response_complete or connection.transport.is_closing()
        return not gone and not connection.flow.write_paused

    def reply(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole reply in one write. headers: names in lower case, values without line breaks; content-length is
        added if it is missing.

        False if nothing was written and the caller has to send messages: a reply has begun, the client still reads
        the one before, or the method is HEAD."""
        connection, cycle = self._connection, self._cycle
        if connection.flow.write_paused or cycle.response_started or cycle.scope["method"] == "HEAD":
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        given = [*cycle.default_headers, *headers]
        lines = [STATUS_LINE[status][:-2], *map(b": ".join, given)]
        if status not in (204, 304) and b"content-length" not in dict(given):
            lines.append(b"content-length: %d" % len(body))
        if not cycle.keep_alive:
            lines.append(b"connection: close")
        lines += (b"", body)
        connection.transport.write(b"\r\n".join(lines))
        cycle.message_event.set()
        if not cycle.keep_alive:
            connection.transport.close()
        cycle.on_response()
        return True


class HeadWithBody:
    """A transport that holds the head of a reply until the next write or the end of the event loop iteration. If
    several requests share the iteration, it holds the body too (write_coalescing.py).

    linger: asked by close() whether the connection stays to be read; a second close() ends it.
    """

    __slots__ = ("_closed", "_coalescer", "_held", "_linger", "_transport")

    def __init__(
        self, transport: asyncio.Transport, linger: Callable[[asyncio.Transport], bool] = lambda transport: False
    ) -> None:
        self._transport = transport
        self._linger = linger
        self._closed = False
        self._coalescer = WriteCoalescer.of_running_loop()
        self._held: list[bytes] = []

    # The transport's bound methods are not kept: the garbage collector would look at six more objects of each
    # connection.

    def abort(self) -> None:
        self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def forget_connection(self) -> None:
        """Forget the connection, which is lost."""
        self._linger = lambda transport: False

    def write(self, data: bytes) -> None:
        coalescer = self._coalescer
        if self._held:
            self._held.append(data)
            if not coalescer.active:
                self._flush()
        elif coalescer.active or (data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 ")):
            self._held.append(data)
            coalescer.defer(self._flush)
        elif not self._transport.is_closing():  # the turn of its end may not have come, and uvloop raises
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._closed = True
        if not self._linger(self._transport):
            self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            if not self._transport.is_closing():
                self._transport.write(data)
