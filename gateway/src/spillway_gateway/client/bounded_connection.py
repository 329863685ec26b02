"""A server's connection with bounds. uvicorn's own takes a head of any size and waits for its end without a timeout.

What a client sends is bounded before it is authenticated: the bytes and number of a request's headers, its target, the
framing of a chunked body, and pipelined requests. Times are bounded by OpenConnections.tick(): from the accept or a
request's first byte to a whole head, between two requests, and while the client reads no byte of a reply.

Many clients send all of a request before they read. A socket that is closed with unread bytes is reset, and
the client never sees the answer that refused it. So what it still sends is read and dropped, within bounds.

A request with `Upgrade` is served as HTTP/1.1, as RFC 9110 (7.8) allows: Java's HttpClient asks for h2c with its first
request on plain HTTP. The parser takes no body after such a head, so it is fed the head once more without `Upgrade`.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from spillway_gateway.client.open_connections import Connection, OpenConnections
from spillway_gateway.client.reply_budget import UnreadBytes
from spillway_gateway.error_bodies import error_body, retry_after

HELD_BYTES_MAX = 64 * 1024  # of requests that wait for their turn, or for the reply to the one before them
FRAMING_BYTES_PER_BYTE_MAX = 8  # of a chunked body: chunks of one byte take six
DROPPED_BYTES_MAX = 1 << 30  # of a body, after its request was answered
LINGER_SECONDS = 10.0  # for a client to stop sending after an answer that ends its connection
NEVER = float("inf")
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings", b"connection"})


class BoundedState(ServerState):
    """uvicorn's server state, with the listener's connections."""

    def __init__(self, open_connections: OpenConnections) -> None:
        super().__init__()
        self.open_connections = open_connections


class Refusal(Exception):
    """A client exceeded a bound. Raised inside the parser, it stops the parsing."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class _Phase(Enum):
    BETWEEN = auto()  # two requests
    HEAD = auto()
    BODY = auto()  # and trailers


