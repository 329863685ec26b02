"""Additions of the server's connection to uvicorn's: heads sent with bodies, disconnect callbacks, whole replies."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from spillway_gateway.client.connection import ClientConnection, ClientRequest, HeadWithBody
from spillway_gateway.testing.faults import Hang, HoldInStream, Status
from spillway_gateway.testing.running import gateway_config, running_gateway, until
from spillway_gateway.upstream.exchange import Exchange
from spillway_gateway.upstream.reply import Reply
from spillway_gateway.upstream.stream_relay import StreamRelay
from spillway_gateway.write_coalescing import WriteCoalescer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    abort = pause_reading = resume_reading = set_protocol = close  # type: ignore[assignment]


async def test_a_head_is_sent_with_the_first_bytes_of_its_body() -> None:
    wire = Wire()
    transport = HeadWithBody(wire)
    transport.write(HEAD)
    transport.write(b"{}")
    transport.write(b"more")

    assert wire.written == [HEAD + b"{}", b"more"]


async def test_with_several_requests_a_reply_is_sent_at_the_end_of_the_iteration() -> None:
    for _ in range(2):
        WriteCoalescer.of_running_loop().begin_request()
    wires = Wire(), Wire()
    for wire in wires:
        transport = HeadWithBody(wire)
        transport.write(HEAD)
        transport.write(b"{}")
    assert [wire.written for wire in wires] == [[], []]

    await asyncio.sleep(0)
    assert [wire.written for wire in wires] == [[HEAD + b"{}"], [HEAD + b"{}"]]


async def test_nothing_is_written_to_a_connection_that_was_lost_in_the_iteration() -> None:
    for _ in range(2):
        WriteCoalescer.of_running_loop().begin_request()
    wire = Wire()
    HeadWithBody(wire).write(HEAD)
    wire.closed = True
    await asyncio.sleep(0)

    assert wire.written == []


async def test_a_reply_to_a_lost_connection_whose_end_waits_for_its_turn_is_dropped() -> None:
    """uvloop raises if such a transport is written to."""
    wire = Wire()
    transport = HeadWithBody(wire)
    transport.write(HEAD)
    transport.write(b"{}")
    wire.closed = True
    transport.write(b"more")

    assert wire.written == [HEAD + b"{}"]


async def test_a_head_without_a_body_is_sent_alone() -> None:
    wire = Wire()
    HeadWithBody(wire).write(HEAD)
    await asyncio.sleep(0)

    assert wire.written == [HEAD]


async def test_closing_sends_what_was_held_back() -> None:
    wire = Wire()
    transport = HeadWithBody(wire)
    transport.write(HEAD)
    transport.close()
    await asyncio.sleep(0)

    assert wire.written == [HEAD] and wire.closed


async def test_an_interim_reply_does_not_wait() -> None:
    wire = Wire()
    HeadWithBody(wire).write(b"HTTP/1.1 100 Continue\r\n\r\n")

    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]


def chat(content: str) -> bytes:
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def test_a_disconnect_after_a_long_body_is_seen(start_engine: Any) -> None:
    """A body this long pauses reading, and a paused connection reports no EOF."""
    engine = await start_engine(max_model_len=10**9)
    engine.fault = HoldInStream(0, asyncio.Event())
    async with running_gateway(gateway_config([engine])) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(chat("x" * 1_000_000))
        await until(lambda: engine.seen)
        writer.close()
        async with asyncio.timeout(120):
            await engine.seen[0].cancelled.wait()
        await until(lambda: not running.gateway.lifecycle.running)


async def test_what_is_not_http_does_not_get_into_a_stream(start_engine: Any) -> None:
    engine = await start_engine()
    release = asyncio.Event()
    engine.fault = HoldInStream(2, release)
    async with running_gateway(gateway_config([engine])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(chat("hello"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"\x01\x02 not http\r\n\r\n")
        rest = await reader.read()
        writer.close()

    assert b"400 Bad Request" not in rest and b"invalid_http" not in rest


async def test_what_is_not_http_is_refused_as_everything_else(start_engine: Any) -> None:
    async with running_gateway(gateway_config([await start_engine()])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(b"\x01\x02 not http\r\n\r\n")
        answer = await reader.read()
        writer.close()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def plain_chat(content: str, *, close: bool = False) -> bytes:
    data = json.dumps({"model": "fake", "messages": [{"role": "user", "content": content}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    return (head + ("connection: close\r\n" if close else "") + "\r\n").encode() + data


async def test_requests_sent_without_waiting_get_their_own_replies_in_order(start_engine: Any) -> None:
    """Both are parsed before the first is answered, so a reply must know its request and not the connection's last."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(plain_chat("first " * 3) + plain_chat("second " * 7, close=True))
        answers = await reader.read()
        writer.close()

    replies = answers.split(b"HTTP/1.1 ")[1:]
    heads, bodies = zip(*(reply.split(b"\r\n\r\n", 1) for reply in replies), strict=True)
    assert [head[:3] for head in heads] == [b"200", b"200"]
    assert [b"connection: close" in head for head in heads] == [False, True]
    prompts = [json.loads(body)["usage"]["prompt_tokens"] for body in bodies]
    assert prompts[0] < prompts[1]
    assert [int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) for head in heads] == [
        len(body) for body in bodies
    ]


