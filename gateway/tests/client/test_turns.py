"""Requests that arrive at once begin a few in each event loop iteration, in order, through a real gateway too; and
connections that are lost at once end a few at a time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway_gateway.client.connection import ClientConnection
from spillway_gateway.client.open_connections import ENDS_PER_ITERATION
from spillway_gateway.client.open_connections import REQUESTS_PER_ITERATION as PER_ITERATION
from spillway_gateway.testing.running import gateway_config, running_gateway, until
from spillway_gateway.turns import Turns

CLIENTS = 4 * PER_ITERATION + 3
HEAD_SECONDS = 10


def request(number: int) -> bytes:
    body = b'{"model":"fake","prompt":"%d"}' % number
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5 * PER_ITERATION), max_size=6))
def test_no_iteration_begins_more_than_its_share_and_the_order_stays(arrivals: list[int]) -> None:
    """arrivals: how many arrive in each iteration."""
    turns = Turns(PER_ITERATION)
    begun: list[list[int]] = []

    async def arrive() -> None:
        loop, number = asyncio.get_running_loop(), 0
        left = [*arrivals, *[0] * (sum(arrivals) // PER_ITERATION + 3)]
        for count in left:
            begun.append([])
            for _ in range(count):
                number += 1
                if turns.take(loop, lambda taken=number: begun[-1].append(taken)):  # type: ignore[misc]
                    begun[-1].append(number)
            await asyncio.sleep(0)

    asyncio.run(arrive())
    assert [number for each in begun for number in each] == list(range(1, sum(arrivals) + 1))
    # An iteration of the test ends in the middle of one of the loop's.
    assert all(len(each) <= 2 * PER_ITERATION for each in begun)


async def test_what_leaves_is_kept_no_more_and_takes_no_turn_of_others() -> None:
    turns, loop = Turns(0), asyncio.get_running_loop()
    begun: list[int] = []
    waiting = [partial(begun.append, number) for number in range(100)]
    assert not any(turns.take(loop, begin) for begin in waiting)
    left = asyncio.create_task(turns.wait())
    await asyncio.sleep(0)
    for begin in waiting[:-1]:
        turns.leave(begin)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert len(turns._waiting) == 1
    turns.cost_max = 1
    await until(lambda: not turns._waiting)
    assert begun == [99]


def connected(stack: ExitStack, url: str) -> socket.socket:
    client = stack.enter_context(socket.socket())
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return client


async def read_reply(client: socket.socket) -> bytes:
    client.setblocking(False)
    reply = b""
    while b'"choices"' not in reply:
        part = await asyncio.get_running_loop().sock_recv(client, 65536)
        assert part, f"closed after {reply!r}"
        reply += part
    return reply


async def test_clients_that_send_at_once_begin_a_few_at_a_time_and_are_all_answered(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = [0]
    start = ClientConnection._start_asgi_task

    def counted(connection: ClientConnection, *arguments: Any) -> None:
        starts[-1] += 1
        start(connection, *arguments)

    monkeypatch.setattr(ClientConnection, "_start_asgi_task", counted)
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        with ExitStack() as stack:
            clients = [connected(stack, running.url) for _ in range(CLIENTS)]
            await until(lambda: len(running.server.server_state.connections) == CLIENTS)
            for number, client in enumerate(clients):  # the loop runs no iteration meanwhile
                client.sendall(request(number))
            while sum(starts) < CLIENTS:
                starts.append(0)
                await asyncio.sleep(0)
            replies = [await read_reply(client) for client in clients]

    assert all(reply.startswith(b"HTTP/1.1 200 ") for reply in replies)
    assert max(starts) <= PER_ITERATION


async def test_a_request_that_waits_is_neither_evicted_nor_timed_out_and_may_leave(start_engine: Any) -> None:
    """No iteration has a turn until the test says so."""
    engine = await start_engine()
    bounds = {"headSeconds": HEAD_SECONDS, "openMax": 16, "perAddressMax": 2}
    async with running_gateway(gateway_config([engine], connections=bounds)) as running:
        turns = running.gateway.open_connections.request_turns
        turns.cost_max = 0
        with ExitStack() as stack:
            whole, half = (connected(stack, running.url) for _ in range(2))
            connections = running.server.server_state.connections
            await until(lambda: len(connections) == 2)
            whole.sendall(request(1))
            half.sendall(request(2)[:20])
            await until(lambda: all(connection._waits_since is not None for connection in connections))
            half.sendall(request(2)[20:])
            running.gateway.open_connections.tick(asyncio.get_running_loop().time() + 2 * HEAD_SECONDS)
            refused = connected(stack, running.url)
            refused.setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(refused, 65536)
            assert said.startswith(b"HTTP/1.1 503 ")
            turns.cost_max = 1
            assert (await read_reply(whole)).startswith(b"HTTP/1.1 200 ")
            assert (await read_reply(half)).startswith(b"HTTP/1.1 200 ")

            await until(lambda: len(running.gateway.open_connections) == 2)
            turns.cost_max = 0
            half.sendall(request(3))
            await until(lambda: any(connection._waits_since is not None for connection in connections))
            half.close()
            await until(lambda: len(running.gateway.open_connections) == 1)
            turns.cost_max = 1
            whole.sendall(request(4))
            assert (await read_reply(whole)).startswith(b"HTTP/1.1 200 ")
    assert len(engine.seen) == 3


async def test_connections_that_are_lost_at_once_end_a_few_at_a_time(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = [0]
    ended = ClientConnection.ended

    def counted(connection: ClientConnection, exc: Exception | None) -> None:
        ends[-1] += 1
        ended(connection, exc)

    monkeypatch.setattr(ClientConnection, "ended", counted)
    async with running_gateway(gateway_config([await start_engine()])) as running:
        with ExitStack() as stack:
            for _ in range(3 * ENDS_PER_ITERATION):
                connected(stack, running.url)
            connections = running.gateway.open_connections
            await until(lambda: len(connections) == 3 * ENDS_PER_ITERATION)
        while len(connections):
            ends.append(0)
            await asyncio.sleep(0)
    assert sum(ends) == 3 * ENDS_PER_ITERATION
    assert max(ends) <= ENDS_PER_ITERATION
