"""Pages of other origins: preflights without a key, and headers on every answer, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.config.settings import parse_config
from spillway_gateway.errors import ConfigError
from spillway_gateway.testing.running import gateway_config, running_gateway

KEY = "sk-a" + "0" * 40
PAGE = "http://webui.example.com"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def auth(folder: Path) -> dict[str, Any]:
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_key(KEY)]}]}))
    (folder / "salt").write_text("s" * 32)
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}


def allowed(reply: aiohttp.ClientResponse) -> list[str]:
    return reply.headers.getall("access-control-allow-origin", [])


async def test_a_preflight_needs_no_key_on_any_route(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine], auth=auth(tmp_path))) as running:
        for path in [*(route.path for route in ROUTES), "/v1/models", "/v1/models/fake", "/v1/responses/resp_1"]:
            async with client.options(running.url + path, headers=ASKS) as reply:
                assert reply.status == 200 and allowed(reply) == ["*"], path
                assert "POST" in reply.headers["access-control-allow-methods"]
                assert reply.headers["access-control-allow-headers"] == "authorization"
        async with client.options(running.url + "/v1/models") as no_preflight:
            assert no_preflight.status == 405
    assert not engine.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_has_the_header_once(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path, stream: bool
) -> None:
    engine = await start_engine(name_header="Access-Control-Allow-Origin")  # as vLLM's own server sends one
    async with running_gateway(gateway_config([engine], auth=auth(tmp_path))) as running:
        keyed = {"origin": PAGE, "authorization": f"Bearer {KEY}"}

        async def ask(path: str, headers: dict[str, str], **body: Any) -> tuple[int, list[str]]:
            method = "POST" if body else "GET"
            async with client.request(method, running.url + path, json=body or None, headers=headers) as reply:
                await reply.read()
                return reply.status, allowed(reply)

        chat = "/v1/chat/completions"
        assert await ask(chat, keyed, **CHAT, stream=stream) == (200, ["*"])
        assert await ask(chat, keyed, **CHAT | {"model": "none"}) == (404, ["*"])
        assert await ask(chat, {"origin": PAGE}, **CHAT) == (401, ["*"])
        assert await ask("/v1/models", keyed) == (200, ["*"])
        assert await ask("/v1/models", {"origin": PAGE}) == (401, ["*"])
        assert await ask("/nothing", {"origin": PAGE}) == (404, ["*"])
        assert await ask(chat, {"origin": PAGE}) == (405, ["*"])
        await engine.stop()
        assert (await ask(chat, keyed, **CHAT))[1] == ["*"]  # 502 or 503
        assert (await ask("/v1/models", {"authorization": f"Bearer {KEY}"}))[1] == []


async def test_a_list_of_origins_admits_them_alone(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine(name_header="Access-Control-Allow-Origin")
    cors = {"origins": [PAGE, "null"], "methods": ["GET", "POST"], "headers": ["Authorization"]}
    async with running_gateway(gateway_config([engine], cors=cors)) as running:
        url = running.url + "/v1/chat/completions"
        for origin, expected in ((PAGE, [PAGE]), ("null", ["null"]), ("https://webui.example.com", []), (None, [])):
            headers = {} if origin is None else {"origin": origin}
            async with client.post(url, json=CHAT, headers=headers) as reply:
                assert (reply.status, allowed(reply)) == (200, expected)
                assert reply.headers["vary"] == "Origin"
        for change, status in (
            ({}, 200),
            ({"origin": "http://other"}, 400),
            ({"access-control-request-method": "DELETE"}, 400),
            ({"access-control-request-headers": "authorization, content-type"}, 200),
            ({"access-control-request-headers": "authorization, x-other"}, 400),
        ):
            async with client.options(url, headers=ASKS | change) as reply:
                assert reply.status == status, change
                assert allowed(reply) == ([] if "origin" in change else [PAGE])


async def test_without_origins_nothing_is_said(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine(name_header="Access-Control-Allow-Origin")
    async with running_gateway(gateway_config([engine], cors={"origins": []})) as running:
        url = running.url + "/v1/chat/completions"
        async with client.options(url, headers=ASKS) as reply:
            assert (reply.status, allowed(reply)) == (405, [])
        async with client.post(url, json=CHAT, headers={"origin": PAGE}) as reply:
            assert (reply.status, allowed(reply)) == (200, [])


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n" + b"a: b\r\n" * 2000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nOrigin: http://a\r\n\r\n",
        b"GET / HTTP/1.1\r\nOrigin: http://a\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\r\nOrigin: http://a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["headers", "target", "syntax", "host", "chunk"],
)
@pytest.mark.parametrize("origins", [["*"], ["http://a"], ["http://b"], []])
async def test_a_refused_request_has_the_header_too(start_engine: Any, sent: bytes, origins: list[str]) -> None:
    async with running_gateway(gateway_config([await start_engine()], cors={"origins": origins})) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
    assert head.startswith(b"http/1.1 4")
    knows_origin = not sent.startswith(b"GET /a") and b"no header" not in sent  # else the fault comes first
    expected = b"*" if origins == ["*"] else b"http://a" if origins == ["http://a"] and knows_origin else None
    found = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"access-control-allow-origin")]
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("cors", "said"),
    [
        ({"origins": ["webui.example.com"]}, "cors.origins: 'webui.example.com' given"),
        ({"origins": ["https://a.example.com/"]}, "cors.origins: 'https://a.example.com/' given"),
        ({"origins": ["*.example.com"]}, "cors.origins"),
        ({"methods": ["GET, POST"]}, "cors.methods: 'GET, POST' given"),
        ({"headers": ["x:y"]}, "cors.headers: 'x:y' given"),
    ],
)
def test_wrong_names_are_refused(cors: dict[str, Any], said: str) -> None:
    models = [{"name": "m", "engines": [{"name": "e", "url": "http://e:1"}]}]
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        parse_config({"models": models, "cors": cors})


@pytest.mark.parametrize(
    "origin", ["http://[::1]:3000", "tauri://localhost", "https://a.b:8443", "chrome-extension://abc"]
)
def test_what_browsers_send_is_taken(origin: str) -> None:
    models = [{"name": "m", "engines": [{"name": "e", "url": "http://e:1"}]}]
    assert parse_config({"models": models, "cors": {"origins": [origin]}}).cors.origins == (origin,)
