"""One connection against a server that sends exactly the given bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from spillway_gateway.errors import EngineBadReply, EngineDisconnected
from spillway_gateway.upstream.connection import HEAD_BYTES_MAX, READ_BUFFER_BYTES, EngineConnection
from spillway_gateway.write_coalescing import WriteCoalescer

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def connected(reply: bytes, *, close: bool = False) -> AsyncIterator[EngineConnection]:
    """A connection whose peer answers each request with `reply`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(reply)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    _, connection = await asyncio.get_running_loop().create_connection(EngineConnection, host, port)
    try:
        yield connection
    finally:
        connection.abort()
        server.close()


async def whole_body(connection: EngineConnection) -> bytes:
    await connection.head()
    body = b""
    while chunk := await connection.chunk():
        body += chunk
    return body


async def test_two_exchanges_on_one_connection() -> None:
    async with connected(b"HTTP/1.1 201 Created\r\nX-A: b\r\nContent-Length: 3\r\n\r\nabc") as connection:
        for _ in range(2):
            connection.send([REQUEST])
            assert await whole_body(connection) == b"abc"
            assert (connection.status, connection.headers[0]) == (201, (b"x-a", b"b"))
            assert connection.reusable
        assert connection.reused


async def test_with_several_requests_a_request_is_sent_at_the_end_of_the_iteration() -> None:
    async with connected(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc") as connection:
        WriteCoalescer.of_running_loop().requests = 2
        for _ in range(2):
            connection.send([REQUEST])
            assert await whole_body(connection) == b"abc"

        connection.send([REQUEST])
        connection.abort()  # in the same iteration: the request is never sent, and the wait for its reply ends
        with pytest.raises(EngineDisconnected):
            await connection.head()


async def test_an_unread_reply_makes_a_connection_unusable() -> None:
    async with connected(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc") as connection:
        connection.send([REQUEST])
        await connection.head()

        assert not connection.reusable


async def test_interim_replies_are_skipped() -> None:
    reply = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with connected(reply) as connection:
        connection.send([REQUEST])

        assert await whole_body(connection) == b"ok"
        assert connection.status == 200


async def test_the_end_of_the_connection_may_end_the_body() -> None:
    async with connected(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc", close=True) as connection:
        connection.send([REQUEST])

        assert await whole_body(connection) == b"abc"
        assert not connection.reusable


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
async def test_a_reply_cut_short_is_a_disconnect(reply: bytes) -> None:
    async with connected(reply, close=True) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineDisconnected):
            await whole_body(connection)
        assert not connection.reusable


@pytest.mark.parametrize(
    "reply",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * (HEAD_BYTES_MAX * 2)],
)
async def test_a_reply_that_is_not_http_is_named(reply: bytes) -> None:
    async with connected(reply) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineBadReply):
            await whole_body(connection)


async def test_a_large_body_is_read_only_as_fast_as_it_is_taken() -> None:
    size = READ_BUFFER_BYTES * 40
    async with connected(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size) as connection:
        connection.send([REQUEST])
        await connection.head()
        total = 0
        largest = 0
        while chunk := await connection.chunk():
            total += len(chunk)
            largest = max(largest, len(chunk))

    assert total == size
    assert largest <= READ_BUFFER_BYTES * 2
