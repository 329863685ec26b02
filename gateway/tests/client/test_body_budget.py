"""One bound over all bodies: long ones fill no more than their share, short ones still pass."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from spillway_gateway.client.body_budget import SHORT_BYTES_MAX, BodyBudget, BodyBudgetSpent
from spillway_gateway.config.settings import LONG_BODY_SHARE
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import gateway_config, running_gateway, until

MIB = 1024 * 1024
BOUND = 16 * MIB


def test_long_bodies_leave_a_share_to_short_ones() -> None:
    budget = BodyBudget(lambda: BOUND)
    share = int(BOUND * LONG_BODY_SHARE)
    budget.reserve(share, share)
    with pytest.raises(BodyBudgetSpent):
        budget.reserve(1, SHORT_BYTES_MAX + 1)
    for _ in range((BOUND - share) // MIB):
        budget.reserve(MIB, SHORT_BYTES_MAX)
    with pytest.raises(BodyBudgetSpent):
        budget.reserve(1, 1)
    budget.release(1)
    budget.reserve(1, 1)


def chat(content_bytes: int, *headers: bytes, declare: bool = True) -> bytes:
    data = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "x" * content_bytes}]}).encode()
    lines = b"".join(line + b"\r\n" for line in headers)
    if declare:
        return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s" % (
            lines,
            len(data),
            data,
        )
    framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % lines + framed


async def status_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    document = json.loads(await reader.readexactly(size))
    if head.split()[1] == b"503":
        assert b"retry-after" in head
    return int(head.split()[1]), document


@pytest.mark.parametrize("declare", [True, False], ids=["declared", "chunked"])
async def test_bodies_beyond_the_bound_are_refused_until_others_are_answered(start_engine: Any, declare: bool) -> None:
    engine = await start_engine(tokenize=lambda body: [1])  # it would take longer to read them than the gateway
    limits = {"bodyBytesMax": 8 * MIB, "bodiesBytesMax": BOUND}
    async with running_gateway(gateway_config([engine], limits=limits)) as running:
        budget = running.gateway.open_connections.body_budget
        port = int(running.url.rpartition(":")[2])
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        engine.fault = HoldInStream(0, asyncio.Event())
        for count, (_, writer) in enumerate(clients[:2], 1):
            writer.write(chat(5 * MIB))
            await until(lambda wanted=count: len(engine.seen) == wanted)
        assert budget.reserved_bytes > 10 * MIB, "long bodies count until they are answered"

        clients[2][1].write(chat(5 * MIB, declare=declare))
        status, answer = await status_of(clients[2][0])
        assert (status, answer["error"]["code"]) == (503, "gateway_overloaded")
        engine.fault.release.set()
        engine.fault = None
        clients[3][1].write(chat(500_000))
        for reader, _ in (*clients[:2], clients[3]):
            assert (await status_of(reader))[0] == 200
        await until(lambda: budget.reserved_bytes == 0)
        for _, writer in clients:
            writer.close()


async def test_a_client_that_disconnects_releases_its_bytes(start_engine: Any) -> None:
    async with running_gateway(gateway_config([await start_engine()])) as running:
        budget = running.gateway.open_connections.body_budget
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(chat(5 * MIB)[: 3 * MIB])
        await until(lambda: budget.reserved_bytes > 2 * MIB)
        writer.close()
        await until(lambda: budget.reserved_bytes == 0)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"gzip, identity", b"gzip\r\ncontent-encoding: identity"])
@pytest.mark.parametrize("before", [b"", b"content-encoding: identity\r\n"])
async def test_a_compressed_body_is_refused_by_name(start_engine: Any, encoding: bytes, before: bytes) -> None:
    async with running_gateway(gateway_config([await start_engine()])) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(chat(10, before + b"content-encoding: " + encoding))
        status, answer = await status_of(reader)
        writer.write(chat(10, b"content-encoding: identity"))
        assert (await status_of(reader))[0] == 200
        writer.close()

    assert (status, answer["error"]["code"]) == (415, "unsupported_content_encoding")
    assert encoding.partition(b"\r")[0].decode() in answer["error"]["message"]
