"""Requests that end the engines that serve them: scripted engines that are gone once they have read one."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.keys import hash_key
from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet import engine as engine_module
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.faults import HeadThenDie, HoldInStream
from spillway_gateway.testing.running import gateway_config, running_gateway, until
from spillway_gateway.testing.running_fronts import running_fronts
from spillway_gateway.upstream import suspects
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.suspects import (
    ENTRIES_MAX,
    GOING_ON_PER_ITERATION,
    EngineLooks,
    Fingerprint,
    Look,
    Suspects,
    fingerprint_of,
)
from spillway_settings.wire import ENDING_ERROR

POISON = {"model": "fake", "prompt": "x" * 64, "vllm_xargs": {"kv_transfer_params": "boom"}}
HARMLESS = {"model": "fake", "prompt": "y" * 64}
CORE_DIED = {"error": {"message": "EngineCore encountered an issue. See stack trace", "type": "x", "code": 500}}


class Fleet:
    """Engines that end when they read POISON. how: "killed" breaks all connections and closes the port; "core" answers
    as vLLM's server does when its core is dead, and reports so from then on."""

    def __init__(self, engines: list[FakeEngine], how: str) -> None:
        self.engines = engines
        self.how = how
        self.dead: set[str] = set()
        self.ends_max = len(engines)  # further ones answer
        self._ending: set[asyncio.Task[None]] = set()
        for engine in engines:
            engine.script = lambda path, body, engine=engine: self._script(engine, body)

    def _script(self, engine: FakeEngine, body: dict[str, Any]) -> Scripted | None:
        harmless = "vllm_xargs" not in body or len(self.dead) >= self.ends_max
        if harmless and engine.name not in self.dead:
            return None
        if self.how == "killed":
            self.dead.add(engine.name)
            task = asyncio.get_running_loop().create_task(engine.stop())
            self._ending.add(task)
            raise asyncio.CancelledError  # the reply is never written
        if engine.name not in self.dead:
            self.dead.add(engine.name)
            engine.ready = (503, {"ready": False, "reason": "the core is dead"})
            engine.health_status = 503
        return Scripted(CORE_DIED, status=500, events=[CORE_DIED])

    @property
    def asked(self) -> int:
        """Poisoned requests that engines got."""
        return sum(b"vllm_xargs" in seen.body for engine in self.engines for seen in engine.seen)


@asynccontextmanager
async def gateways(fronts: int, document: dict[str, Any]) -> AsyncIterator[list[str]]:
    """The addresses that clients may ask."""
    if fronts:
        async with running_fronts(document, count=fronts) as running:
            yield running.urls
    else:
        async with running_gateway(document) as gateway:
            yield [gateway.url]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str = "") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.post(url + "/v1/completions", json=body, headers=headers) as reply:
        return reply.status, await reply.read()


