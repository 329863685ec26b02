"""An engine is sent the prefix of a request that waits for room: which, when, and what its answer changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing.prefix import PromptTokens, token_bytes
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until
from spillway_gateway.upstream.promotion_hints import hint_body
from spillway_settings.wire import PROMOTE_PATH

BLOCK, STORE = 16, "nvme/0123456789abcdef"
KNOWN = list(range(1000, 1000 + 2 * BLOCK))  # two blocks in the shared tier
PROMPT = [*KNOWN, *range(5 * BLOCK)]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@asynccontextmanager
async def full(start_engine: Any, client: aiohttp.ClientSession, **admission: Any) -> AsyncIterator[tuple[Any, Any]]:
    """(gateway, engine): the engine has room for one request and works on it; KNOWN lies in its shared tier."""
    publisher = KvPublisher()
    engine: FakeEngine = await start_engine(block_tokens=BLOCK, publisher=publisher)
    config = gateway_config([engine], admission={"requestsPerEngineMax": 1, **admission})
    # Before the gateway runs: it asks for a replay of what it has missed.
    publisher.stored([1, 2], None, KNOWN, BLOCK)
    publisher.stored([1, 2], None, [], 0, medium=STORE)
    publisher.removed([1, 2])
    async with running_gateway(config) as running:
        index = running.gateway.fleets[0].index
        await until(lambda: index.shared_reach_of("fake-0").blocks == {"nvme": 2})
        engine.fault = HoldInStream(2, asyncio.Event())
        held = asyncio.create_task(ask(client, running, list(range(8)), stream=True))
        await until(lambda: running.gateway.admissions["fake"].is_full)
        try:
            yield running, engine
        finally:
            held.cancel()


async def ask(client: aiohttp.ClientSession, running: RunningGateway, prompt: list[int], **fields: Any) -> int:
    body = {"model": "fake", "prompt": prompt, **fields}
    async with client.post(running.url + "/v1/completions", json=body) as reply:
        await reply.read()
        return reply.status


def hints(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(seen.body) for seen in engine.seen if seen.path == PROMOTE_PATH]


def outcomes(running: RunningGateway) -> dict[str, float]:
    page = running.gateway.metrics.exposition().decode().splitlines()
    lines = [line for line in page if line.startswith("spillway_gateway_promotion_hints_total{")]
    return {line.split('"')[-2]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize(("status", "outcome"), [(202, "accepted"), (429, "busy"), (404, "off"), (500, "failed")])
async def test_the_prefix_of_a_waiting_request_is_hinted_at_and_the_answer_counted(
    start_engine, client, status, outcome
):
    async with full(start_engine, client) as (running, engine):
        engine.hint_status = lambda seen: status
        waiting = asyncio.create_task(ask(client, running, PROMPT, cache_salt="s"))
        waiting_too = asyncio.create_task(ask(client, running, PROMPT))
        await until(lambda: outcomes(running))

        assert hints(engine) == [{"token_ids": KNOWN, "cache_salt": None}], "only what is known under its salt"
        assert outcomes(running) == {outcome: 1.0}
        waiting.cancel()
        waiting_too.cancel()


async def test_nothing_is_hinted_at_where_nothing_could_be_loaded_or_hints_are_off(start_engine, client):
    for prompt, admission in ((list(range(64)), {}), (PROMPT, {"promotionHints": False})):
        async with full(start_engine, client, **admission) as (running, engine):
            waiting = asyncio.create_task(ask(client, running, prompt))
            await until(lambda: running.gateway.admissions["fake"].waiting_requests)
            assert hints(engine) == []
            waiting.cancel()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200), st.integers(0, 250), st.none() | st.text())
def test_a_hint_names_the_first_tokens_and_the_salt(tokens, first, salt):
    body = json.loads(hint_body(PromptTokens(token_bytes(tokens), salt), first))
    assert body == {"token_ids": tokens[:first], "cache_salt": salt}
