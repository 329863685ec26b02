"""A listener with TLS, and a certificate that is replaced while it serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spillway_gateway.config.certificate import Certificate
from spillway_gateway.config.settings import TlsConfig
from spillway_gateway.errors import ConfigError
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.running import gateway_config, running_gateway, until


def write_pair(folder: Path, pair: tuple[bytes, bytes]) -> TlsConfig:
    for name, content in zip(("tls.crt", "tls.key"), pair, strict=True):
        beside = folder / f"{name}.new"
        beside.write_bytes(content)
        beside.replace(folder / name)
    return TlsConfig(str(folder / "tls.crt"), str(folder / "tls.key"), 0.05)


async def served_certificate(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_requests_and_streams_over_tls_and_a_new_certificate(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    first, second = make_pair("first"), make_pair("second")
    tls = write_pair(tmp_path, first)
    listen = {"tls": {"certFile": tls.cert_file, "keyFile": tls.key_file, "reloadSeconds": 0.05}, "opsPort": 0}
    trust = ssl.create_default_context(cadata=first[0].decode())
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with (
        running_gateway(gateway_config([engine], listen=listen)) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as client,
    ):
        async with client.post(running.url + "/v1/chat/completions", json=body) as reply:
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        async with client.get(running.ops_url + "/ready") as reply:  # plain: inside the cluster
            assert reply.status == 200
        certificate = running.server.certificate
        assert certificate is not None

        (tmp_path / "tls.crt").write_bytes(second[0])  # its key is not there yet
        await asyncio.to_thread(certificate.reload)
        assert await served_certificate(running.url) == first[0].decode()
        write_pair(tmp_path, second)
        await until(lambda: certificate.reloads_total)
        assert await served_certificate(running.url) == second[0].decode()
        async with client.post(running.url + "/v1/chat/completions", json=body) as reply:  # on the old connection
            assert reply.status == 200


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen.tls: .*absent"):
        Certificate(TlsConfig(str(tmp_path / "absent"), str(tmp_path / "absent")))
    config = write_pair(tmp_path, (make_pair("a")[0], make_pair("b")[1]))
    with pytest.raises(ConfigError, match=r"listen\.tls: "):
        Certificate(config)
