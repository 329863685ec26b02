"""Bounds of what a client may send and how long it may take, before it is authenticated. Clocks are stepped."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from spillway_gateway.client import bounded_connection
from spillway_gateway.client.bounded_connection import BoundedConnection, BoundedState
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.settings import ConnectionsConfig
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

BOUNDS = {"headSeconds": 10, "idleSeconds": 20, "stalledSeconds": 30, "bodyBytesPerSecondMin": 100}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def request(content: str = "hi", *headers: bytes, stream: bool = False) -> bytes:
    """A chat request; headers: further lines."""
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "stream": stream}
    data = json.dumps(body).encode()
    lines = b"".join(line + b"\r\n" for line in headers)
    return HEAD + lines + b"content-length: %d\r\n\r\n%s" % (len(data), data)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> tuple[int, dict[str, Any]]:
        """Status and document of the next plain reply."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(size))

    async def ended(self) -> bytes:
        """The bytes that the gateway sends until it closes; none if the connection breaks."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


@asynccontextmanager
async def client_of(running: RunningGateway) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
    yield Client(reader, writer)
    writer.close()


def pass_seconds(running: RunningGateway, seconds: float) -> None:
    """Check the deadlines that count now as if so many seconds had passed."""
    running.gateway.open_connections.tick(asyncio.get_running_loop().time() + seconds)


@asynccontextmanager
async def bounded(start_engine: Any, **connections: Any) -> AsyncIterator[tuple[RunningGateway, FakeEngine]]:
    engine = await start_engine()
    config = gateway_config([engine], connections={**BOUNDS, **connections}, timeouts={"bodyReadSeconds": 10})
    async with running_gateway(config) as running:
        yield running, engine


def write_pair(folder: Path) -> dict[str, str]:
    """A certificate and its key, as `listen.tls` names them."""
    certificate, key = make_pair("gateway")
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key)
    return {"certFile": str(folder / "tls.crt"), "keyFile": str(folder / "tls.key")}


UPGRADES = {
    "h2c": (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAoAAA"),
    "websocket": (b"connection: Upgrade", b"upgrade: websocket"),
}


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("cut", [0, 1, -1, None], ids=["before the body", "in the body", "before its end", "nowhere"])
async def test_a_request_with_upgrade_is_served_as_http_1_1(start_engine: Any, upgrade: str, cut: int | None) -> None:
    async with bounded(start_engine) as (running, engine), client_of(running) as client:
        whole = request("hello", *UPGRADES[upgrade])
        at = len(whole) if cut is None else whole.index(b"\r\n\r\n") + 4 + cut if cut >= 0 else cut
        client.send(whole[:at])
        await asyncio.sleep(0)
        if whole[:at] != whole:
            await until(lambda: running.server.server_state.connections)
            client.send(whole[at:])
        status, answer = await client.reply()
        client.send(request("again"))
        assert (await client.reply())[0] == 200

    assert status == 200 and answer["choices"]
    assert engine.seen[0].body == whole.partition(b"\r\n\r\n")[2]
    assert not [name for name, _ in engine.seen[0].headers if name in (b"upgrade", b"http2-settings")]


async def test_a_chunked_body_behind_an_upgrade_arrives_and_close_still_means_close(start_engine: Any) -> None:
    body = b'{"model":"fake","messages":[]}'
    lines = (b"connection: close, Upgrade", b"upgrade: h2c", b"transfer-encoding: chunked")
    async with bounded(start_engine) as (running, engine), client_of(running) as client:
        client.send(HEAD + b"\r\n".join(lines) + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        said = await client.ended()

    assert said.startswith(b"HTTP/1.1 200 ") and b"connection: close" in said
    assert engine.seen[0].body == body


async def test_connect_is_refused(start_engine: Any) -> None:
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.reply())[0] == 405
        assert await client.ended() == b""


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (HEAD + b"a: b\r\n" * 31 + b"\r\n", 431, "request_headers_too_large"),
        (HEAD + b"a: " + b"x" * 2000 + b"\r\n\r\n", 431, "request_headers_too_large"),
        (b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % (b"x" * 1000), 414, "uri_too_long"),
        (b"GET /health?%s HTTP/1.1\r\nhost: x\r\n\r\n" % (b"x" * 1000), 414, "uri_too_long"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n", 400, "invalid_host"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nHost: b\r\n\r\n", 400, "invalid_host"),
    ],
)
async def test_a_head_out_of_bounds_is_refused_by_name(start_engine: Any, head: bytes, status: int, code: str) -> None:
    bounds = {"headBytesMax": 1500, "headersMax": 30, "targetBytesMax": 500}
    async with bounded(start_engine, **bounds) as (running, _), client_of(running) as client:
        client.send(head)
        said, answer = await client.reply()
        assert await client.ended() == b""

    assert (said, answer["error"]["code"]) == (status, code)


async def test_a_head_within_its_bounds_passes(start_engine: Any) -> None:
    bounds = {"headBytesMax": 1500, "headersMax": 30, "targetBytesMax": 500}
    async with bounded(start_engine, **bounds) as (running, _), client_of(running) as client:
        lines = b"a: b\r\n" * 28
        client.send(HEAD.replace(b"POST", b"GET").replace(b"chat/completions", b"models") + lines + b"\r\n")
        assert (await client.reply())[0] == 200
        client.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await client.reply())[0] == 200, "HTTP/1.0 knows no Host"


async def test_trailers_do_not_become_headers(start_engine: Any) -> None:
    body = b'{"model":"fake","messages":[]}'
    async with bounded(start_engine) as (running, engine), client_of(running) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        client.send(b"%x\r\n%s\r\n0\r\nx-late: 1\r\n\r\n" % (len(body), body))
        assert (await client.reply())[0] == 200

    assert b"x-late" not in dict(engine.seen[0].headers)


@pytest.mark.parametrize(("said", "status"), [(b"", None), (HEAD, 408), (request()[:-1], 408)])
async def test_a_request_that_does_not_arrive_times_out(start_engine: Any, said: bytes, status: int | None) -> None:
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(said)
        (connection,) = await connections_of(running, 1)
        await until(lambda: connection._phase.name == ("BETWEEN" if not said else "HEAD" if said == HEAD else "BODY"))
        await until(lambda: said != request()[:-1] or connection._body_seconds)
        pass_seconds(running, 9)
        assert not connection.transport.is_closing() and not connection.body_timed_out
        pass_seconds(running, 12)
        answer = await client.ended() if status is None or said == HEAD else b"%d" % (await client.reply())[0]

    assert answer == b"" if status is None else str(status).encode() in answer.split(b"\r\n")[0]


async def connections_of(running: RunningGateway, count: int) -> list[Any]:
    await until(lambda: len(running.server.server_state.connections) == count)
    return list(running.server.server_state.connections)


async def test_a_trickle_gets_no_more_time_but_bytes_at_the_least_rate_do(start_engine: Any) -> None:
    whole = request("x" * 3000)
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(whole[:1500])  # more than 10 s at 100 bytes per second ask for
        (connection,) = await connections_of(running, 1)
        await until(lambda: connection._body_bytes > 1000 and connection._body_seconds)
        pass_seconds(running, 20)
        assert not connection.body_timed_out
        client.send(whole[1500:1510])
        await until(lambda: connection._body_bytes > 1400)
        pass_seconds(running, 32)
        status, answer = await client.reply()

    assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_an_idle_connection_is_closed(start_engine: Any) -> None:
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(request())
        assert (await client.reply())[0] == 200
        pass_seconds(running, 19)
        client.send(request())
        assert (await client.reply())[0] == 200
        pass_seconds(running, 21)
        assert await client.ended() == b""


@pytest.mark.parametrize("line", [b"connection: close", b"connection: keep-alive"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_is_disconnected(start_engine: Any, stream: bool, line: bytes) -> None:
    """Kernel buffers are as small as they get, so that the reply waits in the gateway."""
    engine = await start_engine(words=60_000 if stream else 1_500_000)
    config = gateway_config([engine], connections=BOUNDS, limits={"plainReplyBufferBytes": 64 * 1024 * 1024})
    async with running_gateway(config) as running:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", int(running.url.rpartition(":")[2])))
        await loop.sock_sendall(sock, request("hi", line, stream=stream))
        (connection,) = await connections_of(running, 1)
        await until(lambda: connection.flow.write_paused)
        pass_seconds(running, 0)  # this look finds it stalled
        pass_seconds(running, 29)
        assert running.server.server_state.connections
        for seconds in (100, 200, 300):  # should the kernel have taken some more meanwhile
            pass_seconds(running, seconds)
        await until(lambda: not running.server.server_state.connections)
        await until(lambda: not running.gateway.lifecycle.running)
        sock.close()


async def test_a_full_listener_evicts_the_longest_idle_connection(start_engine: Any) -> None:
    async with bounded(start_engine, openMax=2, perAddressMax=8) as (running, _):
        running.gateway.open_connections.per_address_max = 8
        async with client_of(running) as first, client_of(running) as second:
            await connections_of(running, 2)
            first.send(request())
            assert (await first.reply())[0] == 200, "now the second has waited longer"
            async with client_of(running) as third:
                assert await second.ended() == b""
                third.send(request())
                assert (await third.reply())[0] == 200
                first.send(request())
                assert (await first.reply())[0] == 200


async def test_a_listener_whose_connections_are_all_busy_refuses_more(start_engine: Any) -> None:
    async with bounded(start_engine, openMax=1) as (running, engine):
        engine.fault = HoldInStream(0, asyncio.Event())
        async with client_of(running) as at_work:
            at_work.send(request())
            await until(lambda: engine.seen)
            waits = set()
            for _ in range(40):
                async with client_of(running) as refused:
                    head, _, body = (await refused.ended()).partition(b"\r\n\r\n")
                    assert head.split()[1] == b"503" and b"too_many_connections" in body
                    waits.add(int(head.split(b"retry-after: ")[1].split(b"\r\n")[0]))
            assert len(waits) > 1, "else those refused together return together"
            engine.fault.release.set()
            assert (await at_work.reply())[0] == 200
        assert running.gateway.open_connections.refused_total == 40


async def test_one_address_does_not_take_all_connections(start_engine: Any) -> None:
    async with bounded(start_engine, openMax=100, perAddressMax=1) as (running, engine), client_of(running) as first:
        await connections_of(running, 1)
        async with client_of(running) as second:
            assert await first.ended() == b"", "which only waited"
            engine.fault = HoldInStream(0, asyncio.Event())
            second.send(request())
            await until(lambda: engine.seen)
            async with client_of(running) as refused:
                assert (await refused.reply())[0] == 503
            engine.fault.release.set()
            assert (await second.reply())[0] == 200
        table = running.gateway.open_connections
        await until(lambda: not table._of_address and not table._idle_of and not table._idle)


async def test_a_pipelined_request_does_not_hide_a_disconnect(start_engine: Any) -> None:
    async with bounded(start_engine) as (running, engine):
        engine.fault = HoldInStream(0, asyncio.Event())
        async with client_of(running) as client:
            client.send(request("first") + request("second"))
            await until(lambda: engine.seen)
            client.send(request("third"))
        async with asyncio.timeout(120):
            await engine.seen[0].cancelled.wait()
        await until(lambda: not running.gateway.lifecycle.running)
    assert len(engine.seen) == 1


async def test_pipelined_requests_in_pieces_are_answered_in_order(start_engine: Any) -> None:
    contents = ["a" * 10, "b" * 100_000, "c" * 1000, "d"]
    data = b"".join(map(request, contents))
    async with bounded(start_engine) as (running, engine), client_of(running) as client:
        engine.max_model_len = 10**9
        for start in range(0, len(data), 5000):
            client.send(data[start : start + 5000])
            await asyncio.sleep(0)
        sizes = [(await client.reply())[1]["usage"]["prompt_tokens"] for _ in contents]

    assert [size - sizes[3] for size in sizes] == [len(content) - 1 for content in contents]


async def test_a_handshake_that_does_not_end_counts_as_a_connection(start_engine: Any, tmp_path: Path) -> None:
    tls = write_pair(tmp_path)
    config = gateway_config(
        [await start_engine()], connections={**BOUNDS, "openMax": 1}, listen={"port": 0, "tls": tls}
    )
    async with running_gateway(config) as running:
        table = running.gateway.open_connections
        async with client_of(running) as silent:
            await until(lambda: len(table) == 1)
            trust = ssl.create_default_context(cafile=tls["certFile"])
            port = int(running.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="127.0.0.1")
            assert await silent.ended() == b""
            client = Client(reader, writer)
            client.send(request())
            assert (await client.reply())[0] == 200
            assert len(table) == 1
            writer.close()
        await until(lambda: not len(table) and not table._of_address)


async def test_the_operations_listener_is_bounded_too(start_engine: Any) -> None:
    config = gateway_config([await start_engine()], listen={"port": 0, "opsPort": 0}, connections=BOUNDS)
    async with running_gateway(config) as running:
        port = int(running.ops_url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = Client(reader, writer)
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.reply())[0] == 200
        for _, each in [*silent, (reader, writer)]:
            each.close()


GARBAGE = [b"\x00garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("good", [1, 3])
async def test_whole_requests_in_front_of_garbage_are_answered_first(
    start_engine: Any, good: int, garbage: bytes
) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running, client_of(running) as client:
        client.send(request() * good + garbage)
        statuses = [(await client.reply())[0] for _ in range(good + 1)]
        rest = await client.ended()

    assert (statuses, rest) == ([200] * good + [400], b"")


@pytest.mark.parametrize("bad", [b"zz\r\n", b"\n", b"5\r\nabcdefg\r\n", b"-1\r\n", b"0x5\r\nabcde\r\n"])
@pytest.mark.parametrize("before", [b"", b'5\r\n{"a":\r\n'])
async def test_a_bad_chunk_behind_the_head_is_a_bad_request(start_engine: Any, before: bytes, bad: bytes) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        async with client_of(running) as client:
            client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + before)
            await asyncio.sleep(0)
            client.send(bad)
            status, document = await client.reply()
            assert (status, document["error"]["code"]) == (400, "invalid_http")
            assert await client.ended() == b""
        async with client_of(running) as client:  # nothing of it is left
            client.send(request())
            assert (await client.reply())[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(start_engine: Any, stream: bool) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running, client_of(running) as client:
        client.send(request(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await client.ended()).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head.lower()
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["object"] == "chat.completion"


def upload(head: bytes, part: bytes, count: int = 8) -> Callable[[socket.socket], bytes]:
    """A blocking client that reads nothing before it has sent `part` so many times: the first line of its answer."""

    def sent(connection: socket.socket) -> bytes:
        connection.sendall(head)
        for _ in range(count):
            connection.sendall(part)
        return connection.recv(4096).partition(b"\r\n")[0]

    return sent


MIB = bytes(1 << 20)
CHUNK = b"%x\r\n%s\r\n" % (len(MIB), MIB)
LENGTH = b"content-length: %d\r\n\r\n" % (8 << 20)
UPLOADS = {
    "too large": (upload(HEAD + LENGTH, MIB), b"413"),
    "too large, then closed": (upload(HEAD + b"connection: close\r\n" + LENGTH, MIB), b"413"),
    "too large, in chunks": (upload(HEAD + b"transfer-encoding: chunked\r\n\r\n", CHUNK), b"413"),
    "of HTTP/1.0": (upload(HEAD.replace(b"/1.1", b"/1.0") + LENGTH, MIB), b"413"),
    "no such path": (upload(HEAD.replace(b"chat", b"none") + LENGTH, MIB), b"404"),
    "a wrong chunk": (upload(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", CHUNK), b"400"),
    "no host": (upload(HEAD.replace(b"host: x\r\n", b"") + LENGTH, MIB), b"400"),
    "a head without end": (upload(HEAD, b"a: %s\r\n" % (b"x" * len(MIB))), b"431"),
    "a target without end": (upload(b"POST /", b"x" * len(MIB)), b"414"),
    "no HTTP": (upload(b"\0", MIB), b"400"),
}


@pytest.mark.parametrize("case", UPLOADS)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(
    start_engine: Any, tmp_path: Path, case: str, tls: bool
) -> None:
    client, status = UPLOADS[case]
    limits = {"bodyBytesMax": 100_000}
    listen: dict[str, Any] = {"port": 0}
    context = None
    if tls:
        listen["tls"] = write_pair(tmp_path)
        context = ssl.create_default_context(cafile=listen["tls"]["certFile"])
    document = gateway_config([await start_engine()], limits=limits, listen=listen)
    async with running_gateway(document) as running:

        def answer() -> bytes:
            address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
            with socket.create_connection(address, timeout=30) as plain:
                if context is None:
                    return client(plain)
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
                    return client(wrapped)

        assert (await asyncio.to_thread(answer)).split()[1] == status
        await until(lambda: not len(running.gateway.open_connections))


async def test_what_follows_an_answer_is_dropped_while_it_comes_at_a_pace(start_engine: Any) -> None:
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(HEAD.replace(b"chat", b"none") + b"content-length: 1000000\r\n\r\n")
        assert (await client.reply())[0] == 404
        (connection,) = await connections_of(running, 1)
        client.send(bytes(1500))  # more than 10 s at 100 bytes per second ask for
        await until(lambda: connection._body_bytes == 1500)
        pass_seconds(running, 11)
        client.send(bytes(10))
        await until(lambda: connection._body_bytes == 1510)
        assert not connection.transport.is_closing()
        pass_seconds(running, 22)
        assert await client.ended() == b""


async def test_a_client_that_stays_after_a_refusal_is_closed(start_engine: Any) -> None:
    async with bounded(start_engine) as (running, _), client_of(running) as client:
        client.send(b"\0")
        assert b"invalid_http" in await client.ended()
        assert len(running.gateway.open_connections) == 1
        client.send(b"still here")
        pass_seconds(running, bounded_connection.LINGER_SECONDS + 1)
        await until(lambda: not len(running.gateway.open_connections))


async def never_answers(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("parts", [1, 2, 3])
async def test_reading_pauses_only_within_a_long_body(parts: int) -> None:
    """A body that comes at once is whole before its request's task begins, and is given to it as it came."""
    config = uvicorn.Config(never_answers, lifespan="off")
    config.load()
    state = BoundedState(OpenConnections(ConnectionsConfig(), 10))
    connection = BoundedConnection(config, state, LifespanOn(config).state)
    connection.connection_made(Pipe())
    body = bytes(range(256)) * (3 * HIGH_WATER_LIMIT // 256)
    size = len(body) // parts
    connection.data_received(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:size])
    assert connection.flow.read_paused == (parts == 2), "of three parts the first one is not long yet"

    for at in range(1, parts):
        connection.data_received(body[at * size : (at + 1) * size])
    assert connection.cycle.body == body
    assert not connection.cycle.more_body
    assert isinstance(connection.cycle.body, bytes) == (parts == 1)
    for task in state.tasks:
        task.cancel()


class Pipe(asyncio.Transport):
    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False
