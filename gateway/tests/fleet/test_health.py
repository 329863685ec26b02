from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from spillway_gateway.config.ranks import ranks_of
from spillway_gateway.config.settings import EngineConfig, HealthConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.engine_metrics import PAGE_BYTES_MAX
from spillway_gateway.fleet.health import HealthPoller
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.running import UNTIL_SECONDS_MAX, until


def watched(fake: FakeEngine) -> Engine:
    return Engine("fake", EngineConfig(fake.name, fake.url), RoutingConfig())


async def test_states_follow_the_answers(start_engine: Any) -> None:
    fake = await start_engine()
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig())
        seen = []
        engine.on_state.append(lambda changed: seen.append(changed.state))
        await poller.poll_once()
        fake.ready = (503, {"ready": False, "reason": "draining"})
        await poller.poll_once()
        assert engine.answer == "not ready: draining"
        await fake.stop()
        await poller.poll_once()
        assert engine.answer.startswith("cannot connect")
        await fake.start(fake.port)
        fake.ready = (200, {})
        await poller.poll_once()

    assert seen == [EngineState.READY, EngineState.NOT_READY, EngineState.DOWN, EngineState.READY]


async def test_an_engine_that_was_lost_is_asked_again_soon_while_it_may_return(start_engine: Any) -> None:
    """Requests may wait for a lost engine, so the period does not delay the next poll."""
    fake = await start_engine()
    engine = watched(fake)
    config = HealthConfig(period_seconds=3600, return_seconds=UNTIL_SECONDS_MAX)
    async with aiohttp.ClientSession() as session:
        polling = asyncio.create_task(HealthPoller(engine, session, config).run())
        await until(lambda: engine.state is EngineState.READY)
        await fake.stop()
        engine.poll_soon()
        await until(lambda: engine.state is EngineState.DOWN)
        await fake.start(fake.port)
        await until(lambda: engine.state is EngineState.READY)
        polling.cancel()


async def test_an_engine_that_takes_no_new_connection_stays_down_though_the_polls_connection_goes_on(
    start_engine: Any,
) -> None:
    fake = await start_engine()
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig())
        await poller.poll_once()
        fake.stop_listening()
        await poller.poll_once()
        assert engine.state is EngineState.READY
        engine.refused("cannot be reached")
        await poller.poll_once()
        assert (engine.state, engine.answer[:14]) == (EngineState.DOWN, "cannot connect")
        await fake.start(fake.port)
        await poller.poll_once()
        assert engine.state is EngineState.READY


async def test_which_engines_may_return_and_for_how_long() -> None:
    now = 100.0
    engine = Engine("fake", EngineConfig("a", "http://a:1"), RoutingConfig(), clock=lambda: now)
    engine.set_state(EngineState.DOWN, "cannot connect")
    assert engine.may_return_for(2.0) == 0.0  # it was never there
    engine.set_state(EngineState.READY, "ready")
    assert engine.may_return_for(2.0) == 0.0
    engine.refused("cannot be reached")
    now += 0.5
    engine.set_state(EngineState.DOWN, "cannot connect")
    assert engine.may_return_for(2.0) == 1.5
    engine.withhold("terminating", terminating=True)
    assert engine.may_return_for(2.0) == 0.0
    engine.withhold(None)
    engine.draining = True
    assert engine.may_return_for(2.0) == 0.0
    engine.draining = False
    assert engine.may_return_for(0.0) == 0.0
    now += 1.5
    assert engine.may_return_for(2.0) == 0.0


async def test_health_is_asked_where_there_is_no_ready(start_engine: Any) -> None:
    fake = await start_engine(ready_route=False)
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        await HealthPoller(engine, session, HealthConfig()).poll_once()

    assert engine.state is EngineState.READY


async def test_an_engine_that_hangs_is_polled_again_before_its_pages_are_read() -> None:
    """Each page would time out as well, so that three polls would take as long as nine."""
    asked: list[str] = []
    silent = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        asked.append(request.path)
        await silent.wait()
        return web.Response()

    application = web.Application()
    application.router.add_get("/{path:.*}", never)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        engine = Engine("fake", EngineConfig("hung", str(server.make_url(""))), RoutingConfig())
        engine.set_state(EngineState.READY, "ready")
        poller = HealthPoller(engine, session, HealthConfig(timeout_seconds=0.05, timeouts_before_down=3))
        polls = 0
        while engine.state is EngineState.READY:
            await poller.poll_once()
            await poller.observe_once()
            polls += 1
        silent.set()

    assert polls == 3 and set(asked) <= {"/ready"}


