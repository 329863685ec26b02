"""Hints over HTTP, through the middleware, to a double of vLLM's line to EngineCore."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from spillway_engine import promotion_hints
from spillway_engine.middleware import ReadinessMiddleware
from spillway_engine.pod_channel import PodBrief
from spillway_settings.wire import PROMOTE_PATH

HINT = {"token_ids": [1, 2, 3], "cache_salt": "s"}


class Core:
    """Answers utilities, or raises, as the test chooses."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.outcome: str | Exception = "accepted"
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.full = asyncio.Event()

    core_engines = (b"\0\0", b"\1\0")  # as vLLM names those of ranks

    async def _call_utility_async(self, *call: Any, engine: bytes) -> str:
        return await self.call_utility_async(*call, engine)

    async def call_utility_async(self, *call: Any) -> str:
        self.calls.append(call)
        if len(self.calls) == promotion_hints.HINTS_MAX:
            self.full.set()
        await self.may_answer.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def client_of(core: Core | None, ranks: int = 1) -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(ReadinessMiddleware, brief=PodBrief(data_parallel_ranks=ranks))
    if core is not None:
        app.state.engine_client = SimpleNamespace(engine_core=core)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize(("outcome", "status"), [("accepted", 202), ("busy", 429), ("off", 404)])
async def test_a_hint_reaches_the_core_and_its_answer_the_gateway(outcome: str, status: int) -> None:
    core = Core()
    core.outcome = outcome
    async with client_of(core) as client:
        reply = await client.post(PROMOTE_PATH, json=HINT)

    assert (reply.status_code, reply.json()) == (status, {"outcome": outcome})
    assert core.calls == [("spillway_promote", [1, 2, 3], "s")]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_hint_reaches_the_rank_that_will_get_the_request(rank: int) -> None:
    core = Core()
    async with client_of(core, ranks=2) as client:
        reply = await client.post(PROMOTE_PATH, json=HINT, headers={"X-Data-Parallel-Rank": str(rank)})

    assert reply.status_code == 202
    assert core.calls == [("spillway_promote", [1, 2, 3], "s", core.core_engines[rank])]


@pytest.mark.parametrize("rank", [None, "", "2", "-1", "x", "1" * 5000, "\u0661".encode()])
async def test_a_hint_for_no_rank_reaches_none(rank: str | bytes | None) -> None:
    core = Core()
    headers = {} if rank is None else {"X-Data-Parallel-Rank": rank}
    async with client_of(core, ranks=2) as client:
        reply = await client.post(PROMOTE_PATH, json=HINT, headers=headers)

    assert reply.status_code == 400
    assert "x-data-parallel-rank: 0 to 1 needed" in reply.text
    assert not core.calls


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"token_ids": [-1]}',
        b'{"token_ids": ["a"]}',
        b'{"token_ids": [1], "cache_salt": 7}',
        b'{"token_ids": [%s]}' % b",".join([b"1"] * (promotion_hints.TOKENS_MAX + 1)),
    ],
)
async def test_what_is_no_hint_is_refused(body: bytes) -> None:
    core = Core()
    async with client_of(core) as client:
        assert (await client.post(PROMOTE_PATH, content=body)).status_code == 400
        assert (await client.get(PROMOTE_PATH)).status_code == 405
        too_long = b" " * (promotion_hints.BODY_BYTES_MAX + 1)
        assert (await client.post(PROMOTE_PATH, content=too_long)).status_code == 413
    assert not core.calls


async def test_only_who_has_the_engines_key_may_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    core = Core()
    async with client_of(core) as client:
        for headers in ({}, {"authorization": "Bearer sk-2"}):
            assert (await client.post(PROMOTE_PATH, json=HINT, headers=headers)).status_code == 401
        assert not core.calls
        headers = {"authorization": "Bearer sk-1"}
        assert (await client.post(PROMOTE_PATH, json=HINT, headers=headers)).status_code == 202


async def test_more_hints_than_the_bound_are_refused_at_once() -> None:
    core = Core()
    core.may_answer.clear()
    async with client_of(core) as client:
        first = [asyncio.create_task(client.post(PROMOTE_PATH, json=HINT)) for _ in range(promotion_hints.HINTS_MAX)]
        await core.full.wait()
        assert (await client.post(PROMOTE_PATH, json=HINT)).status_code == 429
        core.may_answer.set()
        assert {(await one).status_code for one in first} == {202}


async def test_an_engine_without_the_utility_answers_that_it_is_off() -> None:
    core = Core()
    core.outcome = RuntimeError("no such utility")
    async with client_of(core) as client:
        assert (await client.post(PROMOTE_PATH, json=HINT)).status_code == 404
    async with client_of(None) as client:
        assert (await client.post(PROMOTE_PATH, json=HINT)).status_code == 404
