"""Streams through a gateway whose engines fail in their middle: the client sees one answer, or the error as ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from spillway_gateway.testing.fake_engine import FakeEngine, Scripted, byte_tokens
from spillway_gateway.testing.faults import DieInStream, ErrorInStream, HoldInStream, Status
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until
from spillway_gateway.testing.spelled_answers import SpelledAnswer
from spillway_gateway.upstream.exchange import SILENT_SECONDS, Exchange
from spillway_gateway.upstream.suspects import EngineLooks
from spillway_settings.wire import ENDING_ERROR

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"data: [DONE]\n\n"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True},
    COMPLETIONS: {"model": "fake", "prompt": "hi", "stream": True, "max_tokens": 50},
}
PIECES = [b"One", b" answer", b" of", b" \xe4\xb8", b"\xad\xe6\x96", b"\x87", b" and", b" its", b" end", b"."]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def engines_with(start_engine: Any, path: str, count: int = 2, **settings: Any) -> tuple[SpelledAnswer, Any]:
    answer = SpelledAnswer(PIECES, prompt=byte_tokens(BODIES[path]), **settings)
    engines = [
        await start_engine(name=name, script=answer.script, detokenize=answer.detokenize) for name in "abcd"[:count]
    ]
    return answer, engines


def config(engines: Any, **settings: Any) -> dict[str, Any]:
    return gateway_config(engines, continuation={"enabled": True, **settings})


async def stream(client: aiohttp.ClientSession, running: RunningGateway, path: str, **fields: Any) -> bytes:
    async with client.post(running.url + path, json={**BODIES[path], **fields}) as reply:
        assert reply.status == 200
        return await reply.read()


async def first_choice(client: aiohttp.ClientSession, running: RunningGateway, path: str, engines: Any) -> FakeEngine:
    async with client.post(running.url + path, json=BODIES[path]) as reply:
        await reply.read()
        return next(engine for engine in engines if engine.name == reply.headers["x-spillway-engine"])


async def counted(client: aiohttp.ClientSession, running: RunningGateway, family: str) -> dict[str, float]:
    async with client.get(running.url + "/metrics") as reply:
        page = await reply.text()
    lines = [line for line in page.splitlines() if line.startswith(f"spillway_gateway_{family}{{")]
    return {line.split('"')[-2]: float(line.rpartition(" ")[2]) for line in lines if not line.endswith(" 0.0")}


def as_asked(answer: SpelledAnswer, path: str) -> bytes:
    """The stream that an engine sends to a client that is connected to it directly."""
    shown = answer.events(chat=path == CHAT, asked_ids=False)
    return b"".join([*(b"data: " + json.dumps(json.loads(event[6:])).encode() + b"\n\n" for event in shown), DONE])


def contents(events: bytes) -> tuple[str, set[str], list[Any], int]:
    """(text, ids, usages, how often it ended)."""
    text, ids, usages = "", set(), []
    for line in events.split(b"\n\n"):
        if line and line != DONE.strip():
            document = json.loads(line[6:])
            ids.add(document["id"])
            usages += [document["usage"]] if "usage" in document else []
            for choice in document["choices"]:
                text += choice["delta"]["content"] if "delta" in choice else choice["text"]
    return text, ids, usages, events.count(DONE)


def assert_idle(running: RunningGateway) -> None:
    for fleet in running.gateway.fleets:
        for engine in fleet.engines.values():
            assert (engine.running_requests, engine.queued_tokens, engine.requests) == (0, 0, set())
    assert not running.gateway.lifecycle.running
    assert running.gateway.services.kept.taken == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nobody_sees_that_ids_were_asked_for(start_engine: Any, client: aiohttp.ClientSession, path: str) -> None:
    answer, engines = await engines_with(start_engine, path)
    async with running_gateway(config(engines)) as running:
        assert await stream(client, running, path) == as_asked(answer, path)
        async with client.post(running.url + path, json={**BODIES[path], "return_token_ids": True}) as reply:
            assert b'"token_ids": [1000]' in await reply.read()
        assert_idle(running)
    (first, second) = [seen for engine in engines for seen in engine.seen]
    assert first.body.startswith(b'{"return_token_ids":true,')
    assert second.body.count(b"return_token_ids") == 1


async def test_it_is_off_unless_configured(start_engine: Any, client: aiohttp.ClientSession) -> None:
    _, engines = await engines_with(start_engine, CHAT)
    async with running_gateway(gateway_config(engines)) as running:
        await stream(client, running, CHAT)
    assert b"return_token_ids" not in engines[0].seen[0].body if engines[0].seen else engines[1].seen[0].body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fault", [DieInStream, ErrorInStream])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
async def test_the_answer_goes_on_from_another_engine(
    start_engine: Any, client: aiohttp.ClientSession, path: str, fault: Any, after: int
) -> None:
    answer, engines = await engines_with(start_engine, path, options={"include_usage": True})
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, path, engines)
        chosen.fault = fault(after)
        options = {"include_usage": True}
        events = await stream(client, running, path, stream_options=options)
        text, ids, usages, ends = contents(events)
        assert text == b"".join(PIECES).decode()
        assert (len(ids), ends) == (1, 1)
        whole = len(answer.prompt), len(PIECES)
        assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [whole]
        reason = "disconnected" if fault is DieInStream else "failed"
        begun = path == COMPLETIONS or after > 1  # chat's first event is the role: another engine begins again
        assert await counted(client, running, "continued_answers_total") == ({reason: 1.0} if begun else {})
        assert await counted(client, running, "not_continued_answers_total") == {}
        assert_idle(running)


@pytest.mark.parametrize("group_sizes", [(2,), (3, 1)])
@pytest.mark.parametrize("stop", [[], ["of\u4e2d"], ["no such"]])
async def test_a_junction_that_only_the_tokenizer_knows(
    start_engine: Any, client: aiohttp.ClientSession, group_sizes: Any, stop: list[str]
) -> None:
    answer, engines = await engines_with(start_engine, CHAT, group_sizes=group_sizes, stop=stop)
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        for after in range(1, len(answer.events(chat=True, asked_ids=True))):
            chosen.fault = DieInStream(after)
            await running.until_engine(chosen.name, lambda engine: engine.routable)
            running.engine(chosen.name).breaker.succeeded(probe=False)
            assert contents(await stream(client, running, CHAT, stop=stop))[0] == b"".join(PIECES).decode()
        assert_idle(running)


async def test_a_tokenizer_that_disagrees_ends_the_answer(start_engine: Any, client: aiohttp.ClientSession) -> None:
    _, engines = await engines_with(start_engine, CHAT, group_sizes=(2,))
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        for engine in engines:
            engine.detokenize = lambda tokens: "other text"
        chosen.fault = DieInStream(3)
        events = await stream(client, running, CHAT)
        assert b'"error"' in events
        assert DONE not in events
        assert await counted(client, running, "not_continued_answers_total") == {"text": 1.0}
        assert_idle(running)


@pytest.mark.parametrize("how", ["aborts", "says that it ends"])
async def test_a_draining_engine_hands_over(
    start_engine: Any, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "says that it ends":
        monkeypatch.setattr(EngineLooks, "at", None)  # its word is enough
    answer, engines = await engines_with(start_engine, CHAT)
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)

        def aborts(path: str, body: dict[str, Any]) -> Scripted | None:
            scripted = answer.script(path, body)
            assert scripted is not None
            del scripted.events[4:]
            if how == "aborts":
                scripted.events[3]["choices"][0] |= {"finish_reason": "abort", "token_ids": []}
            else:
                scripted.events[3] = {"error": {"message": "it ends", "type": ENDING_ERROR, "code": 503}}
            return scripted

        chosen.script = aborts
        text, ids, _, ends = contents(await stream(client, running, CHAT))
        assert (text, len(ids), ends) == (b"".join(PIECES).decode(), 1, 1)


@pytest.mark.parametrize(("asked", "group"), [("/detokenize", 2), ("/v1/completions", 1)])
async def test_an_engine_that_ends_before_it_continues_is_no_failed_one(
    start_engine: Any, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, asked: str, group: int
) -> None:
    monkeypatch.setattr(EngineLooks, "at", None)  # its word is enough
    answer, engines = await engines_with(start_engine, CHAT, group_sizes=(group,))
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        (other,) = (engine for engine in engines if engine is not chosen)

        def ends(path: str, body: dict[str, Any]) -> Scripted | None:
            scripted = answer.script(path, body)
            if path == CHAT:
                scripted.events[3:] = [{"error": {"message": "it ends", "type": ENDING_ERROR, "code": 503}}]
            return scripted

        chosen.script = ends
        other.fault = Status(503, ENDING_ERROR)
        assert b"Engine %s is shutting down" % other.name.encode() in await stream(client, running, CHAT)
        assert [seen.path for seen in other.seen] == [asked]
        assert not any(running.engine(engine.name).failed_at for engine in engines)


@pytest.mark.parametrize("ending", ["ends", "went_down", "stalled"])
async def test_an_engine_that_halts_is_left(start_engine: Any, client: aiohttp.ClientSession, ending: str) -> None:
    _, engines = await engines_with(start_engine, CHAT)
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        chosen.fault = HoldInStream(3, asyncio.Event())
        answer = asyncio.create_task(stream(client, running, CHAT))
        engine = running.engine(chosen.name)
        await until(lambda: any(each.committed and not each.sending for each in engine.requests))
        exchange = _exchange(engine)
        await until(lambda: exchange._continuation.tokens == 2)
        if ending == "ends":
            engine.end_requests()
        elif ending == "went_down":
            exchange.engine_went_down(engine)  # which it is not yet known to have halted for
            assert not answer.done()
            exchange.since -= SILENT_SECONDS
            exchange.engine_went_down(engine)
        else:
            exchange.since -= exchange.due
            exchange.on_timer()
        assert contents(await answer)[0] == b"".join(PIECES).decode()
        reason = {"ends": "ending", "went_down": "went_down", "stalled": "idle_timeout"}[ending]
        assert await counted(client, running, "continued_answers_total") == {reason: 1.0}
        assert_idle(running)


async def test_a_first_silence_is_as_long_as_configured(start_engine: Any, client: aiohttp.ClientSession) -> None:
    _, engines = await engines_with(start_engine, CHAT)
    document = config(engines, stallSeconds=0.05) | {"timeouts": {"idleSeconds": 100_000}}
    async with running_gateway(document) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        chosen.fault = HoldInStream(3, asyncio.Event())
        assert contents(await stream(client, running, CHAT))[0] == b"".join(PIECES).decode()
        continued = await counted(client, running, "continued_answers_total")
        assert continued.keys() == {"idle_timeout"}  # more than once where the other engine is slow, too
        assert_idle(running)


def _exchange(engine: Any) -> Any:
    """The exchange of the engine's only request."""
    (exchange,) = engine.requests
    assert isinstance(exchange, Exchange)
    return exchange