class BoundedConnection(HttpToolsProtocol):
    """A client's connection within the bounds of its server. The server's state is a BoundedState."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.open_connections = cast(BoundedState, self.server_state).open_connections
        self._bounds = self.open_connections.bounds
        self.admitted_as: Connection | None = None  # the TLS handshake that was admitted in its place
        self._deadline = NEVER  # for the client's next bytes
        self._phase = _Phase.BETWEEN
        self._phase_is_new = True  # it began in the packet that is read now
        self._wire_bytes = 0  # of the phase, without its first packet
        self._packet_bytes = 0
        self._body_bytes = 0
        self._trailers = 0
        self._reserved_bytes = 0  # of the body budget
        self._body_seconds = 0.0
        self._body_bytes_before = 0
        self.body_timed_out = False
        self._upgrading = False
        self._refusal: Refusal | None = None
        self._refusal_due: Refusal | None = None  # after the replies to the requests before it
        self._held = bytearray()
        self._waits_since: float | None = None  # for its turn to begin a request
        self._unread = UnreadBytes(self.open_connections.reply_budget, self._bounds.stalled_seconds)
        self._refusal_sent = False
        self._drops_input = False  # it is about to be closed

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.admitted_as is not None:
            admitted = self.open_connections.replace(self.admitted_as, self)
        else:
            admitted = self.open_connections.admit(self, self.client[0] if self.client else "")
        if admitted:
            self._deadline = self.loop.time() + self._bounds.head_seconds
        else:
            self._refuse(Refusal(503, "too_many_connections", "The gateway has as many connections as it may have"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.open_connections.end_turns.take(self.loop, lambda: self.ended(exc)):
            self.ended(exc)

    def ended(self, exc: Exception | None) -> None:
        """The connection is lost, and it is its turn to end what runs on it."""
        self.open_connections.remove(self)
        self._deadline = NEVER
        self._unread.hold(0)
        self._held.clear()
        self.release_body_bytes()
        self.pipeline.clear()
        self._refusal = self._refusal_due = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        if not self.pipeline and self._waits_since is None:
            begins = self._phase is _Phase.BETWEEN and self.parser is not None
            if not begins or self.open_connections.request_turns.take(self.loop, self._begin):
                self._feed(data)
                return
            self._waits_since = self.loop.time()
            self.open_connections.mark_busy(self)
        # A pipelined request waits until the current one is answered. Reading goes on, since EOF, which cancels the
        # current request, is seen only by reading.
        self._held += data
        if len(self._held) > HELD_BYTES_MAX:
            self.flow.pause_reading()

    def _begin(self) -> None:
        """Begin this connection's turn. The wait does not count against the client."""
        assert self._waits_since is not None
        self._deadline += self.loop.time() - self._waits_since
        self._waits_since = None
        if self.cycle is None or self.cycle.response_complete:
            self.open_connections.mark_idle(self)
        if self._held and not self.pipeline:
            self.flow.resume_reading()
            self._feed_held()

    def _feed(self, data: bytes) -> None:
        while data and self.parser is not None and not self.transport.is_closing():
            self._packet_bytes = len(data)
            try:
                self.parser.feed_data(data)
                self._check_wire()
                if self._phase is _Phase.BODY:
                    self._bound_body()
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(self._refusal or Refusal(400, "invalid_http", "Invalid HTTP request received."))
            except Refusal as refusal:
                self._refuse(refusal)

    def _check_wire(self) -> None:
        """Bound a head or a body's framing that takes more than one packet; the parser itself counts no bytes."""
        if self._phase_is_new:
            self._phase_is_new = False
            return
        self._wire_bytes += self._packet_bytes
        bytes_max: int = self._bounds.head_bytes_max
        if self._phase is _Phase.BODY:
            bytes_max += FRAMING_BYTES_PER_BYTE_MAX * self._body_bytes
        if self._wire_bytes > bytes_max:
            raise self._head_too_large()

    def _bound_body(self) -> None:
        """Pause reading if much of a body waits for the request's task, before more of it comes."""
        cycle = self.cycle
        if len(cycle.body) > HIGH_WATER_LIMIT and not (self.pipeline or cycle.response_complete):
            self.flow.pause_reading()

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_is_new = True
        self._wire_bytes = 0

    def _head_too_large(self) -> Refusal:
        bounds = self._bounds
        return Refusal(
            431,
            "request_headers_too_large",
            f"The request's head is larger than {bounds.head_bytes_max} bytes or {bounds.headers_max} headers, the "
            "gateway's connections.headBytesMax and headersMax",
        )

    def _refuse(self, refusal: Refusal) -> None:
        """Read nothing more, answer with an OpenAI error body, and close. Whole requests that came before are answered
        first. Nothing gets into a reply that has begun: it ends with the connection."""
        self.parser = None  # type: ignore[assignment]
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._answer(refusal)
        elif not cycle.more_body:
            if cycle.response_started:
                self.transport.close()
            else:
                self._refusal_due = refusal
        elif self.pipeline and self.pipeline[0][0] is cycle:  # the broken one waits for the replies to others
            self.pipeline.popleft()
            self._refusal_due = refusal
        else:
            started = cycle.response_started
            cycle.response_started = cycle.disconnected = True
            cycle.message_event.set()
            if started:
                self.transport.close()
            else:
                self._answer(refusal)

    def _answer(self, refusal: Refusal) -> None:
        body = error_body(refusal.message, "invalid_request_error", None, refusal.code)
        retry = b"retry-after: %s\r\n" % retry_after(1) if refusal.status == 503 else b""
        more = b"".join([b"%s: %s\r\n" % header for header in self.refusal_headers()])
        head = b"%scontent-type: application/json\r\nconnection: close\r\n%s%scontent-length: %d\r\n\r\n"
        self._refusal_sent = True
        self.transport.write(head % (STATUS_LINE[refusal.status], retry, more, len(body)) + body)
        self.transport.close()

    def refusal_headers(self) -> list[tuple[bytes, bytes]]:
        """Further headers of a refusal that no request's task answers."""
        return []

    def linger(self, transport: asyncio.Transport) -> bool:
        """Return whether the connection stays open for a while instead of being closed, because its client may still
        send."""
        sends = self._refusal_sent or self._phase is _Phase.BODY
        if self._drops_input or not sends or not self.open_connections.holds(self):
            return False
        self._drops_input = True
        self._held.clear()
        self._deadline = self.loop.time() + LINGER_SECONDS
        self.open_connections.mark_idle(self)
        self.flow.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        return True

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter(_Phase.HEAD)
        if self.cycle is not None and self.cycle.response_complete:
            self._deadline = self.loop.time() + self._bounds.head_seconds

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._bounds.target_bytes_max:
            bytes_max = self._bounds.target_bytes_max
            message = f"The target is longer than {bytes_max} bytes, the gateway's connections.targetBytesMax"
            raise self._keep(Refusal(414, "uri_too_long", message))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:  # a trailer; engines would read it as a header
            self._trailers += 1
            if self._trailers > self._bounds.headers_max:
                raise self._keep(self._head_too_large())
            return
        headers = self.headers
        if len(headers) >= self._bounds.headers_max:
            raise self._keep(self._head_too_large())
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._enter(_Phase.BODY)
        self._body_bytes = self._trailers = 0
        self.body_timed_out = False
        if self._packet_bytes > self._bounds.head_bytes_max:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._bounds.head_bytes_max:
                raise self._keep(self._head_too_large())
        hosts = sum([name == b"host" for name, _ in self.headers])
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            raise self._keep(Refusal(400, "invalid_host", "One Host header is needed in each request"))
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._keep(Refusal(405, "method_not_allowed", "CONNECT is not served here"))
            self._upgrading = True
            return
        super().on_headers_complete()
        self.open_connections.mark_busy(self)
        self._deadline = NEVER
        if self.pipeline:
            self.flow.resume_reading()  # see data_received

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            if self._body_bytes > DROPPED_BYTES_MAX:
                self.transport.abort()
            return
        if not cycle.body:
            cycle.body = cast(bytearray, body)  # as it came: a body of one part is not copied
        else:
            cycle.body = bytearray(cycle.body) if isinstance(cycle.body, bytes) else cycle.body
            cycle.body += body
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._enter(_Phase.BETWEEN)
        if self.cycle.response_complete:
            self._deadline = self.loop.time() + self._bounds.idle_seconds
        else:
            self._deadline = NEVER
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The last head without its Upgrade headers, for a new parser."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name not in _UPGRADE_HEADERS:
                lines.append(name + b": " + value)
            elif name == b"connection" and b"close" in value.lower():
                lines.append(b"connection: close")
        self._upgrading = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return b"\r\n".join([*lines, b"", b""])

    def _keep(self, refusal: Refusal) -> Refusal:
        """Keep the refusal: the parser replaces an exception raised in a callback by its own."""
        self._refusal = refusal
        return refusal

    # -- ends --------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """End the response as uvicorn does, with a deadline in place of its keep-alive timer."""
        self.server_state.total_requests += 1
        if self._reserved_bytes:
            self.release_body_bytes()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self._refusal_due is not None:
            self._answer(self._refusal_due)
            return
        else:
            bounds = self._bounds
            if self._phase is _Phase.BODY:  # dropped, at the pace that a body has to have
                self.expect_body(bounds.head_seconds)
                self._body_bytes_before = self._body_bytes
            else:
                seconds = bounds.idle_seconds if self._phase is _Phase.BETWEEN else bounds.head_seconds
                self._deadline = self.loop.time() + seconds
            self.open_connections.mark_idle(self)
        if self._held and not self.pipeline:
            self.loop.call_soon(self._feed_held)

    def _feed_held(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        self._feed(held)

    def expect_body(self, seconds: float) -> None:
        """Require bodyBytesPerSecondMin in each period of this length until the body is complete. A slower body ends
        receive() with `body_timed_out` set."""
        self._body_seconds = seconds
        self._body_bytes_before = 0
        self._deadline = self.loop.time() + seconds

    def reserve_body_bytes(self, more_bytes: int) -> None:
        """Reserve bytes for the current body, until release_body_bytes() or the end of the request.

        Raises BodyBudgetSpent.
        """
        reserved = self._reserved_bytes + more_bytes
        self.open_connections.body_budget.reserve(more_bytes, reserved)
        self._reserved_bytes = reserved

    def release_body_bytes(self) -> None:
        self.open_connections.body_budget.release(self._reserved_bytes)
        self._reserved_bytes = 0

    def is_expired(self, now: float) -> bool:
        if now > self._deadline and self._waits_since is None:
            return True
        if not self.flow.write_paused and not self.transport.is_closing():
            return self._unread.look(None, now)
        return self._unread.look(self.transport.get_write_buffer_size(), now)

    def expire(self, now: float) -> None:
        bounds = self._bounds
        if self._unread.is_stalled(now):
            self.transport.abort()
        elif now <= self._deadline:
            return  # the client sent something meanwhile
        elif self._phase is _Phase.HEAD and not self._drops_input:
            seconds = bounds.head_seconds
            self._drops_input = True
            self._refuse(Refusal(408, "request_timeout", f"The request's head was not whole within {seconds:g} s"))
        elif self._phase is _Phase.BODY and not self._drops_input:
            arrived = self._body_bytes - self._body_bytes_before
            if arrived >= self._body_seconds * bounds.body_bytes_per_second_min:
                self._body_bytes_before = self._body_bytes
                self._deadline = now + self._body_seconds
                return
            if self.cycle.response_complete:
                self._drops_input = True
                self.transport.close()
            else:
                self.body_timed_out = True
                self.cycle.message_event.set()
        else:
            self._drops_input = True
            self.transport.close()
        self._deadline = NEVER

    def evict(self) -> None:
        self._unread.hold(0)
        self.transport.abort()

    def stalled_since(self) -> float | None:
        return None if self.transport.is_closing() else self._unread.since

    # -- what the client has not read --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.hold(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.drained()
