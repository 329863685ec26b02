"""Connect timeouts when the event loop itself runs late, and the TLS context of an engine's connections."""

from __future__ import annotations

import asyncio
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.upstream.connection import EngineConnection
from spillway_gateway.upstream.pool import (
    EXTENSIONS_MAX,
    LATE_SECONDS,
    TLS_CONTEXT_SECONDS,
    ConnectionPool,
    _patient_timeout,
    loop_was_late,
)


def test_a_late_loop_grants_the_time_again_a_bounded_number_of_times() -> None:
    assert not loop_was_late(10.0, 10.0, 0)
    assert loop_was_late(10.0 + 2 * LATE_SECONDS, 10.0, EXTENSIONS_MAX - 1)
    assert not loop_was_late(10.0 + 2 * LATE_SECONDS, 10.0, EXTENSIONS_MAX)


async def test_a_connect_that_is_never_answered_times_out() -> None:
    with pytest.raises(TimeoutError):
        async with _patient_timeout(0.01):
            await asyncio.get_running_loop().create_future()


async def test_a_connect_that_is_answered_does_not() -> None:
    async with _patient_timeout(3600.0):
        await asyncio.sleep(0)


async def test_connections_over_tls_share_a_context_that_no_event_loop_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building one costs about 20 ms, which would be every other stream's pause."""
    certificate, key = make_pair("engine")
    (tmp_path / "tls.crt").write_bytes(certificate)
    (tmp_path / "tls.key").write_bytes(key)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=server_context)
    builders: list[threading.Thread] = []
    build = ssl.create_default_context

    def counted(*arguments: Any, **options: Any) -> ssl.SSLContext:
        builders.append(threading.current_thread())
        return build(cadata=certificate.decode())

    monkeypatch.setattr(ssl, "create_default_context", counted)
    now = 1000.0
    pool = ConnectionPool(lambda: 8, lambda: 30.0, lambda: now)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine = Engine("m", EngineConfig("e", url), RoutingConfig())

    async def connect() -> EngineConnection:
        return await pool.open(engine)

    connections = await asyncio.gather(*(connect() for _ in range(4)))
    assert len(builders) == 1 and builders[0] is not threading.main_thread()

    now += TLS_CONTEXT_SECONDS
    connections.append(await connect())
    assert len(builders) == 2, "changed authorities are read again"
    for connection in connections:
        connection.abort()
    server.close()
