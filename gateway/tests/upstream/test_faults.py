"""Engines that refuse, hang, die and err; clients that disconnect; counters that return to zero."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from spillway_gateway.client.connection import EXTENSION
from spillway_gateway.errors import EngineConnectTimeout
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import DieInStream, ErrorInStream, Hang, HeadThenDie, HoldInStream, Slow, Status
from spillway_gateway.testing.running import (
    UNTIL_SECONDS_MAX,
    RunningGateway,
    gateway_config,
    running_gateway,
    until,
)
from spillway_gateway.upstream.exchange import Exchange
from spillway_gateway.upstream.local_router import LocalRouter
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.relay import Relay
from spillway_gateway.upstream.router import Place

CHAT = "/v1/chat/completions"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}


def assert_idle(running: RunningGateway) -> None:
    for fleet in running.gateway.fleets:
        for engine in fleet.engines.values():
            assert (engine.running_requests, engine.queued_tokens, engine.requests) == (0, 0, set())
    assert not running.gateway.lifecycle.running


async def pair(start_engine: Any, **settings: Any) -> tuple[FakeEngine, FakeEngine]:
    return await start_engine(name="a", **settings), await start_engine(name="b", **settings)


async def ask(client: aiohttp.ClientSession, running: RunningGateway, **fields: Any) -> tuple[int, Any, bytes]:
    async with client.post(running.url + CHAT, json=chat(**fields)) as reply:
        return reply.status, reply.headers, await reply.read()


def pass_deadline(engine: Engine) -> float:
    """The only request's present wait ends, as at its deadline; returns the seconds that were left. Short deadlines
    would be passed by slow machines where nothing is late."""
    (exchange,) = engine.requests
    assert isinstance(exchange, Exchange) and exchange.due is not None
    left = exchange.due - asyncio.get_running_loop().time()
    exchange.since -= left
    exchange.on_timer()
    return left


async def first_choice(client: aiohttp.ClientSession, running: RunningGateway, engines: Any) -> Any:
    """The engine that this prompt goes to."""
    _, headers, _ = await ask(client, running)
    return next(engine for engine in engines if engine.name == headers["x-spillway-engine"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [HeadThenDie(), Status(503), Status(502), DieInStream(0)])
async def test_another_engine_answers_before_the_first_byte(
    start_engine: Any, client: aiohttp.ClientSession, fault: Any, stream: bool
) -> None:
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines)) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault = fault

        status, headers, body = await ask(client, running, stream=stream)

        assert status == 200
        assert headers["x-spillway-route"] == "retry"
        assert headers["x-spillway-engine"] != chosen.name
        assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]
        assert_idle(running)


async def test_a_refusing_engine_is_out_at_once_and_back_when_it_answers(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines, health={"periodSeconds": 30})) as running:
        chosen = await first_choice(client, running, engines)
        port = chosen.port
        await chosen.stop()

        status, headers, _ = await ask(client, running)

        assert (status, headers["x-spillway-route"]) == (200, "retry")
        assert running.engine(chosen.name).state is EngineState.DOWN
        await chosen.start(port)
        running.engine(chosen.name).poll_soon()
        await running.until_engine(chosen.name, lambda engine: engine.routable)
        assert_idle(running)


async def test_engines_that_refuse_connections_use_no_attempt_up(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = [await start_engine(name=name) for name in "abcd"]
    document = gateway_config(engines, limits={"attemptsMax": 1}, health={"periodSeconds": 30})
    async with running_gateway(document) as running:
        chosen = await first_choice(client, running, engines)
        last = next(engine for engine in engines if engine is not chosen)
        for engine in engines:
            if engine is not last:
                await engine.stop()

        status, headers, _ = await ask(client, running)

        assert (status, headers["x-spillway-route"]) == (200, "retry")
        assert headers["x-spillway-engine"] == last.name
        assert_idle(running)


async def test_a_stale_connection_is_no_failure(start_engine: Any, client: aiohttp.ClientSession) -> None:
    """The engine closes idle connections; the only engine must still answer the next request."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine], health={"periodSeconds": 30})) as running:
        for _ in range(3):
            status, headers, _ = await ask(client, running)
            assert (status, headers["x-spillway-route"]) == (200, "only")
            for connection in list(engine.connections):
                connection.transport.close()