async def test_a_slow_answer_counts_only_after_several(start_engine: Any) -> None:
    engine = watched(await start_engine())
    async with aiohttp.ClientSession() as session:
        good = HealthPoller(engine, session, HealthConfig())
        await good.poll_once()
        slow = HealthPoller(engine, session, HealthConfig(timeout_seconds=1e-9, timeouts_before_down=3))
        states = []
        for _ in range(3):
            await slow.poll_once()
            states.append(engine.state)

    assert states == [EngineState.READY, EngineState.READY, EngineState.DOWN]


async def test_metrics_are_read_of_ready_engines_and_dropped_when_stale(start_engine: Any) -> None:
    fake = await start_engine()
    fake.pages["/metrics"] = b"vllm:num_requests_running 4\nspillway_prefill_tokens_per_second 9000\n"
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig(metrics_period_seconds=1e-9))
        await poller.observe_once()
        assert engine.foreign.requests == 0  # not ready yet, so not asked
        await poller.poll_once()
        await poller.observe_once()
        assert engine.foreign.requests == 4
        assert engine.rates.prefill_tokens_per_second == 9000
        del fake.pages["/metrics"]
        await poller.observe_once()

    assert engine.foreign.requests == 0
    assert engine.rates.prefill_tokens_per_second == 9000
    assert engine.state is EngineState.READY


async def test_ranks_of_one_process_share_a_poll_and_have_readings_of_their_own(start_engine: Any) -> None:
    fake = await start_engine()
    fake.pages["/metrics"] = (
        b'vllm:num_requests_running{engine="0"} 4\nvllm:num_requests_running{engine="1"} 1\n'
        b'spillway_prefill_tokens_per_second{engine="1"} 9000\n'
    )
    ranks = [Engine("fake", each, RoutingConfig()) for each in ranks_of(EngineConfig("e", fake.url, None, None, 2))]
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(ranks[0], session, HealthConfig(metrics_period_seconds=1e-9))
        poller.join(ranks[1])
        await poller.poll_once()
        await poller.observe_once()
        assert [engine.foreign.requests for engine in ranks] == [4, 1]
        assert ranks[1].rates.prefill_tokens_per_second == 9000 != ranks[0].rates.prefill_tokens_per_second
        assert all(engine.prompt_tokens_max is not None for engine in ranks)
        assert poller.leave(ranks[0])  # the other one is polled on
        await fake.stop()
        await poller.poll_once()

    assert [engine.state for engine in ranks] == [EngineState.READY, EngineState.DOWN]
    assert not poller.leave(ranks[1])


async def test_a_page_without_end_is_not_read_to_it(start_engine: Any) -> None:
    fake = await start_engine()
    fake.pages["/metrics"] = b"vllm:num_requests_running 4\n" + b"#" * PAGE_BYTES_MAX
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig())
        await poller.poll_once()
        await poller.observe_once()

    assert engine.foreign.requests == 0 and engine.state is EngineState.READY


async def test_an_engine_joins_once_it_names_the_model(start_engine: Any) -> None:
    fake = await start_engine(model="another")
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig())
        await poller.poll_once()
        assert (engine.state, engine.answer) == (EngineState.NOT_READY, "serves another, not fake")
        fake.model = "fake"
        await poller.poll_once()

    assert engine.state is EngineState.READY


async def test_adapters_are_read_in_the_rounds_and_kept_while_there_is_no_list(start_engine: Any) -> None:
    fake = await start_engine(adapters=["sql"])
    engine = watched(fake)
    async with aiohttp.ClientSession() as session:
        poller = HealthPoller(engine, session, HealthConfig(metrics_period_seconds=1e-9))
        await poller.poll_once()
        assert engine.adapters == {"sql"}  # before the first request can be sent
        fake.adapters = ("law",)
        await poller.observe_once()
        assert engine.adapters == {"law"}
        fake.models_key = "a key that the gateway does not have"
        await poller.observe_once()

    assert engine.adapters == {"law"} and engine.prompt_tokens_max == fake.max_model_len


async def test_a_list_that_lies_elsewhere_is_not_followed_there() -> None:
    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    async def elsewhere(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}, {"id": "sql", "parent": "fake"}]})

    async def models(_: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    application = web.Application()
    application.router.add_get("/ready", ready)
    application.router.add_get("/v1/models", models)
    application.router.add_get("/elsewhere", elsewhere)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        engine = Engine("fake", EngineConfig("e", str(server.make_url("/"))), RoutingConfig())
        poller = HealthPoller(engine, session, HealthConfig())
        await poller.poll_once()
        await poller.observe_once()

    assert engine.state is EngineState.READY and engine.adapters is None
