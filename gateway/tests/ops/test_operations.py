"""The gateway's own state: who may see what, on which listener."""

from __future__ import annotations

import json
import threading
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.ops import server as operations_server
from spillway_gateway.ops.operations import Operations
from spillway_gateway.testing.running import gateway_config, running_gateway

OPERATOR, CLIENT = "sk-o" + "0" * 40, "sk-c" + "0" * 40


async def get(client: aiohttp.ClientSession, url: str, key: str | None = None) -> tuple[int, bytes]:
    async with client.get(url, headers={"authorization": f"Bearer {key}"} if key else {}) as reply:
        return reply.status, await reply.read()


def auth(folder: Path) -> dict[str, str]:
    tenants = [
        {"name": "operators", "keys": [hash_key(OPERATOR)], "operator": True},
        {"name": "clients", "keys": [hash_key(CLIENT)]},
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s3cr3t-" * 8)
    (folder / "engine").write_text("engines-own-key")
    return {
        "keysFile": str(folder / "keys.yaml"),
        "saltSecretFile": str(folder / "salt"),
        "engineKeyFile": str(folder / "engine"),
    }


async def test_the_configuration_is_resolved_and_without_secrets(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    document = gateway_config([engine], auth=auth(tmp_path), timeouts={"idleSeconds": 7})
    document["models"][0]["engines"].append({"name": "elsewhere", "url": "http://user:pass-word@127.0.0.1:1/base"})
    async with (
        running_gateway(document, wait_ready=False) as running,
        aiohttp.ClientSession() as client,
    ):
        url = running.url + "/spillway/config"
        assert (await get(client, url))[0] == 401
        assert (await get(client, url, CLIENT))[0] == 403
        status, body = await get(client, url, OPERATOR)

    assert status == 200
    document = yaml.safe_load(body)
    settings = document["settings"]
    assert document["version"] == version("spillway-gateway")
    assert settings["timeouts"]["idleSeconds"] == 7
    assert settings["limits"]["attemptsMax"] == 3
    assert settings["auth"]["saltSecretFile"] == str(tmp_path / "salt")
    assert [entry["url"] for entry in settings["models"][0]["engines"]] == [engine.url, "http://127.0.0.1:1/base"]
    assert not any(secret in body for secret in (b"s3cr3t", b"engines-own-key", b"pass-word", b"sha256:"))


async def test_one_model_may_be_away(start_engine: Any) -> None:
    here, away = await start_engine("here"), await start_engine("away", model="other")
    document = gateway_config([here], health={"returnSeconds": 0})
    document["models"].append({"name": "other", "engines": [{"name": away.name, "url": away.url}]})
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        await away.stop()
        await running.until_engine("away", lambda engine: engine.state is EngineState.DOWN)
        status, body = await get(client, running.url + "/ready")
        assert (status, json.loads(body)["unavailable"]) == (200, ["other"])
        async with client.post(running.url + "/v1/completions", json={"model": "fake", "prompt": "hi"}) as reply:
            assert reply.status == 200
        async with client.post(running.url + "/v1/completions", json={"model": "other", "prompt": "hi"}) as reply:
            assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
            assert (await reply.json())["error"]["code"] == "no_engine_ready"
        await here.stop()
        await running.until_engine("here", lambda engine: engine.state is EngineState.DOWN)
        status, body = await get(client, running.url + "/ready")
        assert (status, json.loads(body)["reason"]) == (503, "no routable engine for: fake, other")


async def test_at_its_start_every_known_engine_is_asked_once(start_engine: Any) -> None:
    engines = [await start_engine("a"), await start_engine("b")]
    async with running_gateway(gateway_config(engines)) as running:
        operations = running.gateway.operations
        new = Operations(
            operations._fleets,
            operations._lifecycle,
            operations._serving,
            operations._gatekeeper,
            operations._config,
            discovered=dict,
        )
        running.engine("b").set_state(EngineState.UNKNOWN, "")
        waiting = new.readiness()
        running.engine("b").set_state(EngineState.DOWN, "")
        begun = new.readiness()
        running.engine("b").set_state(EngineState.UNKNOWN, "")  # one that is found later does not make it unready

        assert (waiting.status, waiting.document["reason"]) == (503, "not asked yet since the start: b")
        assert (begun.status, new.readiness().status) == (200, 200)


@pytest.mark.parametrize("keys", [False, True])
async def test_an_operations_port_takes_the_routes_off_the_main_one(
    start_engine: Any, tmp_path: Path, keys: bool
) -> None:
    engine = await start_engine()
    document = gateway_config([engine], listen={"opsPort": 0}, **({"auth": auth(tmp_path)} if keys else {}))
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        for path in ("/health", "/ready"):
            assert (await get(client, running.url + path))[0] == 200
            assert (await get(client, running.ops_url + path))[0] == 200
        for path in ("/metrics", "/spillway/config"):
            assert (await get(client, running.url + path))[0] == 404
            assert (await get(client, running.ops_url + path))[0] == 200
        async with client.post(running.ops_url + "/v1/completions", json={"prompt": "hi"}) as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "unknown_route"
    assert engine.seen == []


async def test_without_one_all_stay_where_they_were(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running, aiohttp.ClientSession() as client:
        for path in ("/health", "/ready", "/metrics", "/spillway/config"):
            assert (await get(client, running.url + path))[0] == 200


async def test_probes_are_answered_while_the_main_loop_is_not(start_engine: Any) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine], listen={"opsPort": 0})) as running:
        asked = threading.Event()
        statuses: list[int] = []

        def probe() -> None:
            for path in ("/health", "/ready"):
                with urllib.request.urlopen(running.ops_url + path, timeout=60) as reply:
                    statuses.append(reply.status)
            asked.set()

        threading.Thread(target=probe, daemon=True).start()
        answered = asked.wait(60)  # in this thread, which is the main loop's: it turns no further until then

    assert answered and statuses == [200, 200]


async def test_a_main_loop_that_is_stuck_fails_the_liveness_probe(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_server, "STALLED_SECONDS", 0.0)
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine], listen={"opsPort": 0})) as running,
        aiohttp.ClientSession() as client,
    ):
        status, body = await get(client, running.ops_url + "/health")

    assert status == 503 and b"stalled" in body


async def test_on_the_port_of_clients_metrics_are_for_operators(start_engine: Any, tmp_path: Path) -> None:
    document = gateway_config([await start_engine()], auth=auth(tmp_path))
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        for path in ("/metrics", "/spillway/config"):
            assert (await get(client, running.url + path))[0] == 401
        for path in ("/health", "/ready"):
            assert (await get(client, running.url + path))[0] == 200


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/chat/completions/", "/metrics/"])
async def test_no_client_is_sent_to_the_host_that_it_named(start_engine: Any, path: str) -> None:
    document = gateway_config([await start_engine()], listen={"opsPort": 0})
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        for url in (running.url, running.ops_url):
            async with client.get(url + path, headers={"host": "evil.example"}, allow_redirects=False) as reply:
                assert reply.status == 404 and "location" not in reply.headers