async def test_twenty_streams_survive_a_killed_engine(start_engine: Any, client: aiohttp.ClientSession) -> None:
    """The other engine answers streams that have not begun; begun ones end with an error event and no [DONE]."""
    engines = await pair(start_engine)
    release = asyncio.Event()
    async with running_gateway(gateway_config(engines)) as running:
        prompts = [[{"role": "user", "content": f"prompt {at}"}] for at in range(20)]
        for engine in engines:
            engine.fault = HoldInStream(2, release)
        begun = [
            await client.post(running.url + CHAT, json=chat(stream=True, messages=prompt)) for prompt in prompts[:10]
        ]
        for reply in begun:
            assert (await reply.content.readany()).startswith(b"data: ")
        for engine in engines:
            engine.fault = HoldInStream(0, release)
        waiting = [asyncio.create_task(ask(client, running, stream=True, messages=prompt)) for prompt in prompts[10:]]
        await until(lambda: len(engines[0].seen) + len(engines[1].seen) == 20)
        await engines[0].stop()
        release.set()

        for status, headers, body in await asyncio.gather(*waiting):
            assert (status, headers["x-spillway-engine"]) == (200, "b")
            assert body.endswith(b"data: [DONE]\n\n")
        names = set()
        for reply in begun:
            rest = await reply.read()
            names.add(reply.headers["x-spillway-engine"])
            if reply.headers["x-spillway-engine"] == "a":
                error = json.loads(rest.strip().removeprefix(b"data: "))["error"]
                assert error["code"] == "engine_disconnected"
            else:
                assert rest.endswith(b"data: [DONE]\n\n")
        assert names == {"a", "b"}
        assert_idle(running)


