"""A client's connection: uvicorn's, with what ASGI has no words for.

A reply's head leaves together with the first bytes of its body, in one packet. And who serves a request may be called
when the client goes, instead of keeping a task that waits for it: with a thousand streams that is a thousand tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spillway_gateway.error_bodies import error_body

EXTENSION = "spillway.client"


class ClientConnection(HttpToolsProtocol):
    """In a request's scope as extension EXTENSION."""

    _left: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, HeadWithBody(transport)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(MutableMapping[str, Any], self.scope)["extensions"] = {EXTENSION: self}

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. In the shape of every other error; never into the middle of a reply."""
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(msg, "invalid_request_error", None, "invalid_http")
            head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    @property
    def request_read(self) -> bool:
        """The whole request that is served now has arrived."""
        return not self.cycle.more_body

    def call_when_left(self, left: Callable[[], None]) -> None:
        """left: called in the same turn of the loop in which the connection is lost; soon, if it is lost already.
        Until forget()."""
        self._left = left
        if self.cycle.disconnected or self.transport.is_closing():
            asyncio.get_running_loop().call_soon(self._tell_late)
        else:
            self.flow.resume_reading()  # a long body may have paused it, and the end would not be read

    def forget(self, left: Callable[[], None]) -> None:
        if self._left == left:  # else the next request on this connection has set its own
            self._left = None

    def _tell_late(self) -> None:
        if self._left is not None:
            self._left()


class HeadWithBody:
    """A transport that holds back the head of a reply until the next write, or to the end of the loop's turn."""

    __slots__ = ("_flush", "_head", "_transport", "abort", "get_extra_info", "is_closing", "pause_reading",
                 "resume_reading", "set_protocol")  # fmt: skip

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._flush: asyncio.Handle | None = None
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.set_protocol = transport.set_protocol

    def write(self, data: bytes) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
            self._transport.write(self._head + data)
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
            self._flush = asyncio.get_running_loop().call_soon(self._write_head)
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._write_head()
        self._transport.close()

    def _write_head(self) -> None:
        self._flush = None
        if not self._transport.is_closing():
            self._transport.write(self._head)
