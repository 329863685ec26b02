"""The middleware over a real server and a small FastAPI application that answers as vLLM does."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from spillway_engine import middleware
from spillway_engine.middleware import ReadinessMiddleware
from spillway_engine.pod_channel import MessageBuffer, PodBrief, encode_message
from spillway_engine.settling import Settled
from spillway_settings.wire import ENDING_ERROR

Serving = Callable[[Any], AbstractAsyncContextManager[str]]


@dataclass
class Engine:
    """Answers at once, or holds a request until it is released."""

    model: Any = None  # a BigramModel, for the self-check
    of_rank: dict[str, Any] = field(default_factory=dict)  # another one for a data parallel rank
    brief: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.aborted = 0
        self.aborted_once = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.parent, theirs = socket.socketpair()
        self.parent.setblocking(False)
        self.app = FastAPI()
        self.app.add_middleware(
            ReadinessMiddleware,
            brief=PodBrief(
                **{
                    "control_fd": theirs.detach(), "served_name": "m", "dtype": "bfloat16", "eager": True,
                    "self_check": self.model is not None, "configuration": {"settings": {"name": "engine-0"}},
                    **self.brief,
                }
            ),
        )  # fmt: skip
        self.app.post("/v1/chat/completions")(self._chat)
        self.app.post("/v1/completions")(self._complete)
        self.app.get("/health")(lambda: {})
        self._buffer = MessageBuffer()

    async def _chat(self, request: Request) -> Any:
        body = await request.json()
        await self.may_answer.wait()
        if body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        if body.get("hold"):
            await self._hold()
        return {"choices": [{"message": {"content": "The capital of France is Paris."}}]}

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        await self.may_answer.wait()
        return self.of_rank.get(request.headers.get("x-data-parallel-rank", ""), self.model).complete(body)

    async def _stream(self) -> AsyncIterator[str]:
        yield 'data: {"choices": []}\n\n'
        await self._hold()
        yield "data: [DONE]\n\n"

    async def _hold(self) -> None:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            self.aborted_once.set()
            raise

    def order(self, order: dict[str, Any]) -> None:
        self.parent.sendall(encode_message(order))

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name from the middleware."""
        async with asyncio.timeout(120):
            while True:
                for message in self._buffer.feed(await asyncio.get_running_loop().sock_recv(self.parent, 4096)):
                    if message["event"] == name:
                        return message


async def test_ready_after_a_passed_self_check_and_not_before(serving: Serving, bigram_model: Any) -> None:
    engine = Engine(bigram_model())
    engine.may_answer.clear()
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await engine.event("serving")
        before = await client.get("/ready")
        engine.may_answer.set()
        await engine.event("ready")
        after = await client.get("/ready")

    assert (before.status_code, before.json()) == (503, {"ready": False, "reason": "self-check"})
    assert (after.status_code, after.json()) == (200, {"ready": True})


async def test_an_engine_that_fails_the_self_check_says_why_and_is_never_ready(
    serving: Serving, bigram_model: Any
) -> None:
    engine = Engine(bigram_model(decode_error_nats=1.0))
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        reason = (await engine.event("self_check_failed"))["reason"]
        ready = await client.get("/ready")

    assert reason.startswith("self-check failed: log-probabilities of 16 generated tokens differ by 1.000 on average")
    assert (ready.status_code, ready.json()["reason"]) == (503, reason)


async def test_an_engine_that_would_drop_salts_is_ended_and_computes_nothing(
    serving: Serving, bigram_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.23.0"))
    messages = SimpleNamespace(AnthropicServingMessages=object, _build_anthropic_usage=None)  # as of later versions
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.anthropic", SimpleNamespace(serving=messages))
    engine = Engine(bigram_model())
    pooler = SimpleNamespace(enable_chunked_processing=True)
    engine.app.state.vllm_config = SimpleNamespace(model_config=SimpleNamespace(pooler_config=pooler))
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        reason = (await engine.event("self_check_failed"))["reason"]
        ready = await client.get("/ready")
        refused = await client.post("/v1/completions", json={"prompt": "a"})

    assert reason.startswith("extraArgs: vLLM 0.23.0 drops the cache_salt of every embedding")
    assert (ready.status_code, ready.json()["reason"]) == (503, reason)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, reason)
    assert not engine.model.requests


