"""The page and its state over real listeners."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.ops.ui.snapshot import percentiles
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import gateway_config, running_gateway, until

OPERATOR, CLIENT = "sk-o" + "0" * 40, "sk-c" + "0" * 40
SECRET_TEXT = "the-prompt-itself"


def auth(folder: Path) -> dict[str, str]:
    tenants = [
        {"name": "operators", "keys": [hash_key(OPERATOR)], "operator": True},
        {"name": "clients", "keys": [hash_key(CLIENT)]},
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s3cr3t-" * 8)
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}


async def chat(client: aiohttp.ClientSession, url: str, model: str, *, stream: bool, key: str | None = None) -> None:
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": SECRET_TEXT}]}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client.post(url + "/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def test_the_state_shows_engines_waits_and_decisions_and_no_prompt(start_engine: Any) -> None:
    engines = [await start_engine("fake-0"), await start_engine("fake-1")]
    async with (
        running_gateway(gateway_config(engines, listen={"opsPort": 0})) as running,
        aiohttp.ClientSession() as client,
    ):
        for stream in (True, False):
            await chat(client, running.url, engines[0].model, stream=stream)
        async with client.get(running.ops_url + "/ui/state") as reply:
            assert reply.status == 200
            body = await reply.read()
            state = await reply.json()
        async with client.get(running.url + "/ui/state") as reply:
            assert reply.status == 404

    assert SECRET_TEXT.encode() not in body
    (model,) = state["models"]
    assert [engine["name"] for engine in model["engines"]] == ["fake-0", "fake-1"]
    assert all(engine["routable"] and engine["says"] == "ready" for engine in model["engines"])
    assert not any(engine["slowStart"] for engine in model["engines"])
    assert model["firstByte"]["samples"] == 1
    assert sum(engine["firstByte"]["samples"] for engine in model["engines"]) == 1
    assert sum(model["promptTokens"].values()) == sum(each["promptTokens"] for each in state["decisions"])
    # The second prompt is the first one, and these engines send no events by which to expect that.
    assert model["cachedTokens"] == {"expected": 0, "reported": 16}
    hour = model["lastHour"]
    assert (sum(hour["expected"]), sum(hour["reported"])) == (0, 16)
    assert {len(each) for each in (hour["expected"], hour["reported"], *hour["missing"].values())} == {60}
    newest, first = state["decisions"]
    assert newest["time"] >= first["time"]
    assert {each["engine"] for each in first["candidates"]} == {"fake-0", "fake-1"}
    assert first["engine"] in {"fake-0", "fake-1"} and first["why"].endswith(".")
    assert state["draining"] is False


async def test_what_lies_in_a_shared_tier_is_shown_at_every_engine_that_loads_from_it(start_engine: Any) -> None:
    engines = [await start_engine(f"fake-{at}", publisher=KvPublisher()) for at in range(3)]
    store, node, tokens = "redis/00000000000000aa", "node/00000000000000bb", list(range(8))
    async with running_gateway(gateway_config(engines)) as running, aiohttp.ClientSession() as client:
        first, second, _ = [engine.publisher for engine in engines]
        first.stored([1, 2], None, tokens, 4)
        first.stored([1, 2], None, [], 0, medium=store)
        first.stored([1], None, [], 0, medium=node)
        for medium in (store, node):
            second.stored([], None, [], 0, medium=medium)
        index = running.gateway.fleets[0].index
        await until(lambda: index.shared_reach_of("fake-1") == ({"redis": 2}, 1))
        engine = running.gateway.fleets[0].engines["fake-1"]
        engine.observed(EngineReading(declined_tiers=frozenset({"redis"})), engine.running_requests)
        async with client.get(running.url + "/ui/state") as reply:
            (model,) = (await reply.json())["models"]
        async with client.get(running.url + "/metrics") as reply:
            page = await reply.text()
    assert [engine["declinedTiers"] for engine in model["engines"]] == [[], ["redis"], []]
    shown = [(engine["sharedBlocks"], engine["nodeBlocks"]) for engine in model["engines"]]
    assert shown == [({"redis": 2}, 1), ({"redis": 2}, 1), ({}, None)]
    assert re.findall(r'spillway_gateway_engine_node_blocks\{[^}]*"(fake-.)"[^}]*\} (.*)', page) == [
        ("fake-0", "1.0"),
        ("fake-1", "1.0"),
    ]
    assert re.search(r'spillway_gateway_engine_shared_blocks\{[^}]*"fake-1"[^}]*"redis"[^}]*\} 2\.0', page)


async def test_an_engine_that_is_away_says_why(start_engine: Any) -> None:
    engines = [await start_engine("fake-0"), await start_engine("fake-1")]
    async with running_gateway(gateway_config(engines)) as running, aiohttp.ClientSession() as client:
        await engines[1].stop()
        await until(lambda: not running.engine("fake-1").routable)
        async with client.get(running.url + "/ui/state") as reply:
            (model,) = (await reply.json())["models"]

    away = model["engines"][1]
    assert not away["routable"]
    assert "connect" in away["says"] or "closed" in away["says"] or "asked" in away["says"]


async def test_what_tiers_move_comes_from_the_engines_own_metrics(start_engine: Any) -> None:
    engine = await start_engine("fake-0")
    engine.pages["/metrics"] = b"""spillway_device_copy_bytes_total{direction="load",engine="0"} 5e6
spillway_tier_written_bytes_total{engine="0",tier="nvme"} 7e6
"""
    document = gateway_config([engine])
    document["health"] = {"periodSeconds": 0.05, "metricsPeriodSeconds": 0.05}
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        traffic = running.engine("fake-0").traffic
        await until(lambda: traffic.bytes_per_second(time.monotonic()))  # the second reading has come
        async with client.get(running.url + "/ui/state") as reply:
            (shown,) = (await reply.json())["models"][0]["engines"]

    ways = [(way["tier"], way["direction"], way["bytesPerSecond"]) for way in shown["tiers"]]
    assert ways == [("cpu", "load", 0.0), ("nvme", "store", 0.0)]


async def test_on_the_clients_port_only_an_operators_key_sees_the_state(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine], auth=auth(tmp_path))) as running,
        aiohttp.ClientSession() as client,
    ):
        for key, status in ((None, 401), (CLIENT, 403), (OPERATOR, 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with client.get(running.url + "/ui/state", headers=headers) as reply:
                assert reply.status == status
                assert reply.headers["cache-control"] == "no-store"
        async with client.get(running.url + "/ui/") as reply:
            assert reply.status == 200


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/page.js", "/ui/page.css", "/ui/state"])
async def test_the_policy_lets_nothing_in_from_outside(start_engine: Any, path: str) -> None:
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine])) as running,
        aiohttp.ClientSession() as client,
        client.get(running.url + path) as reply,
    ):
        assert reply.status == 200
        policy = reply.headers["content-security-policy"]
        text = await reply.text()
        assert reply.headers["x-content-type-options"] == "nosniff"

    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    assert not any("unsafe" in value or "http" in value or "data:" in value for value in allowed.values())
    assert not re.search(r"https?://(?!127\.0\.0\.1)|innerHTML|\son\w+=|style=", text)


def test_percentiles_are_samples_by_nearest_rank() -> None:
    assert percentiles([]) == {"samples": 0}
    assert percentiles([0.25]) == {"samples": 1, "p50Ms": 250.0, "p90Ms": 250.0, "p99Ms": 250.0}
    assert percentiles([at / 1000 for at in range(100, 0, -1)]) == {
        "samples": 100,
        "p50Ms": 50.0,
        "p90Ms": 90.0,
        "p99Ms": 99.0,
    }
