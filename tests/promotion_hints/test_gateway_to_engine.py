"""A gateway process hints at the prefix of a request that waits there; the engine's own middleware answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chaos.machines import SECONDS_MAX, Replica
from fastapi import FastAPI
from stack_driver.deadlines import eventually

from spillway_engine.middleware import ReadinessMiddleware
from spillway_engine.pod_channel import PodBrief
from spillway_gateway.access.keys import hash_key
from spillway_gateway.testing.fake_engine import FakeEngine, Seen
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_settings.tenant_salts import tenant_salt
from spillway_settings.wire import PROMOTE_PATH

BLOCK, STORE = 16, "nvme/0123456789abcdef"
KNOWN = list(range(1000, 1000 + 2 * BLOCK))  # two blocks in the shared tier
PROMPT = [*KNOWN, *range(5 * BLOCK)]
ENGINE_KEY = "sk-engine"
CLIENT_KEY = "sk-client-0123456789abcdef"
SECRET = "0123456789abcdef" * 4
SALT = tenant_salt(SECRET.encode(), "search", None)  # of the tenant's blocks, in the hash of the first one


class Core:
    """EngineCore behind vLLM's line for utilities; an engine of another program has no such utility."""

    def __init__(self, outcome: str | None) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Any, ...]] = []

    async def call_utility_async(self, *call: Any) -> str:
        self.calls.append(call)
        if self.outcome is None:
            raise AttributeError("'EngineCore' object has no attribute 'spillway_promote'")
        return self.outcome


def middleware_over(core: Core, monkeypatch: pytest.MonkeyPatch) -> Callable[[Seen], int]:
    """Return a function that answers hints: the engine service's middleware, with an API key, in vLLM's place."""
    monkeypatch.setenv("VLLM_API_KEY", ENGINE_KEY)
    app = FastAPI()
    app.add_middleware(ReadinessMiddleware, brief=PodBrief())
    app.state.engine_client = SimpleNamespace(engine_core=core)

    async def answer(seen: Seen) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            headers = [(name.decode(), value.decode()) for name, value in seen.headers]
            return (await client.post(PROMOTE_PATH, content=seen.body, headers=headers)).status_code

    def answer_at_once(seen: Seen) -> int:
        with ThreadPoolExecutor(1) as thread:  # which has an event loop of its own
            return thread.submit(asyncio.run, answer(seen)).result()

    return answer_at_once


@asynccontextmanager
async def full_gateway(engine: FakeEngine, folder: Path, key: str) -> AsyncIterator[tuple[Replica, httpx.AsyncClient]]:
    """A gateway process whose only engine has room for one request and works on it; KNOWN is in its shared tier."""
    publisher = engine.publisher
    assert publisher is not None
    publisher.stored([1, 2], None, KNOWN, BLOCK, extra_keys=[[SALT], None])
    publisher.stored([1, 2], None, [], 0, medium=STORE)
    publisher.removed([1, 2])
    keys = {"tenants": [{"name": "search", "keys": [hash_key(CLIENT_KEY)]}]}
    (folder / "keys.yaml").write_text(json.dumps(keys))
    (folder / "salt").write_text(SECRET)
    (folder / "engine-key").write_text(key)
    files = {"keysFile": "keys.yaml", "saltSecretFile": "salt", "engineKeyFile": "engine-key"}
    entry = {"name": engine.name, "url": engine.url, "kvEvents": publisher.events_url, "kvReplay": publisher.replay_url}
    gateway = Replica(
        "gateway",
        folder,
        {
            "listen": {"host": "127.0.0.1", "port": 0, "opsPort": 0},
            "models": [{"name": engine.model, "engines": [entry]}],
            "auth": {setting: str(folder / file) for setting, file in files.items()},
            "admission": {"requestsPerEngineMax": 1},
        },
    )
    try:
        await asyncio.to_thread(gateway.start)
        await until(gateway, "spillway_gateway_engine_shared_blocks", 2)
        engine.fault = HoldInStream(2, asyncio.Event())
        headers = {"authorization": f"Bearer {CLIENT_KEY}"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=SECONDS_MAX, headers=headers) as client:
            held = asyncio.create_task(ask(client, engine.model, list(range(8)), stream=True))
            await until(gateway, "spillway_gateway_in_flight_requests", 1)
            waiting = asyncio.create_task(ask(client, engine.model, PROMPT))
            await until(gateway, "spillway_gateway_promotion_hints_total", 1)
            yield gateway, client
            held.cancel()
            waiting.cancel()
            await asyncio.gather(held, waiting, return_exceptions=True)
    finally:
        gateway.close()


async def until(gateway: Replica, metric: str, value: float) -> None:
    await asyncio.to_thread(eventually, f"{metric} is {value}", lambda: gateway.sum_of(metric) >= value, SECONDS_MAX)


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int], **fields: Any) -> int:
    return (await client.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})).status_code


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    publisher = KvPublisher()
    engine = FakeEngine(name="fake-0", block_tokens=BLOCK, publisher=publisher)
    await engine.start(0)
    yield engine
    await engine.stop()
    publisher.close()


@pytest.mark.parametrize(
    ("key", "outcome", "counted", "calls"),
    [
        (ENGINE_KEY, "accepted", "accepted", 1),
        (ENGINE_KEY, "busy", "busy", 1),
        (ENGINE_KEY, "off", "off", 1),
        (ENGINE_KEY, None, "off", 1),
        ("sk-another", "accepted", "failed", 0),
    ],
    ids=["taken", "refused", "switched off", "another connector", "wrong key"],
)
async def test_a_waiting_requests_prefix_reaches_the_engine_and_its_answer_is_counted(
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    outcome: str | None,
    counted: str,
    calls: int,
) -> None:
    core = Core(outcome)
    engine.hint_status = middleware_over(core, monkeypatch)
    async with full_gateway(engine, tmp_path, key) as (gateway, client):
        assert [json.loads(seen.body)["token_ids"] for seen in engine.seen if seen.path == PROMOTE_PATH] == [KNOWN]
        assert core.calls == [("spillway_promote", KNOWN, SALT)] * calls
        found = await asyncio.to_thread(gateway.samples, "spillway_gateway_promotion_hints_total")
        assert {labels: value for labels, value in found.items() if value} == {
            f'{{model="{engine.model}",outcome="{counted}"}}': 1.0
        }
        await check_the_waiting_request_is_answered(engine, client)


async def test_an_engine_without_the_endpoint_gets_the_request_all_the_same(engine: FakeEngine, tmp_path: Path) -> None:
    engine.hint_status = lambda seen: 404
    async with full_gateway(engine, tmp_path, ENGINE_KEY) as (gateway, client):
        found = await asyncio.to_thread(gateway.samples, "spillway_gateway_promotion_hints_total")
        assert [labels for labels, value in found.items() if value] == [f'{{model="{engine.model}",outcome="off"}}']
        await check_the_waiting_request_is_answered(engine, client)


async def check_the_waiting_request_is_answered(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """Require an answer once there is room, whatever became of the hint."""
    assert isinstance(engine.fault, HoldInStream)
    held, engine.fault = engine.fault, None
    held.release.set()
    assert await ask(client, engine.model, PROMPT) == 200