async def test_a_draining_gateway_closes_a_connection_with_its_next_reply(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(plain_chat("before"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))

        running.gateway.lifecycle.drain()
        writer.write(plain_chat("after"))
        answer = await reader.read()  # to the end of the connection
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close\r\n" in answer


async def test_a_head_request_gets_no_body(start_engine: Any) -> None:
    """A body after it would be taken for the start of the next reply."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        made = json.dumps({"model": "fake", "input": "hello"}).encode()
        writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(made) + made)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        path = f"/v1/responses/{json.loads(await reader.readexactly(size))['id']}"
        writer.write(f"HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


KEPT = (ClientConnection, ClientRequest, Exchange, HeadWithBody, Reply, RequestResponseCycle, StreamRelay)


def kept() -> Counter[type]:
    return Counter(type(each) for each in gc.get_objects() if type(each) in KEPT)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("leaves", [False, True], ids=["read", "left"])
async def test_requests_and_connections_that_end_leave_nothing_to_the_garbage_collector(
    stream: bool, version: bytes, leaves: bool, start_engine: Any
) -> None:
    """A thousand clients that leave at once were 95,000 objects for one run of it."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        body = json.dumps({"model": "fake", "prompt": "hello", "stream": stream}).encode()
        request = b"POST /v1/completions HTTP/%s\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
        request %= (version, len(body), body)
        gc.collect()
        gc.disable()
        try:
            before = kept()
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
                for _ in range(1 if leaves or version == b"1.0" else 3):
                    writer.write(request)
                    await reader.readuntil(b"}" if leaves else b"[DONE]\n\n" if stream else b"}}")
                writer.close()
                await writer.wait_closed()
            await until(lambda: not len(running.gateway.open_connections))
            # The last one may be held until the next one.
            async with asyncio.timeout(60):
                await until(lambda: all(count <= 1 for count in (kept() - before).values()))
        finally:
            gc.enable()


@pytest.mark.parametrize("fault", [Hang(), Status(503)], ids=str)
@pytest.mark.parametrize("requests", [1, 2], ids=["one", "pipelined"])
async def test_requests_that_nobody_answers_leave_nothing_to_the_garbage_collector_or_in_the_log(
    fault: Any, requests: int, start_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that a frame holds, in whose traceback it is, keeps the request. Of two requests on a connection uvicorn
    lets only the last one know that it is lost, and then logs that the other one has no answer."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        engine.fault = fault
        gc.collect()
        gc.disable()
        try:
            before = kept()
            for number in range(1, 6):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
                writer.write(plain_chat("hello") * requests)
                if fault == Status(503):
                    await reader.readuntil(b"}}")
                else:
                    await until(lambda number=number: len(engine.seen) == number)
                writer.close()
                await writer.wait_closed()
                await until(lambda: not running.gateway.lifecycle.running)
            await until(lambda: not len(running.gateway.open_connections))
            async with asyncio.timeout(60):
                await until(lambda: all(count <= 1 for count in (kept() - before).values()))
        finally:
            gc.enable()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
