"""Coding agents as they are, through a gateway without a setting: their requests belong to their sessions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.tests.conftest import auth_files
from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.agent_requests import AgentRequest, claude_code, codex, opencode
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway

ONE, TWO = "0b6c2f60-7f5e-4a53-9a6f-2f6f1c6d8e01", "0b6c2f60-7f5e-4a53-9a6f-2f6f1c6d8e02"
CHILD, GRANDCHILD = "7d9f0d1e-0d52-4c8e-8a43-1b0e2f5a6c11", "7d9f0d1e-0d52-4c8e-8a43-1b0e2f5a6c12"
SAME_SESSION = {
    "claude": [
        claude_code(ONE, "a"),
        claude_code(ONE, "b", user_id="legacy"),
        claude_code(ONE, "c", subagent="agent-1"),
        claude_code(ONE, "d", header=False),
        claude_code(ONE, "e", header=False, user_id="legacy"),
    ],
    "codex": [
        codex(ONE, "a"),
        codex(ONE, "b", thread=CHILD, parent=ONE),
        codex(ONE, "c", thread=GRANDCHILD, parent=CHILD),
        codex(ONE, "d", old=True),
        codex(ONE, "e", thread=CHILD, parent=ONE, old=True),
    ],
    "opencode": [
        opencode("ses_1", "a"),
        opencode("ses_2", "b", parent="ses_1"),
        opencode("ses_3", "c", parent="ses_1"),
    ],
}
OTHER_SESSION = {"claude": claude_code(TWO, "a"), "codex": codex(TWO, "a"), "opencode": opencode("ses_9", "a")}


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def sent(
    client: aiohttp.ClientSession, running: RunningGateway, engines: list[Any], request: AgentRequest, **headers: str
) -> tuple[str, Any]:
    """(the engine that answered, the mark of the session that it got)"""
    async with client.post(running.url + request.path, json=request.body, headers=request.headers | headers) as reply:
        assert reply.status == 200, await reply.text()
        name = reply.headers["x-spillway-engine"]
    engine = next(engine for engine in engines if engine.name == name)
    params = json.loads(engine.seen[-1].body).get("kv_transfer_params") or {}
    return name, params.get("spillway_session")


@pytest.mark.parametrize("agent", SAME_SESSION)
async def test_an_agent_and_its_subagents_are_one_session(
    start_engine: Any, client: aiohttp.ClientSession, agent: str
) -> None:
    engines = [await start_engine(name=name) for name in "abc"]
    async with running_gateway(gateway_config(engines)) as running:
        found = [await sent(client, running, engines, request) for request in SAME_SESSION[agent]]
        other = await sent(client, running, engines, OTHER_SESSION[agent])

        assert len({name for name, _ in found}) == 1
        assert len({marked["id"] for _, marked in found}) == 1
        assert other[1]["id"] != found[0][1]["id"]


@pytest.mark.parametrize("agent", SAME_SESSION)
async def test_tenants_whose_agents_give_one_name_have_two_sessions(
    start_engine: Any, client: aiohttp.ClientSession, agent: str, tmp_path: Path
) -> None:
    keys = {"a": "sk-a" + "0" * 40, "b": "sk-b" + "0" * 40}
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in keys.items()]
    auth = auth_files(tmp_path, tenants, unsaltedRoutes="allow")
    engines = [await start_engine()]
    async with running_gateway(gateway_config(engines, auth=auth)) as running:
        request = SAME_SESSION[agent][0]
        marked = [
            (await sent(client, running, engines, request, Authorization=f"Bearer {key}"))[1]["id"]
            for key in keys.values()
        ]
        assert marked[0] != marked[1]


PLAIN_USERS = [
    "alice@example.com",
    "user_5",
    "user_1_session_2",
    "user_1_account_2",
    "user_1_account_2_session_",
    "user_1_account_2_session_manager",
    ONE,
    f"session_{ONE}",
    "{",
    "{}",
    "[]",
    json.dumps({"device_id": "5d"}),
    json.dumps({"device_id": "5d", "session_id": ""}),
    json.dumps({"device_id": "5d", "session_id": 5}),
    json.dumps({"device_id": "\ud800", "session_id": None}),
    '{"device_id": ' + "[" * 3000,
    "x" * 5000,
    "",
    None,
    7,
    [ONE],
]


async def test_a_user_is_no_session(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine()]
    async with running_gateway(gateway_config(engines)) as running:
        for metadata in [*({"user_id": user} for user in PLAIN_USERS), {}, None, [], "user"]:
            request = claude_code(ONE, "a", header=False)
            marked = (
                await sent(client, running, engines, request._replace(body=request.body | {"metadata": metadata}))
            )[1]
            assert marked is None, metadata


async def test_sources_and_lengths_are_settings(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine()]
    routing = {"sessionSources": ["X-Team", "body:prompt_cache_key"], "sessionNameBytesMax": 8}
    async with running_gateway(gateway_config(engines, routing=routing)) as running:
        assert (await sent(client, running, engines, opencode("ses_1", "a")))[1] is None
        assert (await sent(client, running, engines, codex(ONE, "a")))[1] is None  # longer than eight bytes
        assert (await sent(client, running, engines, codex("short", "a")))[1] is not None
        assert (await sent(client, running, engines, opencode("ses_1", "a"), **{"x-team": "one"}))[1] is not None
