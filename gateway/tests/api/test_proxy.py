"""Bytes, headers and errors that pass through the gateway, and answers of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import gateway_config, running_gateway

CHAT = "/v1/chat/completions"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


async def post(client: aiohttp.ClientSession, url: str, body: bytes, **headers: str) -> tuple[int, Any, bytes]:
    all_headers = {"content-type": "application/json", **headers}
    async with client.post(url, data=body, headers=all_headers) as reply:
        return reply.status, reply.headers, await reply.read()


async def test_request_and_reply_bytes_are_unchanged(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    body = b'{ "max_completion_tokens":5, "n":1.0,"messages":[{"role":"user","content":"\\u00e9"}],"model":"fake"}'
    async with running_gateway(gateway_config([engine])) as running:
        for stream in (False, True):
            sent = body if not stream else body[:-1] + b',"stream":true}'
            direct = await post(client, engine.url + CHAT, sent)
            through = await post(client, running.url + CHAT, sent, traceparent="00-1-2-03")

            assert through[0] == 200
            assert through[2] == direct[2]
            assert engine.seen[-1].body == sent
            assert (b"traceparent", b"00-1-2-03") in engine.seen[-1].headers
    assert through[1]["content-type"].startswith("text/event-stream")
    assert through[1]["x-accel-buffering"] == "no"
    assert through[1]["cache-control"] == "no-cache"


async def test_a_chunk_passes_before_the_next_exists(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    release = asyncio.Event()
    engine.fault = HoldInStream(2, release)
    async with (
        running_gateway(gateway_config([engine])) as running,
        client.post(running.url + CHAT, data=chat(stream=True)) as reply,
    ):
        first = await reply.content.readany()
        release.set()
        rest = await reply.read()

    assert first.count(b"data: ") == 2, "the role is held back until there is a part of the answer"
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_headers_name_engine_route_and_overhead(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        _, headers, _ = await post(client, running.url + CHAT, chat(), **{"x-request-id": "abc"})
        _, made, _ = await post(client, running.url + CHAT, chat())

    assert headers["x-spillway-engine"] == "fake-0"
    assert headers["x-spillway-route"] == "only"
    assert headers["x-spillway-prefix-tokens"] == "0"
    assert 0 < float(headers["x-spillway-overhead-ms"]) < 600_000
    assert headers["x-request-id"] == "abc"
    assert len(made["x-request-id"]) == 32
    assert (b"x-request-id", b"abc") in engine.seen[0].headers


async def test_own_errors_have_openais_shape(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    config = gateway_config([engine], limits={"bodyBytesMax": 1000})
    async with running_gateway(config) as running:
        cases = [
            (await post(client, running.url + CHAT, chat(model="absent")), 404, "model_not_found", "model"),
            (await post(client, running.url + CHAT, b"{"), 400, "invalid_json", None),
            (await post(client, running.url + CHAT, b"\xff"), 400, "invalid_json", None),
            (await post(client, running.url + CHAT, b'{"model":1,"messages":[]}'), 400, "invalid_request", "model"),
            (await post(client, running.url + CHAT, b'{"model":"fake"}'), 400, "invalid_request", "messages"),
            (await post(client, running.url + CHAT, b"[]"), 400, "invalid_request", None),
            (await post(client, running.url + CHAT, chat(pad="x" * 2000)), 413, "request_too_large", None),
            (await post(client, running.url + "/v1/nothing", b"{}"), 404, "unknown_route", None),
            (await post(client, running.url + "/v1/models", b"{}"), 405, "method_not_allowed", None),
        ]
    for (status, headers, body), expected, code, param in cases:
        error = json.loads(body)["error"]
        assert (status, error["code"], error["param"]) == (expected, code, param)
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["content-type"] == "application/json"
    assert not [seen for seen in engine.seen if seen.path == CHAT]


async def test_chunked_upload_over_the_limit_is_refused(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 400

    async with (
        running_gateway(gateway_config([engine], limits={"bodyBytesMax": 1000})) as running,
        client.post(running.url + CHAT, data=pieces()) as reply,
    ):
        assert reply.status == 413


async def test_engine_errors_pass_untouched(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine(max_model_len=10)
    async with running_gateway(gateway_config([engine])) as running:
        body = chat(messages=[{"role": "user", "content": "far too long for this engine"}])
        through = await post(client, running.url + CHAT, body)
        direct = await post(client, engine.url + CHAT, body)

    assert (through[0], through[2]) == (direct[0], direct[2])
    assert through[0] == 400


async def test_an_alias_is_spliced(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine], aliases=["nick"])) as running:
        status, _, _ = await post(client, running.url + CHAT, chat(model="nick", temperature=0.50))
        async with client.get(running.url + "/v1/models") as reply:
            listed = await reply.json()

    assert status == 200
    assert engine.seen[-1].body == chat(temperature=0.50)
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [("fake", 100_000), ("nick", 100_000)]


async def test_completions_with_text_and_token_ids(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        for prompt in ("some text", [1, 2, 3], [[1, 2], [3]], ["a", "b"]):
            body = json.dumps({"model": "fake", "prompt": prompt}).encode()
            status, _, _ = await post(client, running.url + "/v1/completions", body)
            assert engine.seen[-1].body == body
            if prompt != [[1, 2], [3]] and prompt != ["a", "b"]:
                assert status == 200


async def test_state_routes(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        await post(client, running.url + CHAT, chat())
        for path, needle in (
            ("/health", b"ok"),
            ("/ready", b'"ready":true'),
            (
                "/metrics",
                b'spillway_gateway_requests_total{engine="fake-0",model="fake",route="only",status="2xx"} 1.0',
            ),
        ):
            async with client.get(running.url + path) as reply:
                assert reply.status == 200
                assert needle in await reply.read()
        running.gateway.lifecycle.drain()
        async with client.get(running.url + "/ready") as reply:
            assert reply.status == 503


async def test_shared_prefixes_go_where_they_were(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine(name=f"fake-{at}") for at in range(4)]
    async with running_gateway(gateway_config(engines)) as running:
        used: dict[int, set[str]] = {}
        for _ in range(3):
            for group in range(6):
                text = f"group {group} " + "shared words " * 200
                body = chat(messages=[{"role": "user", "content": text + str(len(used))}])
                _, headers, _ = await post(client, running.url + CHAT, body)
                used.setdefault(group, set()).add(headers["x-spillway-engine"])

    assert all(len(names) == 1 for names in used.values())
    assert len(set.union(*used.values())) > 1
