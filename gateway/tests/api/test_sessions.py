"""Requests that name their session, through a real gateway: the header, the body, tenants and the metric."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway

KEYS = {"a": "sk-a" + "0" * 40, "b": "sk-b" + "0" * 40}
FIELDS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def asked(
    client: aiohttp.ClientSession,
    running: RunningGateway,
    *,
    path: str = "/v1/completions",
    text: str = "hi",
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> str:
    """The engine that answered."""
    body = {"model": "fake", **FIELDS[path](text), **fields}
    async with client.post(running.url + path, json=body, headers=headers or {}) as reply:
        assert reply.status == 200, await reply.text()
        return reply.headers["x-spillway-engine"]


def outcomes(running: RunningGateway) -> dict[str, float]:
    families = running.gateway.services.metrics.registry.collect()
    found = next(family for family in families if family.name == "spillway_gateway_session_choices")
    return {sample.labels["outcome"]: sample.value for sample in found.samples if sample.name.endswith("_total")}


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("by", ["header", "body", "both"])
async def test_a_session_stays_where_it_was(
    start_engine: Any, client: aiohttp.ClientSession, path: str, by: str
) -> None:
    engines = [await start_engine(name=name) for name in "abc"]
    async with running_gateway(gateway_config(engines)) as running:
        texts = [f"question {number}" for number in range(12)]
        assert len({await asked(client, running, path=path, text=text) for text in texts}) > 1
        assert outcomes(running) == {}
        used = set()
        for number, text in enumerate(texts):
            headers = {"X-Session-Id": "one"} if by != "body" else {}
            fields = {"prompt_cache_key": "one" if by == "body" else f"other {number}"} if by != "header" else {}
            used.add(await asked(client, running, path=path, text=text, headers=headers, **fields))
        assert len(used) == 1
        assert outcomes(running) == {"new": 1.0, "kept": 11.0}


async def test_a_session_follows_to_the_engine_that_is_left(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine(name=name) for name in "ab"]
    async with running_gateway(gateway_config(engines)) as running:
        headers = {"x-session-id": "one"}
        first = await asked(client, running, headers=headers)
        gone = next(engine for engine in engines if engine.name == first)
        await gone.stop()
        await running.until_engine(first, lambda engine: not engine.routable)
        assert await asked(client, running, headers=headers) != first
        assert outcomes(running) == {"new": 1.0, "moved": 1.0}


async def test_tenants_with_one_name_have_two_sessions(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in KEYS.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (tmp_path / "salt").write_text("s" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    engines = [await start_engine(name=name) for name in "ab"]
    async with running_gateway(gateway_config(engines, auth=auth)) as running:
        for key in KEYS.values():
            headers = {"authorization": f"Bearer {key}", "x-session-id": "one"}
            await asked(client, running, headers=headers)
            await asked(client, running, headers=headers)
        assert outcomes(running) == {"new": 2.0, "kept": 2.0}


async def test_what_names_nothing_is_no_session(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine(name=name) for name in "ab"]
    async with running_gateway(gateway_config(engines)) as running:
        for value in (None, "", 5, ["one"]):
            await asked(client, running, headers={"x-session-id": ""}, prompt_cache_key=value)
        assert outcomes(running) == {}
        await asked(client, running, prompt_cache_key="\u4e2d" * 1000)
        assert outcomes(running) == {"new": 1.0}


FORMS = {**FIELDS, "/v1/messages": FIELDS["/v1/chat/completions"]}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("padding", [0, 100_000])
async def test_the_engine_learns_of_the_session(
    start_engine: Any, client: aiohttp.ClientSession, path: str, padding: int
) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:

        async def sent(headers: dict[str, str], **fields: Any) -> Any:
            body = {"model": "fake", "max_tokens": 4, **FORMS[path]("hi" + "x" * padding), **fields}
            async with client.post(running.url + path, json=body, headers=headers):
                return json.loads(engine.seen[-1].body).get("kv_transfer_params")

        ours = await sent({"x-session-id": "one"})
        name = ours["spillway_session"]["id"]
        said = {"x-session-id": "one", "x-session-end": "true", "x-session-return-seconds": "30"}
        assert ours == {"spillway_session": {"id": name}}
        assert await sent(said) == {"spillway_session": {"id": name, "ended": True, "return_seconds": 30.0}}
        assert (await sent({"x-session-id": "two"}))["spillway_session"]["id"] != name
        # The rest of a client's parameters passes, its own idea of the session does not.
        client_params = {"max_offload_tokens": 5, "spillway_session": {"id": "mine"}}
        assert await sent({}, kv_transfer_params=client_params) == {"max_offload_tokens": 5}
        assert await sent({"x-session-id": "one"}, kv_transfer_params=client_params) == {
            "max_offload_tokens": 5,
            "spillway_session": {"id": name},
        }
        assert await sent({}) is None


async def test_an_end_that_cannot_be_read_is_refused(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        body = {"model": "fake", "prompt": "hi"}
        async with client.post(
            running.url + "/v1/completions", json=body, headers={"x-session-return-seconds": "soon"}
        ) as reply:
            assert reply.status == 400
            assert "x-session-return-seconds" in (await reply.json())["error"]["message"]
        assert not engine.seen