async def test_a_stall_is_waited_for_where_no_other_engine_is_ready(
    start_engine: Any, client: aiohttp.ClientSession
) -> None:
    _, engines = await engines_with(start_engine, CHAT, count=1)
    release = asyncio.Event()
    async with running_gateway(config(engines)) as running:
        engines[0].fault = HoldInStream(3, release)
        answer = asyncio.create_task(stream(client, running, CHAT))
        engine = running.engine("a")
        await until(lambda: any(each.committed and not each.sending for each in engine.requests))
        exchange = _exchange(engine)
        services = running.gateway.services
        began = exchange.since
        assert exchange.due == pytest.approx(began + services.live.continuation.stall_seconds)
        exchange.since -= services.live.continuation.stall_seconds
        for _ in range(2):
            exchange.on_timer()
            assert exchange.due == pytest.approx(exchange.since + services.live.timeouts.idle_seconds)
        release.set()
        assert contents(await answer)[0] == b"".join(PIECES).decode()


@pytest.mark.parametrize(
    ("fields", "settings", "others", "why"),
    [
        ({"bad_words": ["x"]}, {}, None, "request"),
        ({}, {"tokensMax": 5}, None, "tokens"),
        ({}, {"bytesMax": 8}, None, "tokens"),
        ({}, {}, "stopped", "no_engine"),
        ({}, {}, Status(503), "no_engine"),
        ({}, {"attemptsMax": 1}, DieInStream(1), "attempts"),
    ],
)
async def test_what_cannot_go_on_ends_as_ever(
    start_engine: Any,
    client: aiohttp.ClientSession,
    fields: dict[str, Any],
    settings: dict[str, Any],
    others: Any,
    why: str,
) -> None:
    _, engines = await engines_with(start_engine, COMPLETIONS, count=3 if why == "attempts" else 2)
    async with running_gateway(config(engines, **settings)) as running:
        chosen = await first_choice(client, running, COMPLETIONS, engines)
        for engine in engines:
            if engine is not chosen and others == "stopped":
                await engine.stop()
                await running.until_engine(engine.name, lambda engine: not engine.routable)
            elif engine is not chosen:
                engine.fault = others
        chosen.fault = DieInStream(5)
        events = await stream(client, running, COMPLETIONS, **fields)
        assert b'"error"' in events
        assert DONE not in events
        assert b'"token_ids": [' not in events
        assert await counted(client, running, "not_continued_answers_total") == {why: 1.0}
        assert_idle(running)


