"""Names of weights over HTTP, through the middleware, to a double of vLLM's line to EngineCore."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from spillway_engine.middleware import ReadinessMiddleware
from spillway_engine.pod_channel import PodBrief
from spillway_settings.wire import WEIGHTS_PATH

NAMED = {"version": "step-7", "known": True, "namespace": "ab", "refused": None}


class Core:
    core_engines = (b"\0\0", b"\1\0")  # as vLLM names those of ranks
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, *answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = list(answers)

    async def _call_utility_async(self, *call: Any, engine: bytes) -> Any:
        return await self.call_utility_async(*call, engine)

    async def call_utility_async(self, *call: Any) -> Any:
        self.calls.append(call)
        await asyncio.sleep(0)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def client_of(core: Core, ranks: int = 1) -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(ReadinessMiddleware, brief=PodBrief(data_parallel_ranks=ranks))
    app.state.engine_client = SimpleNamespace(engine_core=core)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize("version", ["step-7", "run.3/step:1200@a+b", "7", None])
async def test_a_name_reaches_every_rank(version: str | None) -> None:
    core = Core(NAMED, NAMED)
    async with client_of(core, ranks=2) as client:
        reply = await client.post(WEIGHTS_PATH, json={"version": version})

    assert (reply.status_code, reply.json()) == (200, NAMED)
    assert core.calls == [("spillway_weights", version, rank) for rank in core.core_engines]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"version": ""}',
        '{"version": 7}',
        '{"version": "-7"}',
        '{"version": "a b"}',
        '{"version": "a\\n"}',
        '{"version": "\u00e9"}',
        '{"version": "' + 129 * "a" + '"}',
        '{"version": "a", "versoin": "b"}',
    ],
)
async def test_what_is_no_name_reaches_nobody(body: str) -> None:
    core = Core()
    async with client_of(core) as client:
        reply = await client.post(WEIGHTS_PATH, content=body)

    assert reply.status_code == 400 and "1 to 128 letters" in reply.text
    assert core.calls == []


async def test_a_rank_that_refuses_is_a_conflict() -> None:
    async with client_of(Core(NAMED, {**NAMED, "refused": "blocks are in use"}), ranks=2) as client:
        reply = await client.post(WEIGHTS_PATH, json={"version": "a"})

    assert reply.status_code == 409 and "blocks are in use" in reply.text


async def test_asking_names_nothing() -> None:
    core = Core(NAMED)
    async with client_of(core) as client:
        reply = await client.get(WEIGHTS_PATH)

    assert (reply.status_code, reply.json(), core.calls) == (200, NAMED, [("spillway_weights",)])


@pytest.mark.parametrize("other", [{"known": False}, {"version": "step-6"}])
async def test_a_name_that_not_every_rank_has_is_not_known(other: dict[str, Any]) -> None:
    async with client_of(Core(NAMED, {**NAMED, **other}), ranks=2) as client:
        assert (await client.get(WEIGHTS_PATH)).json() == {**NAMED, "known": False}


@pytest.mark.parametrize("answer", [{}, AttributeError("no such utility")])
async def test_an_engine_without_the_connector_has_no_weights_to_name(answer: Any) -> None:
    async with client_of(Core(answer)) as client:
        assert (await client.post(WEIGHTS_PATH, json={"version": "a"})).status_code == 404


async def test_an_engine_that_has_ended_is_unavailable() -> None:
    core = Core(RuntimeError("EngineCore encountered an issue"))
    core.resources = SimpleNamespace(engine_dead=True)  # as vLLM's client notes it
    async with client_of(core) as client:
        reply = await client.post(WEIGHTS_PATH, json={"version": "a"})

    assert reply.status_code == 503 and "has ended" in reply.text


async def test_two_names_at_once_are_not_mixed_over_the_ranks() -> None:
    core = Core(*4 * [NAMED])
    async with client_of(core, ranks=2) as client:
        await asyncio.gather(*(client.post(WEIGHTS_PATH, json={"version": name}) for name in "ab"))

    assert [call[1] for call in core.calls] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


async def test_the_engine_s_own_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    core = Core(NAMED)
    async with client_of(core) as client:
        assert (await client.post(WEIGHTS_PATH, json={"version": "a"})).status_code == 401
        assert core.calls == []
        headers = {"Authorization": "Bearer the key"}
        assert (await client.post(WEIGHTS_PATH, json={"version": "a"}, headers=headers)).status_code == 200
