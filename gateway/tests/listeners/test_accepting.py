"""Clients that connect at once: some are accepted in each event loop iteration, and few TLS handshakes begin."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop

from spillway_gateway.client.open_connections import REQUESTS_PER_ITERATION as PER_ITERATION
from spillway_gateway.listeners.accepting import ACCEPTED_AT_ONCE, Listener
from spillway_gateway.listeners.server import bind, bind_shared
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.running import gateway_config, running_gateway, until

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.SelectorEventLoop, uvloop.Loop]
CLIENTS = 4 * PER_ITERATION + 3


class Accepted(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, made: asyncio.Future[asyncio.BaseTransport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.set_result(transport)


def hello(trust: ssl.SSLContext) -> bytes:
    """The first bytes of a client."""
    outgoing = ssl.MemoryBIO()
    client = trust.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without its server")


async def test_handshakes_that_begin_at_once_are_computed_a_few_at_a_time(start_engine: Any, tmp_path: Path) -> None:
    certificate, key = make_pair("gateway")
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    tls = {"certFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key")}
    trust = ssl.create_default_context(cafile=tls["certFile"])
    config = gateway_config([await start_engine()], listen={"port": 0, "tls": tls})
    computed = [0]

    def counted(*_: object) -> None:
        computed[-1] += 1

    async with running_gateway(config) as running:
        assert running.server.certificate is not None
        running.server.certificate.context.sni_callback = counted  # called for each first message of a client
        table = running.gateway.open_connections
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(CLIENTS)]
            for client in clients:
                client.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
            await until(lambda: len(table) == CLIENTS)
            for client in clients:  # the loop runs no iteration meanwhile
                client.sendall(hello(trust))
            while sum(computed) < CLIENTS:
                computed.append(0)
                await asyncio.sleep(0)
        await until(lambda: not len(table))

    assert max(computed) <= PER_ITERATION


@pytest.mark.parametrize("loop_factory", LOOPS, ids=lambda factory: factory.__module__.partition(".")[0])
def test_clients_that_connect_at_once_are_accepted_in_few_iterations(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The last client would otherwise wait for as many iterations as there are clients, however long streams make
    each."""
    clients_count = 4 * ACCEPTED_AT_ONCE + 3

    async def accept_all() -> list[int]:
        async with AsyncExitStack() as stack:
            engine = FakeEngine()
            await engine.start()
            stack.push_async_callback(engine.stop)
            running = await stack.enter_async_context(running_gateway(gateway_config([engine])))
            table = running.gateway.open_connections
            before = len(table)
            address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
            for _ in range(clients_count):  # the loop runs no iteration meanwhile
                stack.enter_context(closing(socket.create_connection(address)))
            accepted = [before]
            while accepted[-1] < before + clients_count:
                await asyncio.sleep(0)
                accepted.append(len(table))
        return [after - earlier for earlier, after in pairwise(accepted) if after != earlier]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        steps = runner.run(accept_all())

    assert max(steps) <= ACCEPTED_AT_ONCE
    assert len(steps) <= 2 * (clients_count // ACCEPTED_AT_ONCE + 1)


@pytest.mark.parametrize("listening", [bind, bind_shared])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_each_event_of_a_stream_leaves_at_once(
    listening: Callable[[str, int], socket.socket], new_loop: Callable[[], asyncio.AbstractEventLoop]
):
    """The listener sets TCP_NODELAY: else the kernel holds what follows an event until the client has confirmed it."""

    async def nodelay() -> int:
        loop, accepted = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        listener = Listener(serving, lambda _: Accepted(accepted))
        listener.start()
        try:
            with socket.create_connection(serving.getsockname()):
                transport = await accepted
                found: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                transport.abort()
                return found
        finally:
            loop.remove_reader(serving.fileno())

    with listening("127.0.0.1", 0) as serving, asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(nodelay()) == 1
