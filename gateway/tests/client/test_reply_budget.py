"""Replies that clients do not read, through a real gateway: sockets that send a request and read nothing."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from spillway_gateway.client import open_connections
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.client.reply_budget import STALLED_SECONDS, ReplyBudget, UnreadBytes
from spillway_gateway.config.settings import ConnectionsConfig
from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.running import gateway_config, running_gateway, until

MIB = 1024 * 1024
BOUND = 4 * MIB
READERS = 16
TEXT = "x" * (6 * MIB)  # more than the kernel takes
PIECE = 64 * 1024


def scripted(path: str, body: dict[str, Any]) -> Scripted:
    pieces = [{"choices": [{"text": TEXT[:PIECE]}]}] * (len(TEXT) // PIECE)
    return Scripted(document={"choices": [{"text": TEXT}]}, events=pieces)


def silent_reader(stack: ExitStack, url: str, *, stream: bool) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    body = json.dumps({"model": "fake", "prompt": "x", "stream": stream}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_wait_for_clients_that_read_nothing_and_others_are_served(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(open_connections, "STALLED_SECONDS", 1e9)  # none is closed here
    engine: FakeEngine = await start_engine(script=scripted)
    document = gateway_config([engine], limits={"repliesBytesMax": BOUND})
    with ExitStack() as stack:
        async with running_gateway(document) as gateway, aiohttp.ClientSession() as http:
            budget = gateway.gateway.open_connections.reply_budget
            for at in range(READERS):
                silent_reader(stack, gateway.url, stream=stream)
                await until(lambda at=at: len(engine.seen) == at + 1)
            most = READERS * 0.75 * MIB  # buffers of a connection, beside what the budget holds
            held = []
            for _ in range(3):  # a reader is served whole meanwhile
                body = {"model": "fake", "prompt": "y", "stream": stream}
                async with http.post(gateway.url + "/v1/completions", json=body) as reply:
                    assert reply.status == 200
                    assert (await reply.read()).count(b"x") >= len(TEXT)
                held.append(budget.held_bytes)
            assert max(held) <= BOUND + most
            assert budget.ended_total == 0
            stack.close()
            await until(lambda: budget.held_bytes == 0)


async def test_what_stalls_is_closed_for_room(start_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_connections, "STALLED_SECONDS", 0.0)
    monkeypatch.setattr(open_connections, "CHECK_SECONDS", 0.1)
    engine: FakeEngine = await start_engine(script=scripted)
    with ExitStack() as stack:
        async with running_gateway(gateway_config([engine], limits={"repliesBytesMax": MIB})) as gateway:
            budget = gateway.gateway.open_connections.reply_budget
            for _ in range(READERS):
                silent_reader(stack, gateway.url, stream=False)
            await until(lambda: budget.ended_total > 0 and len(engine.seen) == READERS and budget.held_bytes <= MIB)
            await until(lambda: gateway.engine("fake-0").running_requests < READERS)
            stack.close()


class Reader:
    """A connection that holds a reply's bytes. since: it has read nothing; None: it reads."""

    def __init__(self, connections: OpenConnections, held_bytes: int, since: float | None) -> None:
        self.budget = connections.reply_budget
        self.budget.hold(held_bytes)
        self.held_bytes = held_bytes
        self.since = since
        self.evicted = False
        connections.admit(self, "")

    def is_expired(self, now: float) -> bool:
        return False

    def expire(self, now: float) -> None: ...

    def stalled_since(self) -> float | None:
        return None if self.evicted else self.since

    def evict(self) -> None:
        self.evicted = True
        self.budget.hold(-self.held_bytes)


def test_those_that_read_nothing_for_longest_make_room_and_no_other() -> None:
    bytes_max = [100]
    connections = OpenConnections(ConnectionsConfig(), 100, replies_bytes_max=lambda: bytes_max[-1])
    reads = [Reader(connections, 60, None) for _ in range(3)]
    just = Reader(connections, 60, 1000.0 - STALLED_SECONDS / 2)
    longest, long = Reader(connections, 60, 10.0), Reader(connections, 60, 900.0)
    bytes_max.append(300)
    connections.tick(1000.0)
    assert [longest.evicted, long.evicted, just.evicted] == [True, False, False]
    bytes_max.append(0)
    connections.tick(1000.1)
    assert long.evicted and not just.evicted and not any(reader.evicted for reader in reads)
    assert connections.reply_budget.ended_total == 2


def test_a_budget_gives_no_more_than_it_has() -> None:
    budget = ReplyBudget(lambda: 10)
    assert budget.take(10) and not budget.take(1)
    budget.hold(5)
    assert budget.excess_bytes == 5
    budget.hold(-15)
    assert (budget.excess_bytes, budget.held_bytes) == (0, 0)


def test_a_client_that_has_read_everything_between_two_looks_reads() -> None:
    unread = UnreadBytes(ReplyBudget(lambda: MIB), 60.0)
    for now in range(0, 200, 10):  # as many bytes each time, of another part
        assert not unread.look(1_000, float(now))
        unread.drained()
    assert not unread.look(1_000, 200.0) and not unread.look(1_000, 260.0)
    assert unread.look(1_000, 261.0)
