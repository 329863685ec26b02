"""A gRPC server's HTTP/2 connection, for calls whose messages stream in both directions.

The server of grpcio hands each message from threads of its own to the event loop, and the h2 package makes several
objects of each frame: both take more CPU time than the rest of the endpoint picker (docs/benchmarks/gateway.md).

The connection's window opens as bytes arrive, so a call with unread messages holds up no other call. Each call
has a window of its own, which opens as its messages are read.

A connection and each of its calls count among the listener's open connections, with their bounds. It may stay idle, as
a proxy's next request would fail if the connection closed at that moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import cast
from urllib.parse import quote

from spillway_gateway.client.body_budget import BodyBudgetSpent
from spillway_gateway.client.open_connections import Connection, OpenConnections
from spillway_gateway.client.reply_budget import UnreadBytes
from spillway_gateway.picker.frames import (
    BLOCK_BYTES_MAX,
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    Code,
    ConnectionFault,
    Flag,
    Frame,
    FrameReader,
    HeaderBlocks,
    Kind,
    Setting,
    StreamFault,
    frame,
    goaway_frame,
    header_block,
    number_in,
    reset_frame,
    settings_frame,
    settings_of,
    unpadded,
    well_formed,
    window_frame,
)
from spillway_gateway.picker.grpc_call import CALL_WINDOW_BYTES, NEVER, Call, CallFailed, Handler, Status
from spillway_gateway.picker.outgoing import Outgoing

logger = logging.getLogger(__name__)

CALLS_MAX = 4096  # of a connection; proxies open another for more
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
BLOCK_COST = 16  # of a frame with a header block, in turns; of others 1, some microseconds
_OF_BLOCKS = (Kind.HEADERS, Kind.CONTINUATION)
_HEAD = [(b":status", b"200"), (b"content-type", b"application/grpc")]
_UNSUPPORTED_BLOCK = header_block([(b":status", b"415")])
_OK_BLOCK = header_block([(b"grpc-status", b"0")])
_ENDS = (Status.UNAVAILABLE, "the gateway ends")


class GrpcConnection(asyncio.Protocol):
    """A client's connection; a Connection of client.open_connections too.

    Args:
        methods: by path, the function that serves a call.
        connections: the open connections; this one is among them while it is open.
        open_connections: the listener's open connections and budgets.
        admitted_as: the TLS handshake that was admitted in its place.
    """

    def __init__(
        self,
        methods: Mapping[bytes, Handler],
        connections: set[GrpcConnection],
        open_connections: OpenConnections,
        admitted_as: Connection | None = None,
    ) -> None:
        self._methods = methods
        self._connections = connections
        self._open = open_connections
        self._admitted_as = admitted_as
        self._address = ""
        self._deadline = NEVER  # of the first frame, or of a header block's last one
        self._unread = self._new_unread()
        self._reader = FrameReader()
        self._waiting: Frame | None = None  # for its turn
        self._blocks = HeaderBlocks()
        self._calls: dict[int, Call] = {}
        self._unfinished: set[Call] = set()  # whose handlers have not ended, also if their clients have ended them
        self._idle = asyncio.Event()  # no call is unfinished
        self._highest = 0  # number of a stream
        self._settings_due = True  # before any other frame
        self._window_in = CONNECTION_WINDOW_BYTES
        self._window_grew = False  # of the connection, or of all calls
        self._going_away = False
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Kind.DATA: self._data,
            Kind.HEADERS: self._headers,
            Kind.PRIORITY: self._priority,
            Kind.RST_STREAM: self._reset,
            Kind.SETTINGS: self._settings,
            Kind.PUSH_PROMISE: self._unexpected,
            Kind.PING: self._ping,
            Kind.GOAWAY: self._goaway,
            Kind.WINDOW_UPDATE: self._window_update,
            Kind.CONTINUATION: self._headers,
        }

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio
        peer = self._transport.get_extra_info("peername")
        self._address = peer[0] if peer else ""
        first = self._admitted_as
        admitted = self._open.replace(first, self) if first is not None else self._open.admit(self, self._address)
        if not admitted:
            self._transport.abort()
            return
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing(self._transport, self._calls)
        self._deadline = self._loop.time() + self._open.bounds.head_seconds
        accepted = self._transport.get_extra_info("socket")
        if accepted is not None:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a client whose node is gone says nothing
        self._connections.add(self)
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: CALLS_MAX,
            Setting.INITIAL_WINDOW_SIZE: CALL_WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: BLOCK_BYTES_MAX,
        }
        self._outgoing.write(settings_frame(settings), window_frame(0, CONNECTION_WINDOW_BYTES - WINDOW_BYTES))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._waiting is None:
            self._read_frames()

    def _read_frames(self) -> None:
        """Handle the part of what has arrived for which this iteration of the event loop has turns. One packet may have
        thousands of frames."""
        if self._transport.is_closing():
            return
        try:
            while (each := self._waiting or self._reader.next()) is not None:
                cost = BLOCK_COST if each.kind in _OF_BLOCKS else 1
                if self._waiting is None and not self._open.frame_turns.take(self._loop, self._begin_turn, cost):
                    self._waiting = each
                    self._transport.pause_reading()
                    return
                self._waiting = None
                try:
                    self._handle(each)
                except StreamFault as fault:
                    self._outgoing.write(reset_frame(fault.number, fault.code))
                    self._drop(fault.number)
        except ConnectionFault as fault:
            logger.warning("a client of the endpoint picker broke a rule of HTTP/2 and is disconnected: %s", fault)
            self._outgoing.write(goaway_frame(self._highest, fault.code))
            self._outgoing.flush()
            self._transport.close()
        if self._window_grew:  # once, however many frames said so
            self._window_grew = False
            self._outgoing.send_all()

    def _begin_turn(self) -> None:
        if self._outgoing.writable and not self._transport.is_closing():
            self._transport.resume_reading()
        self._read_frames()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._open.remove(self)
        self._unread.hold(0)
        for number in list(self._calls):
            drop = partial(self._drop, number)
            if self._open.end_turns.take(self._loop, drop):
                drop()

    def pause_writing(self) -> None:
        """Stop reading too: the client reads too slowly, and each of its frames may need an answer."""
        self._outgoing.writable = False
        self._unread.hold(self._transport.get_write_buffer_size())
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._outgoing.writable = True
        self._unread.drained()
        if self._waiting is None:
            self._transport.resume_reading()
        self._outgoing.send_all()

    # -- client.open_connections.Connection --------------------------------------------------------------------------

    def is_expired(self, now: float) -> bool:
        unsent = self._transport.get_write_buffer_size()
        unread = unsent if self._transport.is_closing() else unsent or None
        return self._unread.look(unread, now, self._outgoing.written_bytes) or now > self._deadline

    def expire(self, now: float) -> None:
        if self._unread.is_stalled(now) or now > self._deadline:
            self._transport.abort()

    def evict(self) -> None:
        self._unread.hold(0)
        self._transport.abort()

    def stalled_since(self) -> float | None:
        return self._unread.since

    def _new_unread(self) -> UnreadBytes:
        return UnreadBytes(self._open.reply_budget, self._open.bounds.stalled_seconds)

    # -- frames of the client ----------------------------------------------------------------------------------------

    def _handle(self, each: Frame) -> None:
        if self._settings_due and each.kind != Kind.SETTINGS:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if (each.kind == Kind.CONTINUATION) != bool(self._blocks.open_number) or (
            self._blocks.open_number and each.number != self._blocks.open_number
        ):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block is not continued as it has to be")
        handler = self._handlers.get(each.kind)
        if handler is not None:  # frames of extensions are ignored
            handler(each)

    def _data(self, each: Frame) -> None:
        self._check_begun(each)
        size = len(each.payload)
        self._window_in -= size
        if self._window_in < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        if self._window_in < CONNECTION_WINDOW_BYTES // 2:
            self._outgoing.write(window_frame(0, CONNECTION_WINDOW_BYTES - self._window_in))
            self._window_in = CONNECTION_WINDOW_BYTES
        data = unpadded(each)
        call = self._calls.get(each.number)
        if call is None:  # it may have ended while the frame was under way
            return
        if call.half_closed:
            raise StreamFault(each.number, Code.STREAM_CLOSED)
        call.window_in -= size
        if call.window_in < 0:
            raise StreamFault(each.number, Code.FLOW_CONTROL_ERROR)
        if each.flags & Flag.END_STREAM:
            call.half_closed = True
        call.feed(data)
        if call.half_closed:
            call.close_input()

    def _headers(self, each: Frame) -> None:
        if not each.number % 2:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of a stream that no client has")
        block = self._blocks.add(each)
        if block is None:
            if self._deadline == NEVER:
                self._deadline = self._loop.time() + self._open.bounds.head_seconds
            return
        self._deadline = NEVER
        first, headers = block
        ends = bool(first.flags & Flag.END_STREAM)
        if first.number > self._highest:
            self._highest = first.number
            self._begin(first.number, headers, ends=ends)
            return
        call = self._calls.get(first.number)
        if call is None:  # as for DATA
            return
        if call.half_closed:
            raise StreamFault(first.number, Code.STREAM_CLOSED)
        if not ends:
            raise StreamFault(first.number, Code.PROTOCOL_ERROR)
        call.close_input()  # by trailers

    def _priority(self, each: Frame) -> None:
        """Checked, and ignored."""
        if not each.number:
            self._unexpected(each)
        if len(each.payload) != 5:
            raise StreamFault(each.number, Code.FRAME_SIZE_ERROR)

    def _reset(self, each: Frame) -> None:
        number_in(each)
        self._check_begun(each)
        self._drop(each.number)

    def _settings(self, each: Frame) -> None:
        if each.number:
            self._unexpected(each)
        if each.flags & Flag.ACK:
            if each.payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an acknowledgement has a payload")
            return
        self._settings_due, self._deadline = False, NEVER
        for name, value in settings_of(each.payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                self._outgoing.call_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._outgoing.frame_bytes_max = value
        self._outgoing.write(frame(Kind.SETTINGS, Flag.ACK, 0))
        self._window_grew = True

    def _unexpected(self, each: Frame) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame of type {each.kind} for stream {each.number}")

    def _ping(self, each: Frame) -> None:
        if each.number:
            self._unexpected(each)
        if len(each.payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a PING of a wrong length")
        if not each.flags & Flag.ACK:
            self._outgoing.write(frame(Kind.PING, Flag.ACK, 0, each.payload))

    def _goaway(self, each: Frame) -> None:
        """Note that the client opens no more calls and will close the connection after the running ones."""
        if each.number:
            self._unexpected(each)

    def _window_update(self, each: Frame) -> None:
        more_bytes = number_in(each)
        if not each.number:
            self._outgoing.window += more_bytes
            if not more_bytes:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            if self._outgoing.window > WINDOW_BYTES_MAX:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the connection's window is too large")
            self._window_grew = True
            return
        self._check_begun(each)
        if not more_bytes:
            raise StreamFault(each.number, Code.PROTOCOL_ERROR)
        call = self._calls.get(each.number)
        if call is None:  # it may have ended while the frame was under way
            return
        call.window_change += more_bytes
        if self._outgoing.call_window + call.window_change > WINDOW_BYTES_MAX:
            raise StreamFault(each.number, Code.FLOW_CONTROL_ERROR)
        self.send(call)

    def _check_begun(self, each: Frame) -> None:
        if not each.number % 2 or each.number > self._highest:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame of type {each.kind} for a stream that has not begun")

    # -- calls -------------------------------------------------------------------------------------------------------

    def _begin(self, number: int, headers: list[tuple[bytes, bytes]], *, ends: bool) -> None:
        if self._going_away or len(self._unfinished) >= CALLS_MAX:
            raise StreamFault(number, Code.REFUSED_STREAM)
        if not well_formed(headers):
            raise StreamFault(number, Code.PROTOCOL_ERROR)
        given = dict(headers)
        handler = self._methods.get(given[b":path"])
        if given[b":method"] != b"POST" or not given.get(b"content-type", b"").startswith(b"application/grpc"):
            self._outgoing.end_stream(number, _UNSUPPORTED_BLOCK, half_closed=ends)
        elif handler is None:
            unknown = _trailers(Status.UNIMPLEMENTED, "there is no such method")
            self._outgoing.end_stream(number, unknown, half_closed=ends)
        else:
            self._open.mark_busy(self)
            call = Call(self, number, self._open.body_budget, self._new_unread(), handler)
            if not self._open.admit(call, self._address):
                refusal = "the gateway has as many connections and calls as it may have"
                self._outgoing.end_stream(number, _trailers(Status.RESOURCE_EXHAUSTED, refusal), half_closed=ends)
                self._mark_idle()
                return
            self._open.mark_busy(call)
            self._calls[number] = call
            self._unfinished.add(call)
            call.deadline = self._loop.time() + self._open.bounds.head_seconds
            if ends:
                call.close_input()

    def due(self, call: Call) -> None:
        if self._open.request_turns.take(self._loop, call.start):  # one packet may open thousands of calls
            call.start()

    def start(self, call: Call) -> None:
        if self._transport.is_closing():  # the end of each call is due
            return
        call.task = self._loop.create_task(self._serve(call))
        call.task.add_done_callback(lambda task: self._served(call))

    async def _serve(self, call: Call) -> None:
        status, message = _ENDS  # if this task is cancelled
        try:
            await call.handler(call)
            status, message = Status.OK, ""
        except CallFailed as failure:
            status, message = failure.status, failure.message
        except BodyBudgetSpent as spent:
            status, message = Status.RESOURCE_EXHAUSTED, str(spent)
        except Exception:
            logger.exception("a call of the endpoint picker failed")
            status, message = Status.UNKNOWN, "internal error"
        finally:
            self._finish(call, status, message)

    def _served(self, call: Call) -> None:
        self._unfinished.discard(call)
        self._open.remove(call)
        self._mark_idle()

    def _mark_idle(self) -> None:
        if not self._unfinished:
            self._open.mark_idle(self)
            self._idle.set()

    def _finish(self, call: Call, status: Status, message: str) -> None:
        if call.ended:
            return
        self._calls.pop(call.number, None)
        block = _trailers(status, message, head_sent=call.head_sent)
        self._outgoing.end_stream(call.number, block, half_closed=call.half_closed)
        call.forget()

    def _drop(self, number: int) -> None:
        """Drop a call that the client or the loss of the connection has ended. One packet may end thousands of them."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        call.forget()
        if call.task is None:
            self._forget_unbegun(call)
        elif self._open.end_turns.take(self._loop, call.end):
            call.end()

    def _forget_unbegun(self, call: Call) -> None:
        self._open.request_turns.leave(call.start)
        self._served(call)

    def reset(self, call: Call) -> None:
        if call.number in self._calls:
            self._outgoing.write(reset_frame(call.number, Code.CANCEL))
            self._drop(call.number)

    # -- sending -----------------------------------------------------------------------------------------------------

    def open_window(self, call: Call, more_bytes: int) -> None:
        self._outgoing.write(window_frame(call.number, more_bytes))

    def send(self, call: Call) -> None:
        self._outgoing.send(call)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def close(self, seconds: float) -> None:
        """Accept no more calls, give the running ones some time, and close."""
        self._going_away = True
        self._outgoing.write(goaway_frame(self._highest, Code.NO_ERROR))
        await self._until_idle(seconds)
        for call in list(self._unfinished):
            cancel = partial(self._cancel, call)
            if self._open.end_turns.take(self._loop, cancel):
                cancel()
        await self._until_idle(seconds)
        self._outgoing.flush()
        self._transport.close()

    async def _until_idle(self, seconds: float) -> None:
        """Wait until no call is unfinished, at most for the given seconds."""
        self._idle.clear()
        if self._unfinished:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    def _cancel(self, call: Call) -> None:
        if call.task is not None:
            call.task.cancel()
        elif not call.ended:
            self._finish(call, *_ENDS)
            self._forget_unbegun(call)


def _trailers(status: Status, message: str, *, head_sent: bool = False) -> bytes:
    if head_sent and not status:
        return _OK_BLOCK
    headers = [] if head_sent else list(_HEAD)
    headers.append((b"grpc-status", b"%d" % status))
    if message:
        headers.append((b"grpc-message", quote(message, safe=" ,.;:'()-_/").encode()))
    return header_block(headers)
