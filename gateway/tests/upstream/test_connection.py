"""One connection against a server that sends exactly the given bytes."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_gateway.errors import EngineBadReply, EngineDisconnected
from spillway_gateway.testing.running import until
from spillway_gateway.upstream.connection import (
    BARE_BYTES_MAX,
    ENDS_PER_ITERATION,
    READ_BUFFER_BYTES,
    TURNS_BYTES,
    EngineConnection,
    Reading,
)
from spillway_gateway.write_coalescing import WriteCoalescer

PACKET_BYTES_MAX = READ_BUFFER_BYTES  # that an event loop reads at once
SECONDS_MAX = 60.0
REPLIES = 60  # that come at the same time
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"


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
    made = EngineConnection(Reading())
    _, connection = await asyncio.get_running_loop().create_connection(lambda: made, host, port)
    try:
        yield connection
    finally:
        connection.abort()
        server.close()


class SilentTransport(asyncio.Transport):
    """Takes what is written, until it is closed."""

    _closing = False

    def write(self, data: object) -> None: ...

    def writelines(self, parts: object) -> None: ...

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True


def deliver(connection: EngineConnection, packet: bytes) -> None:
    """Deliver a packet as an event loop does when it has read one."""
    connection.get_buffer(-1)[: len(packet)] = packet
    connection.buffer_updated(len(packet))


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
        for _ in range(2):
            WriteCoalescer.of_running_loop().begin_request()
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
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * (BARE_BYTES_MAX * 2)],
)
async def test_a_reply_that_is_not_http_is_named(reply: bytes) -> None:
    async with connected(reply) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineBadReply):
            await whole_body(connection)


FIRST = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: first\r\n\r\nfirst"
SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nX-B: second\r\n\r\nsecond"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: first\r\n\r\n5\r\nfirst\r\n0\r\n"


@pytest.mark.parametrize("behind", [SECOND, b"HTTP/1.1 103 Early Hints\r\n\r\n", b"second", b"\0", b"HTTP/1.1 2"])
@pytest.mark.parametrize("reply", [FIRST, CHUNKED + b"\r\n"])
async def test_what_follows_a_whole_reply_is_no_part_of_it(reply: bytes, behind: bytes) -> None:
    async with connected(reply + behind) as connection:
        connection.send([REQUEST])

        assert await whole_body(connection) == b"first"
        assert (b"x-a", b"first") in connection.headers
        assert not any(name == b"x-b" for name, _ in connection.headers)
        assert not connection.reusable


@given(cut=st.integers(1, len(FIRST + SECOND) - 1))
@settings(deadline=None, max_examples=60)
def test_two_replies_are_never_one_wherever_packets_end(cut: int) -> None:
    """The protocol's own calls are tested, without sockets: the second reply is refused, or has no waiting request."""

    async def exchange() -> None:
        connection = EngineConnection(Reading())
        connection.connection_made(SilentTransport())
        connection.send([REQUEST])
        for packet in ((FIRST + SECOND)[:cut], (FIRST + SECOND)[cut:]):
            if connection.alive:
                deliver(connection, packet)
        assert await whole_body(connection) == b"first"
        assert [name for name, _ in connection.headers] == [b"content-length", b"x-a"]
        assert not connection.reusable

    asyncio.run(exchange())


async def test_trailers_are_no_headers() -> None:
    async with connected(CHUNKED + b"Set-Cookie: a=b\r\nX-Request-Id: forged\r\n\r\n") as connection:
        connection.send([REQUEST])

        assert await whole_body(connection) == b"first"
        assert [name for name, _ in connection.headers] == [b"transfer-encoding", b"x-a"]


@pytest.mark.parametrize("status", [204, 304])
async def test_a_reply_that_has_no_body_by_its_status_passes_none(status: int) -> None:
    async with connected(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status + SECOND) as connection:
        connection.send([REQUEST])

        assert await whole_body(connection) == b""
        assert (connection.status, connection.headers) == (status, [])
        assert not connection.reusable


@pytest.mark.parametrize("interim", [b"100 Continue", b"103 Early Hints", b"199 X"])
async def test_a_body_behind_an_interim_head_is_refused(interim: bytes) -> None:
    reply = b"HTTP/1.1 %s\r\nContent-Length: 5\r\n\r\nwrong" % interim + FIRST
    async with connected(reply) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineBadReply):
            await whole_body(connection)


