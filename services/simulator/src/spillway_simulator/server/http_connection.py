"""HTTP/1.1 on a raw asyncio protocol: the cheapest way to hundreds of streams on one core.

One request at a time per connection, keep-alive; every response is marked as a simulator's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

import httptools

BODY_BYTES_MAX = 64 * 1024 * 1024
UNSENT_BYTES_MAX = 4 * 1024 * 1024  # of a stream whose client does not read; then the connection is given up
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Handler(Protocol):
    """Answers one request through its connection, at once or later."""

    def handle(self, connection: HttpConnection, method: str, path: str, body: bytes) -> None: ...


class HttpConnection(asyncio.Protocol):
    """connections: the set that lists this one while it is open."""

    def __init__(self, handler: Handler, connections: set[HttpConnection]) -> None:
        self._handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._busy = False
        self._request_id: bytes | None = None
        self.on_gone: Callable[[], None] | None = None  # the client closed before its reply was complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()

    def kill(self) -> None:
        """Break the connection."""
        if self._transport is not None:
            self._transport.abort()

    # -- parser ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._busy:
            self.kill()  # pipelining; no client of an engine does that
        self._url, self._body, self._body_bytes, self._request_id = b"", [], 0, None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"x-request-id":
            self._request_id = value
        elif lowered == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > BODY_BYTES_MAX:
            self.kill()
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._busy = True
        path = self._url.partition(b"?")[0].decode("latin-1")
        self._handler.handle(self, self._parser.get_method().decode(), path, b"".join(self._body))

    @property
    def request_id(self) -> str | None:
        return self._request_id.decode("latin-1") if self._request_id is not None else None

    # -- replies -----------------------------------------------------------------------------------------------------

    def reply(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        self._write(
            b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nx-spillway-simulated: true\r\n\r\n%s"
            % (status, _REASONS.get(status, b""), content_type, len(body), body)
        )
        self._done()

    def begin_stream(self) -> None:
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\nx-spillway-simulated: true\r\n\r\n"
        )

    def stream(self, data: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self, data: bytes) -> None:
        self._write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        self._done()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.kill()

    def _done(self) -> None:
        self._busy = False
        self.on_gone = None
        if self._transport is not None and not self._parser.should_keep_alive():
            self._transport.close()