async def fleet_of_four(start_engine: Any, how: str) -> Fleet:
    return Fleet([await start_engine(name) for name in "abcd"], how)


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["killed", "core"])
async def test_a_request_alone_ends_one_engine_however_often_it_is_sent(
    start_engine: Any, how: str, stream: bool, fronts: int
) -> None:
    fleet = await fleet_of_four(start_engine, how)
    poison = {**POISON, "stream": stream}
    async with gateways(fronts, gateway_config(fleet.engines)) as urls, aiohttp.ClientSession() as http:
        for _ in range(3):  # each engine has idle connections, and a stale one is no excuse to send it again
            assert (await ask(http, urls[0], HARMLESS))[0] == 200
        status, _ = await ask(http, urls[0], poison)
        assert status == 502
        assert (len(fleet.dead), fleet.asked) == (1, 1)

        async def refused(url: str) -> bool:
            status, body = await ask(http, url, poison)
            assert status == 422 and json.loads(body)["error"]["code"] == "request_suspected"
            return True

        assert all([await refused(url) for url in urls for _ in range(3)])
        assert (len(fleet.dead), fleet.asked) == (1, 1)
        assert (await ask(http, urls[-1], {**HARMLESS, "prompt": "z"}))[0] == 200  # of another content, and as long


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_request_in_company_ends_two_engines_at_most_and_the_others_are_answered(
    start_engine: Any, fronts: int
) -> None:
    fleet = await fleet_of_four(start_engine, "killed")
    release = asyncio.Event()
    async with gateways(fronts, gateway_config(fleet.engines)) as urls, aiohttp.ClientSession() as http:
        for engine in fleet.engines:
            engine.fault = HoldInStream(0, release)
        others = [
            asyncio.create_task(ask(http, urls[at % len(urls)], {"model": "fake", "prompt": f"{at}", "stream": True}))
            for at in range(24)
        ]
        await until(lambda: sum(len(engine.seen) for engine in fleet.engines) == len(others))
        assert all(engine.seen for engine in fleet.engines)
        for engine in fleet.engines:
            engine.fault = None
        statuses = [(await ask(http, url, POISON))[0] for url in (*urls, *urls)]
        release.set()
        assert statuses == [502, *[422] * (len(statuses) - 1)]
        assert (len(fleet.dead), fleet.asked) == (2, 2)
        answered = [body.endswith(b"data: [DONE]\n\n") for _, body in await asyncio.gather(*others)]
        assert sum(answered) >= len(others) / 2  # those that neither of the two engines had


@pytest.mark.parametrize("fronts", [0, 2])
async def test_an_engine_that_lives_and_breaks_a_reply_off_makes_no_suspect(start_engine: Any, fronts: int) -> None:
    engines = [await start_engine(name) for name in "ab"]
    async with gateways(fronts, gateway_config(engines)) as urls, aiohttp.ClientSession() as http:
        for _ in range(2):
            engines[0].fault, engines[1].fault = HeadThenDie(), None
            assert (await ask(http, urls[0], HARMLESS))[0] == 200
            engines[0].fault, engines[1].fault = None, HeadThenDie()
            assert (await ask(http, urls[0], HARMLESS))[0] == 200