async def test_it_goes_on_from_one_engine_after_another(start_engine: Any, client: aiohttp.ClientSession) -> None:
    _, engines = await engines_with(start_engine, CHAT, count=3)
    async with running_gateway(config(engines)) as running:
        chosen = await first_choice(client, running, CHAT, engines)
        for engine in engines:
            engine.fault = DieInStream(4)
        events = await stream(client, running, CHAT)
        text, ids, _, ends = contents(events)
        assert (text, len(ids), ends) == (b"".join(PIECES).decode(), 1, 1)
        assert await counted(client, running, "continued_answers_total") == {"disconnected": 2.0}
        assert sorted(len(engine.seen) for engine in engines) == [1, 1, 2]
        async with client.get(running.url + "/ui/state") as reply:
            assert (await reply.json())["models"][0]["continuationPause"]["samples"] == 2
        assert len(chosen.seen) == 2
        assert_idle(running)


async def test_an_answer_that_is_whole_needs_no_engine(start_engine: Any, client: aiohttp.ClientSession) -> None:
    answer, engines = await engines_with(start_engine, CHAT, count=1, options={"include_usage": True})
    events = len(answer.events(chat=True, asked_ids=True))
    for after in (events - 1, events):
        async with running_gateway(config(engines)) as running:
            engines[0].fault = DieInStream(after)
            if after == events:

                def endless(path: str, body: dict[str, Any]) -> Scripted | None:
                    scripted = answer.script(path, body)
                    assert scripted is not None
                    scripted.events.append({"never": "sent"})
                    return scripted

                engines[0].script = endless
            shown = await stream(client, running, CHAT, stream_options={"include_usage": True})
            text, _, usages, ends = contents(shown)
            assert (text, len(usages), ends) == (b"".join(PIECES).decode(), 1, 1)
            assert_idle(running)
