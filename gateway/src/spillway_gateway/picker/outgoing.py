"""Sends on one connection of the endpoint picker: frames of one event loop iteration together, and messages of its
calls as far as the client's windows and its socket take them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from spillway_gateway.picker.frames import (
    FRAME_BYTES_MAX,
    WINDOW_BYTES,
    Code,
    Flag,
    Kind,
    frame,
    frame_head,
    header_block,
    reset_frame,
)
from spillway_gateway.picker.grpc_call import Call
from spillway_gateway.write_coalescing import WriteCoalescer

UNSENT_BYTES_MAX = 1024 * 1024  # that wait for a connection's socket; calls keep what comes after
_HEAD_BLOCK = header_block([(b":status", b"200"), (b"content-type", b"application/grpc")])


class Outgoing:
    """Sends a connection's frames and its calls' messages. Used on the event loop.

    Args:
        transport: the connection's transport.
        calls: the calls that may have unsent messages, by number.

    Attributes:
        window: bytes of messages that the client takes.
        call_window: the initial window of each call, to which it adds its window_change.
        frame_bytes_max: the largest payload of a frame that the client takes.
        written_bytes: the bytes that the transport was given.
        writable: whether the transport takes more.
    """

    def __init__(self, transport: asyncio.Transport, calls: Mapping[int, Call]) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(UNSENT_BYTES_MAX)
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._coalescer = WriteCoalescer.of_running_loop()
        self.window = WINDOW_BYTES
        self.call_window = WINDOW_BYTES
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.written_bytes = 0
        self.writable = True
        self._parts: list[bytes | memoryview] = []
        self._parts_bytes = 0
        self._sends_on = False  # in the next iteration

    def write(self, *parts: bytes | memoryview) -> None:
        """Send these frames at the end of this iteration."""
        if not self._parts:
            self._coalescer.defer(self.flush)
        self._parts += parts
        self._parts_bytes += sum(map(len, parts))

    def flush(self) -> None:
        """Send what was written now."""
        parts, self._parts = self._parts, []
        parts_bytes, self._parts_bytes = self._parts_bytes, 0
        if parts and not self._transport.is_closing():
            self.written_bytes += parts_bytes
            self._transport.writelines(parts)

    def send(self, call: Call) -> None:
        """Send the part of the call's unsent bytes that fits into the windows."""
        unsent = call.unsent
        if not unsent or not self.writable:
            return
        if not call.head_sent:
            call.head_sent = True
            self.write(frame(Kind.HEADERS, Flag.END_HEADERS, call.number, _HEAD_BLOCK))
        while unsent and (window := min(self.call_window + call.window_change, self.window)) > 0:
            message = unsent.popleft()
            size = min(len(message), window, self.frame_bytes_max)
            if size < len(message):
                unsent.appendleft(message[size:])
            call.window_change -= size
            self.window -= size
            self.write(frame_head(Kind.DATA, 0, call.number, size), message[:size])
        if not unsent:
            call.sent()

    def send_all(self) -> None:
        """Send about UNSENT_BYTES_MAX of all calls in one iteration: thousands may have waited for the same window."""
        if self._sends_on:
            return
        for call in list(self._calls.values()):
            if self._parts_bytes >= UNSENT_BYTES_MAX:
                self._sends_on = True
                self._loop.call_soon(self._send_on)  # after the flush, which may find that the socket is full
                return
            self.send(call)

    def _send_on(self) -> None:
        self._sends_on = False
        self.send_all()

    def end_stream(self, number: int, block: bytes, *, half_closed: bool) -> None:
        """End the call with the headers that end it. half_closed: The client sends no more."""
        self.write(frame(Kind.HEADERS, Flag.END_HEADERS | Flag.END_STREAM, number, block))
        if not half_closed:  # what the client still sends is not needed
            self.write(reset_frame(number, Code.NO_ERROR))
