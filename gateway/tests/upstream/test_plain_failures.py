"""Plain replies in which an engine gives an answer up, through a real gateway: another engine answers, and breaker,
metrics, audit log and limits take it for the failure that it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.running import gateway_config, running_gateway

KEY = "sk-a" + "0" * 40
HEADERS = {"authorization": f"Bearer {KEY}"}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USAGE = {"prompt_tokens": 5, "completion_tokens": 4000, "input_tokens": 5, "output_tokens": 4000}
TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    COMPLETIONS: {"prompt": "hi"},
    GENERATE: {"token_ids": [1, 2], "sampling_params": {}},
    MESSAGES: {"messages": TURNS, "max_tokens": 9},
    RESPONSES: {"input": "hi"},
}

POOLING_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}


def given_up(path: str) -> dict[str, Any]:
    if path == MESSAGES:
        return {"id": "msg_1", "type": "message", "content": [{"type": "text", "text": "half"}], "usage": USAGE}
    if path == RESPONSES:
        return {"id": "resp_1", "object": "response", "status": "cancelled", "background": False, "usage": USAGE}
    said = {"text": "half", "message": {"content": "half"}, "token_ids": [7]}
    return {"choices": [{"index": 0, **said, "finish_reason": "abort"}], "usage": USAGE}


def abort(engine: FakeEngine) -> None:
    engine.script = lambda path, body: Scripted(document=given_up(path)) if path in BODIES else None


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), headers=HEADERS) as session:
        yield session


def auth(folder: Path, **limits: Any) -> dict[str, str]:
    tenants = {"tenants": [{"name": "a", "keys": [hash_key(KEY)], **limits}]}
    (folder / "keys.yaml").write_text(json.dumps(tenants))
    (folder / "salt").write_text("s" * 32)
    files = {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}
    return {**files, "unsaltedRoutes": "allow"}


@pytest.mark.parametrize("path", list(BODIES))
async def test_another_engine_answers(start_engine: Any, client: aiohttp.ClientSession, path: str) -> None:
    bad, good = await start_engine("bad"), await start_engine("good")
    abort(bad)
    async with running_gateway(gateway_config([bad, good], breaker={"openSeconds": 600})) as running:
        for _ in range(12):
            async with client.post(running.url + path, json={"model": "fake", **BODIES[path]}) as reply:
                assert reply.status == 200
                assert reply.headers["x-spillway-engine"] == "good"
                assert b"half" not in await reply.read()
        assert bad.seen
        assert not running.engine("bad").breaker.closed
        assert f'retries_total{{engine="bad",reason="failed"}} {len(bad.seen)}.0' in (
            running.gateway.metrics.exposition().decode()
        )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])  # generate counts no tokens
async def test_alone_it_is_an_error_that_costs_the_prompt(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path, path: str
) -> None:
    bad = await start_engine("bad")
    abort(bad)
    log = tmp_path / "audit.jsonl"
    limits = auth(tmp_path, tokensPerMinute=1000)
    config = gateway_config([bad], auth=limits, audit={"enabled": True, "file": str(log)})
    async with running_gateway(config) as running:  # which writes the last audit line when it ends
        for _ in range(3):
            async with client.post(running.url + path, json={"model": "fake", **BODIES[path]}) as reply:
                assert reply.status == 502
                assert b"aborted the request" in await reply.read()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["error"] for line in lines] == ["engine_failed"] * 3
    assert all(not line["completion_tokens"] for line in lines)


@pytest.mark.parametrize("path", [*BODIES, *POOLING_BODIES])
@pytest.mark.parametrize("text", [b"", b"null", b'{"data": [{"index": 0', b'{"data": []}}{', b'{"data": [{"index": 0}'])
async def test_a_reply_that_is_no_whole_document_is_a_failure(
    start_engine: Any, client: aiohttp.ClientSession, path: str, text: bytes
) -> None:
    bad, good = await start_engine("bad"), await start_engine("good")
    bad.script = lambda asked, body: Scripted(text=text)
    body = {"model": "fake", **{**BODIES, **POOLING_BODIES}[path]}
    async with running_gateway(gateway_config([bad, good], breaker={"openSeconds": 600})) as running:
        for _ in range(12):
            async with client.post(running.url + path, json=body) as reply:
                assert (reply.status, reply.headers["x-spillway-engine"]) == (200, "good")
                json.loads(await reply.read())
        assert bad.seen
        assert not running.engine("bad").breaker.closed


async def test_a_long_reply_that_is_no_whole_document_counts_against_its_engine(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    bad = await start_engine("bad")
    config = gateway_config([bad], breaker={"openSeconds": 600}, limits={"plainReplyBufferBytes": 65536})
    long = b'{"data": ["' + b"x" * 300_000
    async with running_gateway(config) as running:
        for text, closed in ((long + b'"]}' + b" " * 10, True), (long, False)):
            bad.script = lambda path, body, text=text: Scripted(text=text)  # type: ignore[misc]
            for _ in range(12):
                async with client.post(running.url + CHAT, json={"model": "fake", **BODIES[CHAT]}) as reply:
                    assert await reply.read() == text, "passed as it is"
            assert running.engine("bad").breaker.closed is closed


async def test_one_too_long_to_be_held_back_counts_against_its_engine(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    bad = await start_engine("bad")
    document = given_up(CHAT)
    document["choices"][0]["message"]["content"] = "x" * 300_000
    bad.script = lambda path, body: Scripted(document=document) if path == CHAT else None
    config = gateway_config([bad], breaker={"openSeconds": 600}, limits={"plainReplyBufferBytes": 65536})
    async with running_gateway(config) as running:
        for _ in range(12):
            async with client.post(running.url + CHAT, json={"model": "fake", **BODIES[CHAT]}) as reply:
                assert json.loads(await reply.read()) == document, "passed as it is"
        assert not running.engine("bad").breaker.closed