async def test_every_data_parallel_rank_is_checked(serving: Serving, bigram_model: Any) -> None:
    models = {"0": bigram_model(), "1": bigram_model()}
    engine = Engine(bigram_model(), models, {"data_parallel_ranks": 2})
    async with serving(engine.app):
        await engine.event("ready")

    assert len(models["0"].requests) == len(models["1"].requests) > 0
    assert not engine.model.requests


async def test_one_broken_rank_is_named_and_the_engine_never_ready(serving: Serving, bigram_model: Any) -> None:
    models = {"0": bigram_model(), "1": bigram_model(decode_error_nats=1.0)}
    engine = Engine(bigram_model(), models, {"data_parallel_ranks": 2})
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        reason = (await engine.event("self_check_failed"))["reason"]
        ready = await client.get("/ready")

    assert reason.startswith("self-check failed: data parallel rank 1: log-probabilities of 16 generated tokens differ")
    assert (ready.status_code, ready.json()["reason"]) == (503, reason)


async def test_without_self_check_it_is_ready_at_once(serving: Serving) -> None:
    engine = Engine()
    async with serving(engine.app):
        await engine.event("ready")


async def test_the_configuration_is_shown(serving: Serving) -> None:
    engine = Engine()
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        shown = await client.get("/spillway/config")

    assert shown.json() == {"settings": {"name": "engine-0"}, "version": version("spillway-engine")}


async def test_a_drain_waits_for_running_requests(serving: Serving) -> None:
    engine = Engine()
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await engine.event("ready")
        running = asyncio.create_task(client.post("/v1/chat/completions", json={"hold": True}))
        await engine.entered.wait()
        engine.order({"order": "drain", "delay_seconds": 0, "timeout_seconds": 20})
        while (await client.get("/ready")).status_code == 200:
            pass
        refused = await client.post("/v1/chat/completions", json={})
        health = await client.get("/health")
        engine.release.set()
        answer = await running
        drained = await engine.event("drained")

    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "the engine is draining and takes no new requests"
    assert refused.json()["error"]["type"] == ENDING_ERROR
    assert health.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert drained == {"event": "drained", "finished": 1, "cancelled": 0, "stored": 0, "left": 0}


async def test_it_keeps_serving_during_the_delay(serving: Serving) -> None:
    engine = Engine()
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await engine.event("ready")
        engine.order({"order": "drain", "delay_seconds": 600, "timeout_seconds": 0})
        while (ready := await client.get("/ready")).status_code == 200:
            pass
        answer = await client.post("/v1/chat/completions", json={})
        engine.order({"order": "hurry"})
        await engine.event("drained")

    assert ready.json()["reason"] == "draining"
    assert answer.status_code == 200


@pytest.mark.parametrize("how", ["a hurried drain", "lost ranks", "ranks that are lost during a drain"])
async def test_what_outlives_the_drain_is_ended_with_a_clear_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Lost ranks store nothing, so nothing waits for the engine core, which waits for them."""
    settled = AsyncMock(return_value=Settled())
    monkeypatch.setattr(middleware, "settle", settled)
    engine = Engine(brief={"settles": True})
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await engine.event("ready")
        whole = asyncio.create_task(client.post("/v1/chat/completions", json={"hold": True}))
        async with client.stream("POST", "/v1/chat/completions", json={"stream": True}) as streamed:
            lines = streamed.aiter_lines()
            first = await anext(lines)
            await engine.entered.wait()
            if how != "lost ranks":
                engine.order({"order": "drain", "delay_seconds": 600, "timeout_seconds": 600})
            engine.order({"order": "hurry" if how == "a hurried drain" else "abandon"})
            rest = [line async for line in lines if line]
        answer = await whole
        drained = await engine.event("drained")

    assert first == 'data: {"choices": []}'
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == ENDING_ERROR
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == ENDING_ERROR
    assert drained["cancelled"] == 2
    assert engine.aborted == 2
    assert settled.called == (how == "a hurried drain")


async def test_a_clients_own_disconnect_is_passed_on(serving: Serving) -> None:
    engine = Engine()
    async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        await engine.event("ready")
        async with client.stream("POST", "/v1/chat/completions", json={"stream": True}) as streamed:
            await anext(streamed.aiter_lines())
            await engine.entered.wait()
        async with asyncio.timeout(120):
            await engine.aborted_once.wait()
        engine.order({"order": "drain", "delay_seconds": 0, "timeout_seconds": 20})
        drained = await engine.event("drained")

    assert drained["cancelled"] == 0