async def test_a_request_whose_engines_host_is_gone_is_answered_by_another(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts of both engines vanish, so a third one is not asked: a request can end a machine too."""

    async def unreachable(looks: EngineLooks, engine: Engine) -> Look:
        return Look.UNREACHABLE

    monkeypatch.setattr(EngineLooks, "at", unreachable)
    fleet = await fleet_of_four(start_engine, "killed")
    fleet.ends_max = 1
    async with gateways(0, gateway_config(fleet.engines)) as urls, aiohttp.ClientSession() as http:
        assert [(await ask(http, urls[0], POISON))[0] for _ in range(2)] == [200, 200]
        fleet.ends_max = 4
        assert [(await ask(http, urls[0], POISON))[0] for _ in range(2)] == [502, 422]
    assert len(fleet.dead) == 3


async def test_a_look_tells_an_ended_process_from_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed, socket.socket() as silent, ExitStack() as connected:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(8):  # its queue is full, so the kernel drops what follows, as a lost host does
            peer = connected.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(silent.getsockname())
        looks = EngineLooks(ConnectionPool(lambda: 8, lambda: 30.0, time.monotonic))
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in (closed, silent)]
        ended, lost = (Engine("m", EngineConfig("e", url), RoutingConfig()) for url in urls)
        assert await looks.at(ended) is Look.ENDED
        monkeypatch.setattr(suspects, "LOOK_SECONDS_MAX", 0.3)
        assert await looks.at(lost) is Look.UNREACHABLE


async def test_requests_that_share_a_look_go_on_over_iterations_of_the_event_loop() -> None:
    went_on = [0]

    async def look(engine: Engine) -> None:
        assert await looks.at(engine) is Look.ENDED
        went_on[-1] += 1

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        looks = EngineLooks(ConnectionPool(lambda: 8, lambda: 30.0, time.monotonic))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        engine = Engine("m", EngineConfig("e", url), RoutingConfig())
        waiting = [asyncio.create_task(look(engine)) for _ in range(3 * GOING_ON_PER_ITERATION)]
        while sum(went_on) < len(waiting):
            went_on.append(0)
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    assert max(went_on) <= GOING_ON_PER_ITERATION


async def test_one_tenants_suspect_is_no_other_tenants(start_engine: Any, tmp_path: Path) -> None:
    fleet = await fleet_of_four(start_engine, "killed")
    keys = {name: f"sk-{name}" + "0" * 40 for name in "ab"}
    tenants = {"tenants": [{"name": name, "keys": [hash_key(key)]} for name, key in keys.items()]}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(tenants))
    (tmp_path / "salt").write_text("s" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    async with gateways(0, gateway_config(fleet.engines, auth=auth)) as urls, aiohttp.ClientSession() as http:
        statuses = [(await ask(http, urls[0], POISON, keys[name]))[0] for name in "aabb"]
    assert statuses == [502, 422, 502, 422]


def request(body: bytes, tenant: str = "", path: bytes = b"/v1/completions") -> OutboundRequest:
    return OutboundRequest(path, [], body, b"id", False, PromptBlocks([], 16, 0, 0), 0.0, tenant)


async def test_a_suspect_is_refused_for_a_short_time_first_and_in_bounded_number() -> None:
    now = [0.0]
    listed = Suspects(lambda: 600.0, lambda: now[0])
    first = await fingerprint_of(request(b"first"))
    for ended_at, refused_until in ((0.0, 60.0), (100.0, 700.0), (1000.0, 1600.0)):
        now[0] = ended_at
        assert not listed.judge(first, alone=True, again=False, begun=False)
        assert await listed.refused_seconds(request(b"first")) == refused_until - ended_at
        assert not await listed.refused_seconds(request(b"other"))  # as long
        now[0] = refused_until
        assert not await listed.refused_seconds(request(b"first"))
        assert not listed._lengths
    now[0] = 1600.0 + 600.0  # so long without an end of an engine, and it is as new
    assert not listed.judge(first, alone=True, again=False, begun=False)
    assert await listed.refused_seconds(request(b"first")) == 60.0

    for at in range(ENTRIES_MAX + 100):
        listed.put(Fingerprint(b"%016d" % at, at), 1e9)
    assert len(listed) == len(listed._lengths) == ENTRIES_MAX


async def test_a_request_that_has_ended_two_engines_is_refused_for_long_at_once() -> None:
    for alone, begun in ((False, False), (True, True)):
        listed = Suspects(lambda: 600.0, lambda: 0.0)
        first = await fingerprint_of(request(b"first"))
        assert listed.judge(first, alone=alone, again=False, begun=begun)
        assert not listed.judge(first, alone=alone, again=not begun, begun=begun)
        assert await listed.refused_seconds(request(b"first")) == 600.0


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_request_whose_engine_was_to_end_goes_to_another_and_is_no_suspect(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch, fronts: int
) -> None:
    fleet = await fleet_of_four(start_engine, "killed")
    monkeypatch.setattr(Engine, "was_to_end", property(lambda engine: engine.name in fleet.dead))
    async with gateways(fronts, gateway_config(fleet.engines)) as urls, aiohttp.ClientSession() as http:
        for ended in (1, 2):
            fleet.ends_max = ended
            assert (await ask(http, urls[0], POISON))[0] == 200
            assert len(fleet.dead) == ended


ENDING = {"error": {"message": "it ends", "type": ENDING_ERROR, "param": None, "code": 503}}
ROUTES = {
    "/v1/completions": {"prompt": "x" * 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 64}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 9},
    "/v1/responses": {"input": "x" * 64},
}


async def found_ended(looks: EngineLooks, engine: Engine) -> Look:
    return Look.ENDED


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_lone_request_whose_engine_says_that_it_ends_goes_to_another_and_is_no_suspect(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool, fronts: int
) -> None:
    """This holds even if the gateway has not polled it yet, and finds its port closed. If no engine is left, clients
    get 503."""
    monkeypatch.setattr(EngineLooks, "at", found_ended)
    engines = [await start_engine(name) for name in "abc"]
    ends: set[str] = set()

    def script(engine: FakeEngine) -> Scripted | None:
        ends.add(engine.name)
        return Scripted(ENDING, status=503, events=[ENDING]) if len(ends) < 3 else None

    async def ask_route(http: aiohttp.ClientSession, url: str) -> tuple[int, str | None, bytes]:
        body = {"model": "fake", "stream": stream, **ROUTES[route]}
        async with http.post(url + route, json=body) as reply:
            return reply.status, reply.headers.get("retry-after"), await reply.read()

    document = gateway_config(engines, limits={"retryRatio": 0, "retryBurst": 0})
    async with gateways(fronts, document) as urls, aiohttp.ClientSession() as http:
        for engine in engines:
            engine.script = lambda path, body, engine=engine: script(engine)
        for url in urls:  # two engines end at each
            ends.clear()
            assert (await ask_route(http, url))[0] == 200
            assert len(ends) == 3
        for engine in engines:
            engine.script = lambda path, body: Scripted(ENDING, status=503, events=[ENDING])
        for _ in range(2):
            status, retry_after, body = await ask_route(http, urls[0])
            assert (status, bool(retry_after)) == (503, True)
            assert b"is shutting down" in body


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_says_that_it_ends_and_stays_is_left_by_its_breaker(
    start_engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, fronts: int
) -> None:
    monkeypatch.setattr(engine_module, "ENDING_SECONDS_MAX", 0.0)
    engines = [await start_engine(name) for name in "ab"]
    engines[0].script = lambda path, body: Scripted(ENDING, status=503, events=[ENDING])
    document = gateway_config(engines, breaker={"failures": 2, "openSeconds": 3600, "openSecondsMax": 3600})
    async with gateways(fronts, document) as urls, aiohttp.ClientSession() as http:
        for number in range(40):
            body = {"model": "fake", "prompt": f"{number}" * 64, "stream": stream}
            assert (await ask(http, urls[0], body))[0] == 200
            if len(engines[0].seen) > 5:
                break
    assert 3 <= len(engines[0].seen) <= 5  # its first word is believed, and reports of fronts come later


def test_whose_engine_had_others_or_a_begun_reply_may_be_sent_once_more() -> None:
    one = Fingerprint(b"1", 1)
    listed = Suspects(lambda: 600.0, lambda: 0.0)
    assert listed.judge(one, alone=False, again=False, begun=False)
    assert not len(listed)
    assert not listed.judge(one, alone=False, again=True, begun=False)
    assert len(listed) == 1

    listed = Suspects(lambda: 600.0, lambda: 0.0)
    assert listed.judge(one, alone=True, again=False, begun=True)
    assert not len(listed)
    assert not listed.judge(one, alone=True, again=False, begun=True)  # the client has sent it again
    assert len(listed) == 1


@given(
    st.tuples(st.binary(max_size=9), st.text(max_size=3), st.binary(max_size=3)),
    st.tuples(st.binary(max_size=9), st.text(max_size=3), st.binary(max_size=3)),
)
def test_fingerprints_are_those_of_tenant_route_and_body(one: Any, other: Any) -> None:
    async def same() -> bool:
        return await fingerprint_of(request(*one)) == await fingerprint_of(request(*other))

    if b"\0" not in one[2] + other[2] and "\0" not in one[1] + other[1]:
        assert asyncio.run(same()) == (one == other)


async def test_a_long_body_is_hashed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await fingerprint_of(request(bytes(1000)))
    monkeypatch.setattr(suspects, "HASHED_BYTES_PER_STEP", 7)
    assert await fingerprint_of(request(bytes(1000))) == whole
