"""A client's connection: a bounded one, with what ASGI has no words for.

A reply's head leaves together with the first bytes of its body, in one packet. Who serves a request may be called when
the client goes, instead of keeping a task that waits for it: with a thousand streams that is a thousand tasks. A reply
that is whole needs no messages. And a gateway that drains ends each connection with its next reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from spillway_gateway.client.bounded_connection import BoundedConnection, BoundedState
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.write_coalescing import TurnWrites

EXTENSION = "spillway.client"


class DrainingState(BoundedState):
    """The state of a server, with what its connections have to know besides."""

    def __init__(self, lifecycle: Lifecycle, open_connections: OpenConnections) -> None:
        super().__init__(open_connections)
        self.lifecycle = lifecycle


class ClientConnection(BoundedConnection):
    """Puts a ClientRequest into each request's scope, as extension EXTENSION. Its server's state is a DrainingState."""

    _left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, HeadWithBody(transport)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:  # the head comes again, without the request for another protocol
            return
        # Its task has not begun; and the next request may arrive on this connection before this one is answered.
        cast(MutableMapping[str, Any], self.scope)["extensions"] = {EXTENSION: ClientRequest(self, self.cycle)}
        if cast(DrainingState, self.server_state).lifecycle.draining:
            self.end_with_next_reply()

    def end_with_next_reply(self) -> None:
        """The reply says so, unless it has begun."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def call_when_left(self, left: Callable[[], None]) -> None:
        self._left = left

    def forget(self, left: Callable[[], None]) -> None:
        if self._left == left:  # else the next request on this connection has set its own
            self._left = None

    def tell_late(self) -> None:
        if self._left is not None:
            self._left()


class ClientRequest:
    """One request on its connection."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: ClientConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def take_whole_body(self) -> bytes | None:
        """As one ASGI message would hold it; None where it has not arrived yet, or the client left."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = cycle.body, bytearray()
        return bytes(body)

    def expect_body(self, seconds: float) -> None:
        """The rest of the body is waited for; see BoundedConnection.expect_body."""
        self._connection.expect_body(seconds)

    @property
    def body_is_late(self) -> bool:
        return self._connection.body_is_late

    def require_body_room(self, body_bytes: int, bytes_max: int) -> None:
        """Raises NoBodyRoom where a body of that size would find none now."""
        self._connection.open_connections.body_room.require(body_bytes, body_bytes, bytes_max)

    def take_body_room(self, more_bytes: int, bytes_max: int) -> None:
        """Until the request is over. Raises NoBodyRoom."""
        self._connection.take_body_room(more_bytes, bytes_max)

    def leave_body_room(self) -> None:
        self._connection.leave_body_room()

    def call_when_left(self, left: Callable[[], None]) -> None:
        """left: called in the same turn of the loop in which the connection is lost; soon, if it is lost already.
        Until forget()."""
        connection = self._connection
        connection.call_when_left(left)
        if self._cycle.disconnected or connection.transport.is_closing():
            asyncio.get_running_loop().call_soon(connection.tell_late)
        else:
            connection.flow.resume_reading()  # a long body may have paused it, and the end would not be read

    def forget(self, left: Callable[[], None]) -> None:
        self._connection.forget(left)

    def reply(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """A whole reply in one write. False where it cannot be that, and nothing was written: a reply has begun, the
        client is slow to take the one before, or it asked for a head alone. headers: names in lower case, no line
        breaks; content-length is set where it is missing."""
        connection, cycle = self._connection, self._cycle
        if connection.flow.write_paused or cycle.response_started or cycle.scope["method"] == "HEAD":
            return False
        if cycle.disconnected:
            return True
        cycle.response_started = cycle.response_complete = True
        lines = [STATUS_LINE[status]]
        sized = status in (204, 304)
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
            sized = sized or name == b"content-length"
        if not sized:
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        lines.append(body)
        connection.transport.write(b"".join(lines))
        cycle.message_event.set()
        if not cycle.keep_alive:
            connection.transport.close()
        cycle.on_response()
        return True


class HeadWithBody:
    """A transport that holds back the head of a reply until the next write, or to the end of the loop's turn, and what
    follows to the end of the turn too where other requests share it (write_coalescing.py)."""

    __slots__ = ("_held", "_transport", "_turn", "abort", "get_extra_info", "get_write_buffer_size", "is_closing",
                 "pause_reading", "resume_reading", "set_protocol")  # fmt: skip

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._turn = TurnWrites.here()
        self._held: list[bytes] = []
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_protocol = transport.set_protocol

    def write(self, data: bytes) -> None:
        turn = self._turn
        if self._held:
            self._held.append(data)
            if not turn.shared:
                self._flush()
        elif turn.shared or (data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 ")):
            self._held.append(data)
            turn.at_end(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            if not self._transport.is_closing():
                self._transport.write(data)
