"""One HTTP/1.1 connection to an engine: bytes out, parsed head and raw body bytes in.

Small on purpose. A general client costs several times the routing itself per request, hides whether a failed
connection was a reused one (then the engine may be healthy, and a fresh connection decides), and cannot be closed in
the event loop iteration in which the client disconnects.

A few kilobytes of a reply pass at once. Hundreds of faster replies may have much to read in one event loop iteration:
each of them is read a little, and their bytes are given out by turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import httptools

from spillway_gateway.errors import EngineBadReply, EngineDisconnected, UpstreamError
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.content_encoding import Inflater, inflater_of
from spillway_gateway.upstream.forward import Body, Headers
from spillway_gateway.write_coalescing import WriteCoalescer

# Reading pauses above it, and goes on once the last of it is taken: backpressure, so that slow clients fill no memory.
READ_BUFFER_BYTES = 64 * 1024
LITTLE_BYTES = 4 * 1024  # read at once if much was read in this iteration already
FREE_BYTES = 16 * 1024  # given out without a turn: most events
TURNS_BYTES = 512 * 1024  # given out in one iteration: a few milliseconds of reading events
ENDS_PER_ITERATION = 32  # of connections that their engine closed, each with a request that is then sent again or fails
BARE_BYTES_MAX = 64 * 1024
_WITHOUT_BODY = (204, 304)


class Reading:
    """The state that connections to engines share on one event loop: turns to give out the bytes that they read and to
    report their ends, and the memory that they read into, because each takes its bytes from there at once."""

    def __init__(self) -> None:
        self.turns = Turns(TURNS_BYTES)
        self.ends = Turns(ENDS_PER_ITERATION)
        self.buffer = memoryview(bytearray(READ_BUFFER_BYTES))
        self.little = self.buffer[:LITTLE_BYTES]


class EngineConnection(asyncio.BufferedProtocol):
    """One exchange at a time: send(), head(), then chunk() until it returns b"". Lives on the event loop."""

    passes_on_seconds = None  # the engine sends its reply whatever becomes of it

    def __init__(self, reading: Reading) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading = reading
        self._turn_asked = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: UpstreamError | None = None
        self._coalescer = WriteCoalescer.of_running_loop()
        self._outgoing: Sequence[Body] = ()
        self._chunks: list[bytes] = []
        self._paused = False
        self._eof = False
        self._reset_exchange()
        self.exchanges = 0
        self.idle_since = 0.0

    def _reset_exchange(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self._chunks = []
        self._buffered = 0
        self._has_turn = False
        self._reads_in_turn = False  # its reading was paused; it goes on after each turn
        self._bare_bytes = 0  # without a byte of the body among them: head, extensions of chunks, trailers
        self._head_done = False
        self._complete = False
        self._keep_alive = False
        self._framed = False  # by length or chunks; otherwise the end of the connection ends the body
        self._inflater: Inflater | None = None
        self._fault: str | None = None  # that only this parser's callbacks see

    # -- use ---------------------------------------------------------------------------------------------------------

    @property
    def reused(self) -> bool:
        return self.exchanges > 1

    @property
    def got_bytes(self) -> bool:
        """Any byte of the reply to the current request has arrived."""
        return self._bare_bytes > 0 or self.status != 0

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow."""
        # With unread bytes the next request would get this one's reply.
        return self.complete and self._keep_alive and self.alive

    @property
    def alive(self) -> bool:
        """Whether the event loop has seen neither side close the connection."""
        return (
            self._failure is None and not self._eof and self._transport is not None and not self._transport.is_closing()
        )

    def send(self, parts: Sequence[Body]) -> None:
        """Begin an exchange. parts: the request's head and body. Does not wait."""
        assert self._transport is not None
        self._reset_exchange()
        self._parser = httptools.HttpResponseParser(self)
        self.exchanges += 1
        if self._coalescer.active:
            self._outgoing = parts
            self._coalescer.defer(self._write)
        else:
            self._transport.writelines(parts)

    def _write(self) -> None:
        parts, self._outgoing = self._outgoing, ()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(parts)

    async def head(self) -> None:
        """Wait for status and headers. Raises EngineDisconnected or EngineBadReply."""
        while not self._head_done:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def chunk(self) -> bytes:
        """All body bytes that have arrived, without their compression; b"" at the end. Raises EngineDisconnected on a
        broken body, and EngineBadReply."""
        inflater = self._inflater
        if inflater is None:
            return await self._arrived()
        while True:
            while inflater.pending:
                if piece := inflater.more():
                    return piece
            data = await self._arrived()
            if not data:
                inflater.end()
                return b""
            inflater.feed(data)

    async def _arrived(self) -> bytes:
        while not self._may_give():
            if not self._chunks:
                if self._complete:
                    return b""
                if self._failure is not None:
                    raise self._failure
                self._resume_reading()
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        self._has_turn = False
        return data

    def _may_give(self) -> bool:
        """Whether bytes have arrived, few of them or in their turn."""
        if not self._chunks:
            return False
        if self._buffered <= FREE_BYTES and not self._paused:
            return True
        if not (self._has_turn or self._turn_asked):
            cost = max(self._buffered, FREE_BYTES)  # a piece has a cost of its own, however short it is
            self._has_turn = self._reading.turns.take(self._loop, self._turn_came, cost)
            self._turn_asked = not self._has_turn
        return self._has_turn

    def _turn_came(self) -> None:
        self._turn_asked = False
        self._has_turn = True
        self._wake()

    def _resume_reading(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._reads_in_turn = True
            self._transport.resume_reading()

    @property
    def complete(self) -> bool:
        """The whole reply has arrived and been taken."""
        return self._complete and not self._chunks and (self._inflater is None or self._inflater.finished)

    def abort(self) -> None:
        """Close now. The engine cancels the request that runs on the connection."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def get_buffer(self, sizehint: int) -> memoryview:
        reading = self._reading
        if self._reads_in_turn or not reading.turns.spent:
            return reading.buffer
        return reading.little

    def buffer_updated(self, nbytes: int) -> None:
        reading = self._reading
        self._received(reading.buffer[:nbytes])
        # After a whole reply reading goes on: the engine may close the connection.
        much = self._buffered > READ_BUFFER_BYTES or (nbytes >= LITTLE_BYTES and reading.turns.spent)
        if much and not (self._complete or self._paused) and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _received(self, data: memoryview) -> None:
        if self._parser is None or self._complete:
            self._fail(EngineBadReply("the engine sent bytes that answer no request"))
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineBadReply(f"the engine's reply is not HTTP/1.1 ({error.__class__.__name__})"))
            return
        if self._fault is not None:
            self._fail(EngineBadReply(self._fault))
            return
        if self._bare_bytes > BARE_BYTES_MAX and not self._complete:
            self._fail(EngineBadReply(f"the engine's reply has more than {BARE_BYTES_MAX} bytes of headers"))
            return
        waiter = self._waiter
        if waiter is not None and (self._buffered <= FREE_BYTES or self._may_give()) and not waiter.done():
            waiter.set_result(None)

    def eof_received(self) -> bool:
        self._ended(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        self._parser = None  # which holds this connection

    def _ended(self, exc: Exception | None) -> None:
        self._eof = True
        if self._head_done and not self._framed and exc is None:
            self._complete = True
        if not self._complete and self._failure is None:
            self._failure = EngineDisconnected("the engine closed the connection before its reply was whole")
            self._failure.__cause__ = exc
        if self._waiter is not None and self._reading.ends.take(self._loop, self._wake):
            self._wake()

    def _fail(self, failure: UpstreamError) -> None:
        self._failure = self._failure or failure
        self.abort()
        self._wake()

    # -- httptools ---------------------------------------------------------------------------------------------------

    # The parser goes on to whatever follows a whole reply in the same packet, and reads a body of a reply that has none
    # by its status. The client would get both on a connection that stays open, and take the rest for its next reply.

    def on_message_begin(self) -> None:
        if self._complete:
            self._fault = "the engine sent a second reply to one request"
        elif not self._head_done:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # else a trailer, or a second reply's
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._head_done or self._fault is not None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return  # an interim reply: the real one follows
        if not 200 <= status < 600:
            self._fault = f"the engine's reply has the status {status}, which HTTP does not have"
            return
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            self._fault = (
                "the engine's reply has a transfer-encoding other than chunked, which the gateway does not ask for"
            )
            return
        self.status = status
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        if status in _WITHOUT_BODY:
            self._complete = True
            self.headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        self._framed = self._complete or bool(codings) or any(name == b"content-length" for name, _ in self.headers)
        encodings = [value for name, value in self.headers if name == b"content-encoding"]
        if encodings and not self._complete:
            self._uncompress(encodings)

    def _uncompress(self, encodings: list[bytes]) -> None:
        try:
            self._inflater = inflater_of(encodings)
        except EngineBadReply as error:
            self._head_done = False
            self._fault = error.message
            return
        described = (b"content-encoding", b"content-length") if self._inflater is not None else (b"content-encoding",)
        self.headers = [pair for pair in self.headers if pair[0] not in described]

    def on_body(self, body: bytes) -> None:
        if self._complete or not self._head_done:
            self._fault = self._fault or "the engine sent a body with a reply that has none"
            return
        self._bare_bytes = 0
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