async def test_death_in_the_stream_ends_with_an_error_event(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = DieInStream(2)
    async with running_gateway(gateway_config([engine])) as running:
        status, _, body = await ask(client, running, stream=True)
        assert_idle(running)

    events = body.strip().split(b"\n\n")
    assert status == 200
    assert len(events) == 3
    error = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "engine_disconnected"
    assert b"[DONE]" not in body


async def test_a_plain_reply_torn_on_the_only_engine_is_502(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = DieInStream(0)
    async with running_gateway(gateway_config([engine])) as running:
        status, _, body = await ask(client, running)
        assert_idle(running)

    assert status == 502
    assert json.loads(body)["error"]["code"] == "engine_disconnected"


async def test_an_error_object_of_the_engine_passes_as_it_is(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = ErrorInStream(2)
    async with running_gateway(gateway_config([engine])) as running:
        _, _, through = await ask(client, running, stream=True)
    async with client.post(engine.url + CHAT, json=chat(stream=True)) as reply:
        direct = await reply.read()

    assert through == direct


async def test_a_core_that_died_before_the_first_token_costs_nothing(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    """vLLM's server has sent its 200 by then; an error event in place of a token is retried on another engine."""
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines)) as running:
        _, headers, _ = await ask(client, running, stream=True)
        chosen = next(engine for engine in engines if engine.name == headers["x-spillway-engine"])
        chosen.fault = ErrorInStream(0)
        status, headers, body = await ask(client, running, stream=True)
        assert_idle(running)

    assert (status, headers["x-spillway-route"]) == (200, "retry")
    assert headers["x-spillway-engine"] != chosen.name
    assert body.endswith(b"data: [DONE]\n\n") and b"EngineCore died" not in body


async def test_a_core_that_died_on_the_only_engine_is_502(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = ErrorInStream(0)
    async with running_gateway(gateway_config([engine])) as running:
        status, _, body = await ask(client, running, stream=True)
        assert_idle(running)

    error = json.loads(body)["error"]
    assert (status, error["code"]) == (502, "engine_failed")
    assert "EngineCore died" in error["message"]


async def test_the_last_engine_s_503_passes_as_it_is(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engines = await pair(start_engine)
    for engine in engines:
        engine.fault = Status(503)
    async with running_gateway(gateway_config(engines)) as running:
        status, _, body = await ask(client, running)
        assert_idle(running)

    assert status == 503
    assert json.loads(body)["error"]["message"] == "fault: 503"
    assert sum(len(engine.seen) for engine in engines) == 2


async def test_a_silent_engine_is_retried_elsewhere_after_the_first_byte_timeout(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = await pair(start_engine)
    config = gateway_config(engines, timeouts={"firstByteSeconds": 1_000, "plainSeconds": 5_000})
    async with running_gateway(config) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault = Hang()
        for stream, seconds in ((False, 5_000), (True, 1_000)):
            before = len(chosen.seen)
            request = asyncio.create_task(ask(client, running, stream=stream))
            await until(lambda before=before: len(chosen.seen) > before)
            assert seconds - 500 < pass_deadline(running.engine(chosen.name)) <= seconds
            status, headers, _ = await request
            assert (status, headers["x-spillway-route"]) == (200, "retry")
        assert_idle(running)


async def test_a_stream_that_falls_silent_ends_with_an_error(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = HoldInStream(2, asyncio.Event())
    async with running_gateway(gateway_config([engine], timeouts={"idleSeconds": 0.2})) as running:
        _, _, body = await ask(client, running, stream=True)
        assert_idle(running)

    assert json.loads(body.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]["code"] == "engine_timeout"


async def test_the_waiting_requests_of_a_hung_engine_are_retried(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines)) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault = Hang()
        request = asyncio.create_task(ask(client, running, stream=True))
        await until(lambda: running.engine(chosen.name).requests)
        running.engine(chosen.name).hung("no answer within 2 s")

        status, headers, _ = await request
        assert (status, headers["x-spillway-route"]) == (200, "retry")
        assert_idle(running)


async def test_all_waiting_requests_of_a_hung_engine_are_retried_however_many(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = a, b = await pair(start_engine)
    release = asyncio.Event()
    async with running_gateway(gateway_config(engines, limits={"retryRatio": 0, "retryBurst": 1})) as running:
        a.fault = Hang()
        b.fault = HoldInStream(0, release)
        prompts = [[{"role": "user", "content": f"prompt {at}"}] for at in range(20)]
        requests = [asyncio.create_task(ask(client, running, stream=True, messages=prompt)) for prompt in prompts]
        await until(lambda: len(a.seen) + len(b.seen) == 20)
        assert len(a.seen) > 2
        running.engine("a").hung("no answer within 2 s")
        release.set()

        replies = await asyncio.gather(*requests)
        assert {(status, headers["x-spillway-engine"]) for status, headers, _ in replies} == {(200, "b")}
        assert_idle(running)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_at_the_engine(
    start_engine: Any, client: aiohttp.ClientSession, stream: bool
) -> None:
    engine = await start_engine()
    engine.fault = Hang()
    async with running_gateway(gateway_config([engine])) as running:
        request = asyncio.create_task(ask(client, running, stream=stream))
        await until(lambda: engine.seen)
        request.cancel()
        await until(engine.seen[-1].cancelled.is_set)
        await until(lambda: not running.gateway.lifecycle.running)
        assert_idle(running)


async def test_a_client_that_disconnects_in_the_stream_cancels_too(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine()
    engine.fault = HoldInStream(2, asyncio.Event())
    async with running_gateway(gateway_config([engine])) as running:
        async with client.post(running.url + CHAT, json=chat(stream=True)) as reply:
            await reply.content.readany()
            reply.close()
        await until(engine.seen[-1].cancelled.is_set)
        await until(lambda: not running.gateway.lifecycle.running)
        assert_idle(running)


async def test_an_unread_reply_never_reaches_the_next_request(start_engine: Any, client: aiohttp.ClientSession) -> None:
    """Clients leave at every moment while others ask on the same connections; each must get its own answer."""
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:

        async def leave(at: int) -> None:
            task = asyncio.create_task(ask(client, running, messages=[{"role": "user", "content": f"left {at}"}]))
            for _ in range(at % 23):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def stay(at: int) -> None:
            messages = [{"role": "user", "content": f"stayed {at} " * (1 + at % 5)}]
            status, _, body = await ask(client, running, messages=messages)
            expected = "".join(engine.words_for(engine.tokenize({"messages": messages})))
            assert status == 200
            assert json.loads(body)["choices"][0]["message"]["content"] == expected

        for round_number in range(30):
            await asyncio.gather(*(step(round_number * 7 + at) for at in range(7) for step in (leave, stay)))
        await until(lambda: not running.gateway.lifecycle.running)
        assert_idle(running)


def lost(running: RunningGateway) -> bool:
    return all(
        engine.state is EngineState.DOWN for fleet in running.gateway.fleets for engine in fleet.engines.values()
    )


def waiting_requests(running: RunningGateway) -> int:
    return sum(running.gateway.admissions[fleet.name].waiting_requests for fleet in running.gateway.fleets)


@pytest.mark.parametrize("stream", [False, True])
async def test_engines_that_are_all_lost_for_a_moment_cost_time_and_no_answer(
    start_engine: Any, client: aiohttp.ClientSession, stream: bool
) -> None:
    """The requests that find out lose time, and those that come then; the engines are polled before their next turn."""
    engines = await pair(start_engine)
    health = {"periodSeconds": 3600, "returnSeconds": UNTIL_SECONDS_MAX}
    async with running_gateway(gateway_config(engines, health=health)) as running:
        for engine in engines:
            await engine.stop()
        assert not lost(running)
        first = asyncio.create_task(ask(client, running, stream=stream))
        await until(lambda: lost(running) and waiting_requests(running) == 1)
        asked = [first, *(asyncio.create_task(ask(client, running, stream=stream)) for _ in range(3))]
        await until(lambda: waiting_requests(running) == len(asked))
        for engine in engines:
            await engine.start(engine.port)

        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * len(asked)
        assert_idle(running)


async def test_a_request_whose_last_engine_is_lost_before_it_is_routed_waits_too(
    start_engine: Any, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has its place waits for an engine to return, as one does that still waits for its turn."""
    engine = await start_engine()
    enter = LocalRouter.enter
    losses = iter([True])

    async def entered(self: LocalRouter, fleet: ModelFleet, request: OutboundRequest) -> Place:
        place = await enter(self, fleet, request)
        if next(losses, False):
            fleet.engines[engine.name].refused("cannot be reached")
        return place

    monkeypatch.setattr(LocalRouter, "enter", entered)
    health = {"periodSeconds": 3600, "returnSeconds": UNTIL_SECONDS_MAX}
    async with running_gateway(gateway_config([engine], health=health)) as running:
        status, _, _ = await ask(client, running)
        assert status == 200
        assert_idle(running)


async def test_a_request_waits_for_an_engine_to_return_no_longer_than_its_priority_allows(
    start_engine: Any, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine()
    enter, entered = LocalRouter.enter, []

    async def counted(self: LocalRouter, fleet: ModelFleet, request: OutboundRequest) -> Place:
        entered.append(request)
        return await enter(self, fleet, request)

    monkeypatch.setattr(LocalRouter, "enter", counted)
    settings = {"health": {"periodSeconds": 3600, "returnSeconds": UNTIL_SECONDS_MAX}}
    async with running_gateway(gateway_config([engine], admission={"normalWaitSeconds": 0.01}, **settings)) as running:
        await engine.stop()
        running.engine(engine.name).poll_soon = lambda: None
        running.engine(engine.name).refused("cannot be reached")
        status, _, body = await ask(client, running)
        assert (status, json.loads(body)["error"]["code"], len(entered)) == (503, "no_engine_ready", 1)
        assert_idle(running)


async def test_an_adapter_whose_only_engine_takes_no_connection_is_not_reached(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    """The other engine takes requests, though not this one."""
    engines = [await start_engine(name="a", adapters=["sql"]), await start_engine(name="b")]
    async with running_gateway(gateway_config(engines, health={"periodSeconds": 3600})) as running:
        await engines[0].stop()
        status, _, body = await ask(client, running, model="sql")
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_unreachable")
        assert waiting_requests(running) == 0
        assert_idle(running)


async def test_requests_whose_engines_do_not_return_leave_nothing_to_the_garbage_collector(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    """Each would hold its body, which counts no more. One finds no other engine, one waits for its own."""
    engines = [await start_engine(name="a", adapters=["sql"]), await start_engine(name="b")]
    health = {"periodSeconds": 3600, "returnSeconds": 0.01}
    async with running_gateway(gateway_config(engines, health=health)) as running:
        for engine in engines:
            await engine.stop()
            running.engine(engine.name).poll_soon = lambda: None
        gc.collect()
        gc.disable()
        try:
            for model in 4 * ("sql", "fake"):
                for engine in engines:
                    running.engine(engine.name).set_state(EngineState.READY, "ready")
                status, _, _ = await ask(client, running, model=model)
                assert status == 502
            assert sum(type(each) is Relay for each in gc.get_objects()) <= 1  # the last one
        finally:
            gc.enable()


async def test_the_wait_for_lost_engines_is_bounded_in_number_and_ends_with_its_client(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine()
    document = gateway_config(
        [engine], health={"returnSeconds": UNTIL_SECONDS_MAX}, admission={"waitingRequestsMax": 1}
    )
    async with running_gateway(document) as running:
        await engine.stop()
        await until(lambda: lost(running))
        first = asyncio.create_task(ask(client, running))
        await until(lambda: waiting_requests(running) == 1)
        status, _, body = await ask(client, running)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_engine_ready")
        first.cancel()
        await until(lambda: waiting_requests(running) == 0)
        await until(lambda: not running.gateway.lifecycle.running)


@pytest.mark.parametrize("seconds", [0, 0.1])
async def test_engines_that_do_not_return_are_named_once_they_are_expected_no_longer(
    start_engine: Any, client: aiohttp.ClientSession, seconds: float
) -> None:
    engines = await pair(start_engine)
    health = {"periodSeconds": 3600, "returnSeconds": seconds}
    async with running_gateway(gateway_config(engines, health=health)) as running:
        for engine in engines:
            await engine.stop()
        status, headers, body = await ask(client, running)  # finds out
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_unreachable")
        assert headers["connection"] == "close"
        await until(lambda: not any(running.engine(engine.name).may_return_for(seconds) for engine in engines))
        status, headers, body = await ask(client, running)

    assert (status, json.loads(body)["error"]["code"]) == (503, "no_engine_ready")
    assert int(headers["retry-after"]) > 0 and headers["connection"] == "close"  # another gateway may reach one
    assert waiting_requests(running) == 0


async def test_a_refusal_closes_the_connection_too_if_engines_do_not_even_refuse_theirs(
    start_engine: Any, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connects to the engine time out, as on a network that drops packets."""

    async def open_none(self: ConnectionPool, engine: Engine) -> None:
        raise EngineConnectTimeout("late")

    async with running_gateway(gateway_config([await start_engine()])) as running:
        monkeypatch.setattr(ConnectionPool, "open", open_none)
        status, headers, body = await ask(client, running)

    assert (status, json.loads(body)["error"]["code"]) == (504, "engine_unreachable")
    assert headers["connection"] == "close"


async def test_engines_that_drain_are_not_expected_back(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    document = gateway_config([engine], health={"returnSeconds": UNTIL_SECONDS_MAX})
    async with running_gateway(document) as running:
        engine.ready = (503, {"ready": False, "reason": "draining"})
        await running.until_engine(engine.name, lambda engine: engine.draining)
        await engine.stop()
        await until(lambda: lost(running))
        status, _, body = await ask(client, running)

    assert (status, json.loads(body)["error"]["code"]) == (503, "no_engine_ready")


async def test_no_engine_at_all_is_a_503_that_names_them(start_engine: Any, client: aiohttp.ClientSession) -> None:
    starting = await start_engine(name="starting")
    starting.ready = (503, {"ready": False, "reason": "self-check"})
    gone = await start_engine(name="gone")
    await gone.stop()
    async with running_gateway(gateway_config([starting, gone]), wait_ready=False) as running:
        await running.until_engine("starting", lambda engine: engine.state is EngineState.NOT_READY)
        await running.until_engine("gone", lambda engine: engine.state is EngineState.DOWN)
        status, headers, body = await ask(client, running)
        async with client.get(running.url + "/ready") as reply:
            assert reply.status == 503

    message = json.loads(body)["error"]["message"]
    assert status == 503
    assert int(headers["retry-after"]) > 0
    assert "starting: not ready: self-check" in message
    assert "gone: cannot connect" in message


async def test_shutdown_ends_what_still_runs_with_an_error_event(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine()
    engine.fault = HoldInStream(2, asyncio.Event())
    config = gateway_config([engine], shutdown={"drainTimeoutSeconds": 0.1})
    async with (
        running_gateway(config) as running,
        client.post(running.url + CHAT, json=chat(stream=True)) as reply,
    ):
        first = await reply.content.readany()
        running.server.begin_shutdown()
        rest = await reply.read()

    assert first.startswith(b"data: ")
    assert json.loads(rest.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]["code"] == "gateway_draining"


async def test_a_running_stream_outlives_the_drain(start_engine: Any, client: aiohttp.ClientSession) -> None:
    engine = await start_engine()
    engine.fault = Slow(between_chunks_seconds=0.05)
    async with (
        running_gateway(gateway_config([engine])) as running,
        client.post(running.url + CHAT, json=chat(stream=True)) as reply,
    ):
        await reply.content.readany()
        running.server.begin_shutdown()
        rest = await reply.read()

    assert rest.endswith(b"data: [DONE]\n\n")


async def test_engines_without_a_ready_route_are_asked_for_health(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine(ready_route=False)
    async with running_gateway(gateway_config([engine])) as running:
        status, _, _ = await ask(client, running)

    assert status == 200


async def test_streams_of_an_engine_that_shuts_down_end_before_it_does(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = await pair(start_engine)
    health = {"periodSeconds": 0.05, "endingSeconds": 0.1}
    async with running_gateway(gateway_config(engines, health=health)) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault = HoldInStream(2, asyncio.Event())
        async with client.post(running.url + CHAT, json=chat(stream=True)) as reply:
            assert await reply.content.readline()
            chosen.ready = (503, {"ready": False, "reason": "draining"})
            rest = await reply.read()

        assert b'"code":"engine_ending"' in rest and b"[DONE]" not in rest
        await until(chosen.seen[-1].cancelled.is_set)
        await until(lambda: not running.gateway.lifecycle.running)
        assert running.engine(chosen.name).breaker.closed
        assert_idle(running)


class StalledClient:
    """Takes everything but the last message of a reply."""

    engine_connections = None

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.got = bytearray()
        self.stalled = False

    def take_whole_body(self) -> bytes:
        return self.body

    def set_disconnect_callback(self, callback: Any) -> None: ...

    def clear_disconnect_callback(self, callback: Any) -> None: ...

    def reply(self, status: int, headers: Any, body: bytes) -> bool:
        return False

    def end_with_reply(self) -> None: ...

    def take_reply_bytes(self, more_bytes: int) -> bool:
        return True

    def give_reply_bytes(self, taken_bytes: int) -> None: ...

    @property
    def writable(self) -> bool:
        return False

    async def send(self, message: Any) -> None:
        self.got += message.get("body", b"")
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.stalled = True
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("write_bytes", [1, 7, 64, 1_000])
async def test_usage_is_counted_however_events_are_cut(
    start_engine: Any, client: aiohttp.ClientSession, write_bytes: int
) -> None:
    engine = await start_engine()
    engine.write_bytes = write_bytes
    async with running_gateway(gateway_config([engine])) as running:
        for _ in range(2):
            messages = [{"role": "user", "content": "a prompt of several blocks " * 8}]
            options = {"include_usage": True}
            _, _, body = await ask(client, running, messages=messages, stream=True, stream_options=options)
        usage = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        counted = f'spillway_gateway_actual_cached_tokens_total{{model="fake"}} {float(cached)}'
        await until(lambda: counted in running.gateway.metrics.exposition().decode())


@pytest.mark.parametrize("write_bytes", [1, 9, 30])
async def test_a_first_error_event_in_pieces_goes_to_another_engine(
    start_engine: Any, client: aiohttp.ClientSession, write_bytes: int
) -> None:
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines)) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault, chosen.write_bytes = ErrorInStream(0), write_bytes

        status, headers, body = await ask(client, running, stream=True)

        assert (status, headers["x-spillway-route"]) == (200, "retry")
        assert body.endswith(b"data: [DONE]\n\n") and b"EngineCore died" not in body
        assert_idle(running)


async def test_a_retry_after_a_death_inside_the_first_event_sends_none_of_it(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engines = await pair(start_engine)
    async with running_gateway(gateway_config(engines)) as running:
        chosen = await first_choice(client, running, engines)
        chosen.fault = DieInStream(0, inside=True)

        status, headers, body = await ask(client, running, stream=True)

        assert (status, headers["x-spillway-route"]) == (200, "retry")
        events = body.split(b"\n\n")[:-1]
        assert events.pop() == b"data: [DONE]"
        assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)


async def test_a_death_inside_an_event_sends_whole_events_alone(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    engine = await start_engine()
    async with running_gateway(gateway_config([engine])) as running:
        engine.fault = DieInStream(2, inside=True)
        status, _, body = await ask(client, running, stream=True)

    events = [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n")[:-1]]
    assert status == 200 and len(events) == 3
    assert events[-1]["error"]["code"] == "engine_disconnected"


@pytest.mark.parametrize("fault", [DieInStream(2), DieInStream(2, inside=True), ErrorInStream(2)])
async def test_an_engine_whose_streams_break_is_taken_out(
    start_engine: Any, client: aiohttp.ClientSession, fault: Any
) -> None:
    """Every second one, so that failures never come in a row."""
    engine = await start_engine()
    breaker = {"failures": 5, "windowRequests": 10, "failureShare": 0.3, "openSeconds": 60}
    async with running_gateway(gateway_config([engine], breaker=breaker)) as running:
        for number in range(12):
            engine.fault = fault if number % 2 else None
            await ask(client, running, stream=True)

        assert running.engine(engine.name).breaker.opened_total == 1


async def test_a_client_that_disconnects_at_done_got_the_whole_reply(start_engine: Any) -> None:
    """SDKs disconnect at [DONE]; the connection to the engine stays usable."""
    engine = await start_engine()
    engine.end_seconds = 0.05
    async with running_gateway(gateway_config([engine])) as running:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
            payload = json.dumps(chat(stream=True)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            await reader.readuntil(b"data: [DONE]\n\n")
            writer.close()
            await writer.wait_closed()
            await until(lambda: not running.gateway.lifecycle.running)
        page = running.gateway.metrics.exposition().decode()
        connections = len(engine.connections)

    assert "spillway_gateway_client_disconnects_total{" not in page
    assert 'route="only",status="2xx"} 3.0' in page
    assert connections <= 2  # one for requests, one for polls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_stalls_at_the_last_chunk_is_no_failure_of_the_engine(
    start_engine: Any, stream: bool
) -> None:
    engine = await start_engine()
    timeouts = {"idleSeconds": 1_000, "plainSeconds": 1_000}
    async with running_gateway(gateway_config([engine], timeouts=timeouts)) as running:
        client = StalledClient(json.dumps(chat(stream=stream)).encode())
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "extensions": {EXTENSION: client}}
        request = asyncio.create_task(running.gateway.app(scope, Hang, client.send))
        await until(lambda: client.stalled)
        pass_deadline(running.engine(engine.name))
        await request

        assert client.got.endswith(b"[DONE]\n\n") if stream else json.loads(client.got)["choices"]
        page = running.gateway.metrics.exposition().decode()
        assert_idle(running)

    assert 'spillway_gateway_client_disconnects_total{model="fake",phase="after_first_byte"} 1.0' in page
    assert "spillway_gateway_broken_replies_total{" not in page


async def answer_once(reply: bytes) -> asyncio.Server:
    """An engine that answers each POST with these bytes, and every poll well."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    models = json.dumps({"object": "list", "data": [{"id": "fake", "max_model_len": 1000}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models))
                else:
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                    writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def engine_config(server: asyncio.Server) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return {"models": [{"name": "fake", "engines": [{"name": "fake-0", "url": url}]}]}


@pytest.mark.parametrize("size", [64 * 1024, 1_000_000])
async def test_an_error_reply_is_whole_json_however_long(client: aiohttp.ClientSession, size: int) -> None:
    made = json.dumps({"error": {"message": "", "code": 503}})
    body = made.replace('""', f'"{"x" * (size - len(made))}"').encode()
    server = await answer_once(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    async with server, running_gateway(engine_config(server)) as running:
        status, _, got = await ask(client, running)

    message = json.loads(got)["error"]["message"]
    assert status == 503
    assert got == body if size <= 64 * 1024 else "more than 65536 bytes" in message


async def test_a_stream_is_one_whatever_the_case_of_its_content_type(client: aiohttp.ClientSession) -> None:
    event = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    server = await answer_once(head + b"%x\r\n%s\r\n" % (len(event), event))
    async with (
        server,
        running_gateway(engine_config(server)) as running,
        client.post(running.url + CHAT, json=chat(stream=True)) as reply,
    ):
        assert await reply.content.readuntil(b"\n\n") == event, "held back until its end"


async def test_a_long_plain_reply_may_be_silent_between_two_parts_as_long_as_a_stream(
    client: aiohttp.ClientSession,
) -> None:
    """The reply is longer than what is held back, and its second half never comes."""
    server = await answer_once(b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 1_000)
    config = engine_config(server) | {
        "limits": {"plainReplyBufferBytes": 500},
        "timeouts": {"idleSeconds": 1_000, "plainSeconds": 5_000},
    }
    async with server, running_gateway(config) as running, client.post(running.url + CHAT, json=chat()) as reply:
        assert await reply.content.readexactly(1_000) == b"x" * 1_000
        assert 500 < pass_deadline(running.engine("fake-0")) <= 1_000
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.content.read()
        assert_idle(running)
