"""LoRA adapters that engines load and unload while they run, or load when a request names them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

COMPLETIONS = "/v1/completions"
POLLED = {"periodSeconds": 0.05, "metricsPeriodSeconds": 0.05}
PROMPT = "a prompt of several blocks, " * 8
KEY = "key-of-tenant-a-000000000000000"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def ask(
    client: aiohttp.ClientSession, gateway: RunningGateway, model: str, prompt: object = PROMPT, **fields: Any
) -> tuple[int, Any, Any]:
    """Status, headers and document."""
    body = {"model": model, "prompt": prompt, **fields}
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.post(gateway.url + COMPLETIONS, json=body, headers=headers) as reply:
        return reply.status, reply.headers, await reply.json()


async def listed(client: aiohttp.ClientSession, gateway: RunningGateway) -> dict[str, str | None]:
    """Parents by name."""
    async with client.get(gateway.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"}) as reply:
        data = (await reply.json())["data"]
    assert len(data) == len({card["id"] for card in data})
    return {card["id"]: card.get("parent") for card in data}


async def until_loaded(gateway: RunningGateway, engine: FakeEngine) -> None:
    """Wait until the gateway has read what the engine has loaded."""
    await until(lambda: gateway.engine(engine.name).adapters == frozenset(engine.adapters))


def names_asked(engine: FakeEngine) -> list[str]:
    return [json.loads(seen.body)["model"] for seen in engine.seen]


async def test_a_configured_adapter_is_listed_while_an_engine_has_it(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine(adapters=["support"])
    config = gateway_config([engine], aliases=["nick"], adapters=["support", "sql"])
    async with running_gateway(config) as running:
        status, _, _ = await ask(client, running, "support")
        parents = await listed(client, running)
        lacking, _, document = await ask(client, running, "sql")

    assert (status, lacking, document["error"]["code"]) == (200, 404, "model_not_found")
    assert names_asked(engine) == ["support"]
    assert parents == {"fake": None, "nick": "fake", "support": "fake"}


async def test_adapters_are_followed_as_engines_load_and_unload_them(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    one, two = await start_engine("one"), await start_engine("two")
    async with running_gateway(gateway_config([one, two], health=POLLED)) as running:
        assert (await ask(client, running, "sql"))[0] == 404
        two.adapters = ("sql",)
        await until_loaded(running, two)
        assert await listed(client, running) == {"fake": None, "sql": "fake"}
        for at in range(8):
            status, headers, _ = await ask(client, running, "sql", prompt=f"{at} {PROMPT}")
            assert (status, headers["x-spillway-engine"]) == (200, "two")
        one.adapters = ("sql",)
        await until_loaded(running, one)
        assert await listed(client, running) == {"fake": None, "sql": "fake"}
        two.adapters = ()
        await until_loaded(running, two)
        assert (await ask(client, running, "sql"))[1]["x-spillway-engine"] == "one"
        one.adapters = ()
        await until_loaded(running, one)
        assert await listed(client, running) == {"fake": None}
        status, _, document = await ask(client, running, "sql")

    assert status == 404
    assert document["error"]["message"] == "The model 'sql' does not exist; served here: fake"
    assert (document["error"]["param"], document["error"]["code"]) == ("model", "model_not_found")


async def test_an_engine_that_unloaded_since_the_last_poll_is_replaced_by_one_that_has_it(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = [await start_engine(name, adapters=["sql"]) for name in ("one", "two")]
    slow = {"periodSeconds": 1000, "metricsPeriodSeconds": 1000}
    async with running_gateway(gateway_config(engines, health=slow)) as running:
        _, headers, _ = await ask(client, running, "sql")
        chosen = next(engine for engine in engines if engine.name == headers["x-spillway-engine"])
        other = next(engine for engine in engines if engine is not chosen)
        chosen.adapters = ()
        status, headers, _ = await ask(client, running, "sql")
        assert (status, headers["x-spillway-engine"], headers["x-spillway-route"]) == (200, other.name, "retry")
        await ask(client, running, "sql")
        assert len(chosen.seen) == 2  # it is not asked again before it lists the adapter
        assert running.engine(chosen.name).breaker.closed
        other.adapters = ()
        status, _, document = await ask(client, running, "sql", stream=True)

    assert (status, document["error"]["code"], document["error"]["param"]) == (404, "model_not_found", "model")


async def test_engines_that_have_an_adapter_come_before_those_that_would_load_it(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = [await start_engine(name) for name in ("one", "two", "three")]
    for engine in engines:
        engine.resolvable = {"team-a": True}
    engines[1].adapters = ("team-a",)
    async with running_gateway(gateway_config(engines, loadableAdapters=["team-*"], health=POLLED)) as running:
        for at in range(8):
            assert (await ask(client, running, "team-a", prompt=f"{at} {PROMPT}"))[1]["x-spillway-engine"] == "two"
        await engines[1].stop()
        await running.until_engine("two", lambda engine: not engine.routable)
        status, headers, _ = await ask(client, running, "team-a")
        loader = headers["x-spillway-engine"]
        for at in range(8):  # the one that loads it gets the next ones as well, whether a poll came between or not
            assert (await ask(client, running, "team-a", prompt=f"{at}{PROMPT}"))[1]["x-spillway-engine"] == loader

    assert status == 200 and loader in ("one", "three")


async def test_a_failed_load_is_answered_by_an_engine_that_was_not_asked_yet(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = [await start_engine(name) for name in ("one", "two", "three")]
    for at, engine in enumerate(engines):
        engine.resolvable = {f"a{adapter}": adapter == at for adapter in range(3)}
        engine.resolvable |= {"none": False}
    config = gateway_config(engines, loadableAdapters=["*"], health={"periodSeconds": 1000})
    async with running_gateway(config) as running:
        for at, engine in enumerate(engines):
            status, headers, _ = await ask(client, running, f"a{at}", stream=False)
            assert (status, headers["x-spillway-engine"]) == (200, engine.name)
        before = [len(engine.seen) for engine in engines]
        status, _, document = await ask(client, running, "none")
        assert [len(engine.seen) - seen for engine, seen in zip(engines, before, strict=True)] == [1, 1, 1]
        unknown = await ask(client, running, "nowhere")
        assert all(running.engine(engine.name).breaker.closed for engine in engines)

    assert (status, document["error"]["code"]) == (400, "adapter_not_loaded")
    assert "could not be loaded" in document["error"]["message"]
    assert (unknown[0], unknown[2]["error"]["code"]) == (404, "model_not_found")


async def test_an_error_that_is_not_the_adapters_is_passed_on(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = [await start_engine(name, adapters=["sql"]) for name in ("one", "two")]
    async with running_gateway(gateway_config(engines)) as running:
        for engine in engines:
            engine.fault = Status(404)
        status, _, document = await ask(client, running, "sql")

    assert (status, document["error"]["message"]) == (404, "fault: 404")
    assert sum(len(engine.seen) for engine in engines) == 1


async def test_blocks_of_an_adapter_never_count_for_the_model_nor_the_other_way_round(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    publisher = KvPublisher()
    engine = await start_engine(publisher=publisher)
    async with running_gateway(gateway_config([engine], health=POLLED)) as running:
        index = running.gateway.fleets[0].index
        engine.adapters = ("sql", "law")
        await until_loaded(running, engine)
        tokens = list(range(200))  # by tokens, as the engine hashes them
        blocks = len(tokens) // engine.block_tokens
        for at, model in enumerate(("fake", "sql", "law"), 1):
            _, headers, document = await ask(client, running, model, prompt=tokens)
            # Before any event of this one: what the others hold does not count.
            assert headers["x-spillway-prefix-tokens"] == "0"
            assert not (document["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
            await until(lambda at=at: index.block_tokens == engine.block_tokens and index.blocks >= at * blocks)
        for model in ("fake", "sql", "law"):
            _, headers, document = await ask(client, running, model, prompt=tokens)
            cached = document["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-spillway-prefix-tokens"]) == cached > 0


async def test_keys_tenants_limits_and_aliases_hold_for_loaded_adapters(
    start_engine: Any, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = await start_engine()
    engine.models_key = "engine-key"  # without which it lists nothing
    keys = {"tenants": [{"name": "a", "keys": [hash_key(KEY)], "models": ["sql", "latest"], "requestsPerMinute": 6}]}
    (tmp_path / "keys.yaml").write_text(json.dumps(keys))
    (tmp_path / "salt").write_text("0123456789abcdef" * 4)
    (tmp_path / "engine").write_text("engine-key")
    auth = {"engineKeyFile": str(tmp_path / "engine")}
    auth |= {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    audit = {"enabled": True, "file": str(tmp_path / "audit")}
    config = gateway_config([engine], auth=auth, audit=audit, adapterAliases={"latest": "sql-2"}, health=POLLED)
    async with running_gateway(config) as running:
        assert await listed(client, running) == {}
        engine.adapters = ("sql", "sql-2")
        await until_loaded(running, engine)
        assert await listed(client, running) == {"sql": "fake", "latest": "fake"}
        refused = [(await ask(client, running, name))[2]["error"]["code"] for name in ("fake", "sql-2", "other")]
        assert refused == ["model_not_allowed", "model_not_allowed", "model_not_found"]
        statuses = [(await ask(client, running, name))[0] for name in ("sql", "latest", "latest", "sql")]
        async with client.post(running.url + COMPLETIONS, json={"model": "sql", "prompt": "x"}) as reply:
            without_key = reply.status

    assert (statuses, without_key) == ([200, 200, 200, 429], 401)
    assert names_asked(engine) == ["sql", "sql-2", "sql-2"]
    assert all(json.loads(seen.body)["cache_salt"] for seen in engine.seen)
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [line["model"] for line in lines if line["status"] == 200] == ["sql", "sql-2", "sql-2"]