@pytest.mark.parametrize("status", [b"000", b"099", b"101", b"600", b"999"])
async def test_a_status_that_no_reply_has_is_refused(status: bytes) -> None:
    async with connected(b"HTTP/1.1 %s X\r\nContent-Length: 0\r\n\r\n" % status) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineBadReply):
            await whole_body(connection)


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000,
        BEGUN + b"0\r\n" + b"x: a\r\n" * 50_000,
        BEGUN + b"0\r\nx: " + b"a" * 300_000,
        BEGUN + b"0\r\n" + b"a" * 300_000,
        BEGUN + b"2;" + b"a" * 300_000,
    ],
    ids=["interim heads", "trailers", "a trailer's value", "a trailer's name", "a chunk's extension"],
)
async def test_what_is_no_body_and_has_no_end_is_refused(endless: bytes) -> None:
    async with connected(endless) as connection:
        connection.send([REQUEST])
        with pytest.raises(EngineBadReply, match="bytes of headers"):
            await whole_body(connection)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"chunked, gzip", b"chunked, chunked", b"xchunked", b"gzip"])
async def test_a_transfer_coding_that_nobody_asked_for_is_refused(coding: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: %s\r\n\r\n" % coding
    for reply in (head, head.replace(b", ", b"\r\nTransfer-Encoding: ")):
        async with connected(reply + b"1\r\na\r\n0\r\n\r\n") as connection:
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
    assert largest <= READ_BUFFER_BYTES + PACKET_BYTES_MAX


async def test_a_connection_whose_reply_filled_its_buffer_can_be_used_again() -> None:
    size = READ_BUFFER_BYTES + 1000
    async with connected(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size) as connection:
        for _ in range(3):
            connection.send([REQUEST])
            assert len(await whole_body(connection)) == size
            assert connection.reusable


async def many_connections(stack: ExitStack) -> list[tuple[EngineConnection, socket.socket]]:
    """Each with the engine's end of it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=REPLIES))
    loop, reading, pairs = asyncio.get_running_loop(), Reading(), []
    for _ in range(REPLIES):
        made = EngineConnection(reading)
        _, connection = await loop.create_connection(lambda made=made: made, *listener.getsockname())
        stack.callback(connection.abort)
        engine = stack.enter_context(listener.accept()[0])
        engine.setblocking(False)
        connection.send([REQUEST])
        pairs.append((connection, engine))
    return pairs


class Iterations:
    """Counts those of the running loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._loop.call_soon(self._next)


@pytest.mark.parametrize("body_bytes", [READ_BUFFER_BYTES, 8 * READ_BUFFER_BYTES])
async def test_replies_that_come_at_once_are_given_out_by_turns(body_bytes: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % body_bytes
    iterations = Iterations()
    given: Counter[int] = Counter()

    async def take(connection: EngineConnection, engine: socket.socket) -> int:
        loop, whole, size = asyncio.get_running_loop(), bytes(body_bytes), 0
        sending = loop.create_task(loop.sock_sendall(engine, whole[taken[engine] :]))
        await connection.head()
        while chunk := await connection.chunk():
            given[iterations.number] += len(chunk)
            size += len(chunk)
        await sending
        return size

    with ExitStack() as stack:
        pairs = await many_connections(stack)
        taken: dict[socket.socket, int] = {}
        for _, engine in pairs:  # the loop runs no iteration meanwhile: all have much to read in the next one
            engine.send(head)
            taken[engine] = engine.send(bytes(body_bytes))
        async with asyncio.timeout(SECONDS_MAX):
            sizes = await asyncio.gather(*(take(connection, engine) for connection, engine in pairs))
    assert sizes == [body_bytes] * REPLIES
    bytes_max = 2 * TURNS_BYTES  # more may arrive between the asking for a turn and the turn
    assert max(given.values()) <= bytes_max < REPLIES * READ_BUFFER_BYTES


async def test_a_few_bytes_wait_for_no_turn() -> None:
    with ExitStack() as stack:
        (busy, busy_engine), (other, other_engine) = (await many_connections(stack))[:2]
        turns = busy._reading.turns
        turns.cost_max = 0
        busy_engine.send(b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n" + bytes(40000))
        waits = asyncio.ensure_future(whole_body(busy))
        await until(lambda: busy._paused)
        other_engine.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + bytes(2000))
        async with asyncio.timeout(SECONDS_MAX):
            assert len(await whole_body(other)) == 2000
            assert not waits.done()
            turns.cost_max = TURNS_BYTES
            assert len(await waits) == 40000


async def test_requests_of_an_engine_that_ends_go_on_over_iterations_of_the_event_loop() -> None:
    """Each is routed again or answered with an error; streams of other engines would wait for all of them."""
    reading = Reading()
    connections = [EngineConnection(reading) for _ in range(3 * ENDS_PER_ITERATION + 1)]
    went_on = [0]

    async def wait_for_head(connection: EngineConnection) -> None:
        connection.connection_made(SilentTransport())
        connection.send([REQUEST])
        with pytest.raises(EngineDisconnected):
            await connection.head()
        went_on[-1] += 1

    waiting = [asyncio.create_task(wait_for_head(connection)) for connection in connections]
    await asyncio.sleep(0)
    for connection in connections:
        connection.connection_lost(ConnectionResetError())
    while sum(went_on) < len(connections):
        went_on.append(0)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)

    assert max(went_on) <= ENDS_PER_ITERATION + 1
