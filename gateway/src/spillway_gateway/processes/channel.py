"""The connection between the router process and one front: messages both ways, many requests at a time.

Messages of one iteration of the event loop are written together. What waits for the other side is bounded. One read may
bring messages of thousands of requests, each of which then goes on: they are handled in turns, in order, and no more is
read meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from spillway_gateway.processes.messages import FrameError, Frames, Message, append_frame
from spillway_gateway.turns import Turns

logger = logging.getLogger(__name__)

WAITING_BYTES_MAX = 64 * 1024 * 1024
HANDLED_PER_ITERATION = 64  # messages: with what a request then does, under 10 ms


class Channel(asyncio.Protocol):
    """One end of the connection, on the event loop.

    Args:
        on_message: Called for each message that arrives.
        on_closed: Called once, when no more messages will arrive.
        turns: The turns of all channels of the process.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Any], None],
        on_closed: Callable[[], None],
        turns: Turns,
    ) -> None:
        self._frames = Frames(decoder)
        self._arrived: deque[Any] = deque()
        self._turns = turns
        self._ended = False
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._deferred: list[Callable[[], None]] = []
        self._scheduled = False

    @classmethod
    async def over(
        cls,
        connected: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Any], None],
        on_closed: Callable[[], None],
        turns: Turns,
    ) -> Channel:
        """The channel over one end of a socket pair, which it then owns."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(
            lambda: cls(decoder, on_message, on_closed, turns), sock=connected
        )
        return channel

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def full(self) -> bool:
        """Whether the other side takes nothing: what is sent now would wait behind WAITING_BYTES_MAX."""
        waiting = len(self._buffer)
        if self._transport is not None:
            waiting += self._transport.get_write_buffer_size()
        return waiting > WAITING_BYTES_MAX

    def send(self, message: Message) -> None:
        """Write with the other messages of this iteration. Lost if the channel is closed. Raises ValueError for a
        message that is too long for a frame."""
        append_frame(message, self._buffer)
        self._flush_soon()

    def defer(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which may send, once before the messages of this iteration are written."""
        self._deferred.append(tell)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand everything to the kernel, or to the transport."""
        self._scheduled = True  # what is deferred may send
        deferred, self._deferred = self._deferred, []
        for tell in deferred:
            tell()
        self._scheduled = False
        data, self._buffer = self._buffer, bytearray()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the channel once what waits is written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._arrived += self._frames.feed(data)
        except FrameError as error:
            logger.error("between processes: %s", error)
            self.abort()
            return
        self._handle_arrived()
        if self._arrived and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended = True
        if not self._arrived:
            self._on_closed()

    def _handle_arrived(self) -> None:
        while self._arrived:
            if not self._turns.take(self._loop, self._go_on):
                return
            self._handle_first()

    def _go_on(self) -> None:
        self._handle_first()
        self._handle_arrived()
        if self._arrived:
            return
        if self._ended:
            self._on_closed()
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _handle_first(self) -> None:
        try:
            self._on_message(self._arrived.popleft())
        except Exception:  # of one request; the others go on
            logger.exception("between processes: a message was not handled")
