"""Streams whose engine sends a preamble first, and then dies, reports a failure, falls silent or answers: in every
dialect, with the events of vLLM 0.23 and 0.32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from spillway_gateway.access.keys import hash_key
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.testing.fake_documents import (
    completion_events,
    completion_usage,
    messages_events,
    response_events,
    typed_event,
    untyped_event,
)
from spillway_gateway.testing.running import RunningGateway, patient, running_gateway, until
from spillway_gateway.testing.running_fronts import running_fronts
from spillway_gateway.upstream.exchange import Exchange, State
from spillway_gateway.upstream.sse import EVENT_BYTES_MAX
from spillway_gateway.upstream.stream_relay import PREAMBLE_BYTES_MAX

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATE = "/inference/v1/generate"
COMMENT = b": keep-alive\n\n"
KEY = "sk-" + "a" * 40
DONE = b"data: [DONE]\n\n"
MESSAGE = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": MESSAGE, "stream": True},
    COMPLETIONS: {"model": "fake", "prompt": "hi", "stream": True},
    MESSAGES: {"model": "fake", "messages": MESSAGE, "max_tokens": 9, "stream": True},
    RESPONSES: {"model": "fake", "input": "hi", "stream": True},
    GENERATE: {"model": "fake", "token_ids": [1, 2], "sampling_params": {}, "stream": True},
}
# How each dialect reports a failure of the engine and a fault of the request, once its status is 200.
FAILURES: dict[str, list[bytes]] = {
    path: [untyped_event({"error": {"message": "core died", "type": "InternalServerError", "code": 500}}) + DONE]
    for path in (CHAT, COMPLETIONS, GENERATE)
} | {
    MESSAGES: [typed_event({"type": "error", "error": {"type": "internal_error", "message": "core died"}})],
    RESPONSES: [
        typed_event({"type": "response.failed", "response": {"error": {"code": "server_error"}}}),
        typed_event({"type": "error", "code": "server_error", "message": "core died", "sequence_number": 2}),
    ],
}
REFUSALS: dict[str, bytes] = {
    path: untyped_event({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}) + DONE
    for path in (CHAT, COMPLETIONS, GENERATE)
} | {
    MESSAGES: typed_event({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}),
    RESPONSES: typed_event({"type": "response.failed", "response": {"error": {"code": "invalid_prompt"}}}),
}

# The mark of the end without an answer. A response's holds the answer, which may be empty, so its stream is cut.
EARLY_ENDS: dict[str, bytes | None] = {MESSAGES: typed_event({"type": "message_stop"}), RESPONSES: None}


@dataclass(frozen=True)
class Answer:
    """One engine's answer, as it sends it."""

    preamble: bytes
    parts: bytes
    end: bytes

    @property
    def whole(self) -> bytes:
        return self.preamble + self.parts + self.end


def answer(path: str, name: str) -> Answer:
    """name: is in the answer's id and in its text."""
    words = [f" {name}", " says", " so"]
    usage = {"input_tokens": 3, "output_tokens": 3, "total_tokens": 6}
    if path == MESSAGES:
        events = [event.replace(b"msg_fake", f"msg_{name}".encode()) for event in messages_events(words, "fake", usage)]
        return Answer(b"".join(events[:2]), b"".join(events[2:-1]), events[-1])
    if path == RESPONSES:
        created, *parts, completed = response_events(f"resp_{name}", words, "fake", usage)
        progress = created.replace(b"response.created", b"response.in_progress")
        return Answer(created + progress, b"".join(parts), completed)
    if path == GENERATE:
        parts = [untyped_event({"request_id": name, "choices": [{"token_ids": [7]}]})]
        return Answer(b"", b"".join(parts), DONE)
    tokens = completion_usage(3, 3, 0)
    events = completion_events(path, words, "fake", tokens, with_usage=False)
    events = [event.replace(b"cmpl-fake", f"cmpl-{name}".encode()) for event in events]
    return Answer(b"".join(events[: path == CHAT]), b"".join(events[path == CHAT :]), DONE)


Step = bytes | asyncio.Event | None  # to be sent, to be waited for, or the end of the connection


@dataclass
class ScriptedEngine:
    """Answers each streaming request with the steps of `script`. metrics: its page."""

    name: str
    script: Callable[[str], Sequence[Step]]
    asked: int = 0
    metrics: bytes = b""
    url: str = ""
    status: int = 200
    server: asyncio.Server | None = field(default=None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                if head.startswith(b"GET"):
                    models = json.dumps({"data": [{"id": "fake", "max_model_len": 9000}]}).encode()
                    body = self.metrics if path == "/metrics" else models
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                    continue
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.asked += 1
                await self._answer(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            body = json.dumps({"error": {"message": "not so", "type": "BadRequestError", "code": self.status}}).encode()
            head = b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\n" % self.status
            writer.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"metadata: %s\r\n\r\n" % self.name.encode()
        )
        for step in self.script(path):
            if step is None:
                await writer.drain()
                writer.transport.abort()
                return
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step:
                writer.write(b"%x\r\n%s\r\n" % (len(step), step))
                await writer.drain()
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    servers = []

    async def start_engine(name: str, script: Callable[[str], Sequence[Step]]) -> ScriptedEngine:
        engine = ScriptedEngine(name, script)
        engine.server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        engine.url = f"http://127.0.0.1:{engine.server.sockets[0].getsockname()[1]}"
        servers.append(engine.server)
        return engine

    yield start_engine
    for server in servers:
        server.close()


def config(*engines: ScriptedEngine, **sections: Any) -> dict[str, Any]:
    model = {"name": "fake", "engines": [{"name": engine.name, "url": engine.url} for engine in engines]}
    return {"models": [model], **patient(health={"periodSeconds": 0.05, "metricsPeriodSeconds": 0.05}, **sections)}


async def ask(client: aiohttp.ClientSession, running: RunningGateway, path: str) -> tuple[int, Any, bytes]:
    async with client.post(running.url + path, json=BODIES[path]) as reply:
        return reply.status, reply.headers, await reply.read()


def answers(name: str) -> Callable[[str], Sequence[Step]]:
    return lambda path: [answer(path, name).whole]


def without_comments(body: bytes) -> bytes:
    return body.replace(COMMENT, b"")


BAD_ENDS: dict[str, Callable[[str], list[Step]]] = {
    "dies": lambda path: [None],
    "ends": lambda path: [],
    "fails": lambda path: [FAILURES[path][-1]],
    "finishes": lambda path: [EARLY_ENDS.get(path, DONE)],
}
BEFORE: dict[str, Callable[[str], list[Step]]] = {
    "preamble": lambda path: [answer(path, "bad").preamble],
    "comments": lambda path: [COMMENT] * 4,
    "both": lambda path: [COMMENT, answer(path, "bad").preamble, COMMENT],
}


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("end", list(BAD_ENDS))
@pytest.mark.parametrize("before", list(BEFORE))
async def test_an_engine_that_fails_before_the_first_part_is_replaced(
    client: aiohttp.ClientSession, start: Any, path: str, end: str, before: str
) -> None:
    """The client sees one answer with one preamble, of one engine."""
    bad = await start("bad", lambda path: [*BEFORE[before](path), *BAD_ENDS[end](path)])
    good = await start("good", answers("good"))
    async with running_gateway(config(bad, good)) as running:
        for _ in range(2):
            status, headers, body = await ask(client, running, path)
            assert status == 200
            assert without_comments(body) == answer(path, "good").whole
            if before == "preamble":
                assert headers["x-spillway-engine"] == "good" == headers["metadata"]
        assert bad.asked and good.asked == 2
        reports = end == "fails" or (end == "finishes" and path != RESPONSES)
        failed = "failed" if reports else "disconnected"
        metrics = await _metrics(client, running)
        assert f'spillway_gateway_retries_total{{engine="bad",reason="{failed}"}} {bad.asked}.0' in metrics
        assert 'spillway_gateway_broken_replies_total{engine="bad"' not in metrics


@pytest.mark.parametrize("path", list(BODIES))
async def test_nothing_passes_behind_the_end_of_an_answer(client: aiohttp.ClientSession, start: Any, path: str) -> None:
    second = answer(path, "second").whole
    engine = await start("engine", lambda path: [answer(path, "first").whole + second, second])
    async with running_gateway(config(engine)) as running:
        _, _, body = await ask(client, running, path)
    assert b"second" not in body
    assert body.startswith(answer(path, "first").whole)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_of_two_answers_is_not_whole_with_the_first_one_s_finish(
    client: aiohttp.ClientSession, start: Any, path: str
) -> None:
    """The engine ends the stream after the first answer's finish, without `[DONE]`."""
    said = {"delta": {"content": "a"}, "text": "a"}
    parts = [untyped_event({"choices": [{"index": index, **said, "finish_reason": None}]}) for index in range(2)]
    finish = untyped_event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
    engine = await start("engine", lambda path: [*parts, finish])
    async with running_gateway(config(engine)) as running:
        for choices in (2, 1):
            async with client.post(running.url + path, json={**BODIES[path], "n": choices}) as reply:
                assert (b"engine_disconnected" in await reply.read()) is (choices == 2)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("number", [0, 1])
async def test_an_engine_that_reports_failures_in_its_streams_is_taken_out(
    client: aiohttp.ClientSession, start: Any, path: str, number: int
) -> None:
    begun = lambda path: [answer(path, "bad").preamble + answer(path, "bad").parts]  # noqa: E731
    failure = FAILURES[path][number % len(FAILURES[path])]
    bad = await start("bad", lambda path: [*begun(path), failure])
    async with running_gateway(config(bad, breaker={"openSeconds": 600})) as running:
        for _ in range(8):
            status, _, body = await ask(client, running, path)
            assert status == 200 and body == begun(path)[0] + failure, "passed as it is"
        assert not running.engine("bad").breaker.closed


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_with_two_processes_a_failed_stream_moves_and_its_engine_is_taken_out(
    client: aiohttp.ClientSession, start: Any, path: str
) -> None:
    bad = await start("bad", lambda path: [COMMENT, answer(path, "bad").preamble, FAILURES[path][-1]])
    good = await start("good", answers("good"))
    async with running_fronts(config(bad, good, breaker={"openSeconds": 600})) as fronts:
        engine = fronts.gateway.fleets[0].engines["bad"]
        for number in range(40):
            async with client.post(fronts.urls[number % 2] + path, json=BODIES[path]) as reply:
                assert without_comments(await reply.read()) == answer(path, "good").whole
            if not engine.breaker.closed:
                break
        await until(lambda: not engine.breaker.closed)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_that_is_at_fault_costs_its_engine_nothing(
    client: aiohttp.ClientSession, start: Any, path: str, begun: bool
) -> None:
    said = [answer(path, "a").preamble + (answer(path, "a").parts if begun else b""), REFUSALS[path]]
    engines = [await start(name, lambda path: said) for name in "ab"]
    async with running_gateway(config(*engines)) as running:
        for _ in range(30):
            assert (await ask(client, running, path))[2] == b"".join(said)
        assert sum(engine.asked for engine in engines) == 30, "nothing is sent twice"
        assert all(running.engine(engine.name).breaker.closed for engine in engines)
        assert running.engine("a").prefill.tokens_per_second == 5000.0, "a refusal measures no prefill"


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("first", ["preamble", "comments", "both"])
async def test_figures_and_timeouts_wait_for_the_first_part(
    client: aiohttp.ClientSession, start: Any, path: str, first: str
) -> None:
    go_on = asyncio.Event()
    late = await start("late", lambda path: [*BEFORE[first](path), go_on, answer(path, "late").whole])
    async with running_gateway(config(late)) as running:
        asked = asyncio.create_task(ask(client, running, path))
        engine = running.engine("late")
        await until(lambda: late.asked and engine.requests)
        for _ in range(20):  # of the loops of both sides
            await asyncio.sleep(0)
        assert engine.queued_tokens > 0 and _exchange(engine).state is not State.ANSWERING
        assert "first_byte_seconds_count" not in await _metrics(client, running)
        assert _left(_exchange(engine)) > 200, "firstByteSeconds, from the start"
        go_on.set()
        await asked
        assert "first_byte_seconds_count" in await _metrics(client, running)


@pytest.mark.parametrize("fronts", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_an_engine_that_sends_the_preamble_of_an_answer_has_computed_its_prompt(
    client: aiohttp.ClientSession, start: Any, monkeypatch: pytest.MonkeyPatch, path: str, fronts: bool
) -> None:
    """The preamble of a response does not show that: vLLM sends it at once."""
    computed: list[Attempt] = []

    def note(attempt: Attempt) -> None:
        computed.append(attempt)

    monkeypatch.setattr(Attempt, "computed", note)
    go_on = asyncio.Event()
    preamble = answer(path, "a").preamble
    engine = await start("a", lambda path: [preamble, preamble, go_on, answer(path, "a").whole])
    at_first_token = bool(preamble) and path != RESPONSES
    run: Any = running_fronts if fronts else running_gateway
    async with run(config(engine)) as running:
        url = running.urls[0] if fronts else running.url
        asked = asyncio.create_task(client.post(url + path, json=BODIES[path]))
        await until(lambda: len(computed) == at_first_token and engine.asked)
        for _ in range(20):  # of the loops of all sides
            await asyncio.sleep(0)
        assert len(computed) == at_first_token
        go_on.set()
        async with await asked as reply:
            await reply.read()


async def test_comments_do_not_keep_a_stream_alive_for_ever(client: aiohttp.ClientSession, start: Any) -> None:
    def forever(path: str) -> Any:
        while True:
            yield COMMENT

    engine = await start("a", forever)
    async with (
        running_gateway(config(engine)) as running,
        client.post(running.url + CHAT, json=BODIES[CHAT]) as reply,
    ):
        assert await reply.content.readexactly(len(COMMENT)) == COMMENT
        exchange = _exchange(running.engine("a"))
        assert _left(exchange) > 100, "set once, when the request was sent"
        exchange.sending = False
        exchange.since -= _left(exchange)
        exchange.on_timer()
        body = await reply.read()

    assert json.loads(body.rsplit(b"data: ", 1)[1])["error"]["code"] == "engine_timeout"


async def test_a_preamble_that_is_too_long_is_not_held_back(client: aiohttp.ClientSession, start: Any) -> None:
    created = {"type": "response.created", "response": {"id": "resp_a", "instructions": "x" * PREAMBLE_BYTES_MAX}}
    go_on = asyncio.Event()
    engine = await start("a", lambda path: [typed_event(created), go_on, answer(path, "a").whole])
    async with (
        running_gateway(config(engine)) as running,
        client.post(running.url + RESPONSES, json=BODIES[RESPONSES]) as reply,
    ):
        assert await reply.content.readexactly(len(typed_event(created))) == typed_event(created)
        assert _exchange(running.engine("a")).state is State.PREAMBLE
        go_on.set()
        assert await reply.read() == answer(RESPONSES, "a").whole


@pytest.mark.parametrize("dies", [False, True])
async def test_the_end_of_a_response_is_known_however_long_its_last_event_is(
    client: aiohttp.ClientSession, start: Any, tmp_path: Path, dies: bool
) -> None:
    """The last event repeats the whole answer, with its log-probabilities."""
    usage = {"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 2}}
    *events, completed = response_events("resp_a", ["x" * 2 * EVENT_BYTES_MAX], "fake", usage)
    parts = [completed[at : at + 50_000] for at in range(0, len(completed), 50_000)]
    engine = await start("a", lambda path: [*events[:1], *parts[:-1], *([None] if dies else [parts[-1]])])
    log = tmp_path / "audit.log"
    async with running_gateway(config(engine, audit={"enabled": True, "file": str(log)})) as running:
        status, _, body = await ask(client, running, RESPONSES)
        assert (status, body == events[0] + completed, b"event: error" in body) == (200, not dies, dies)
        broken = 'spillway_gateway_broken_replies_total{engine="a"' in await _metrics(client, running)
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    counts = line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]
    assert (broken, counts == (3, 5, 2)) == (dies, not dies)


async def test_the_id_of_a_background_response_comes_at_once(client: aiohttp.ClientSession, start: Any) -> None:
    created = typed_event({"type": "response.created", "response": {"id": "resp_a", "background": True}})
    go_on = asyncio.Event()
    engine = await start("a", lambda path: [created, go_on, answer(path, "a").parts, answer(path, "a").end])
    async with (
        running_gateway(config(engine)) as running,
        client.post(running.url + RESPONSES, json={**BODIES[RESPONSES], "background": True}) as reply,
    ):
        assert await reply.content.readexactly(len(created)) == created
        go_on.set()
        await reply.read()


# -- keep-alive --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("tenant", [False, True])  # whose replies pass through a filter
async def test_a_silent_stream_gets_comments_and_then_its_answer(
    client: aiohttp.ClientSession, start: Any, tmp_path: Path, path: str, tenant: bool
) -> None:
    sections: dict[str, Any] = {}
    if tenant:
        (tmp_path / "keys.yaml").write_text(json.dumps({"tenants": [{"name": "a", "keys": [hash_key(KEY)]}]}))
        (tmp_path / "salt").write_text("s" * 32)
        files = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
        sections["auth"] = {**files, "unsaltedRoutes": "allow"}
    steps = [asyncio.Event() for _ in range(2)]
    parts = answer(path, "a")
    engine = await start("a", lambda path: [parts.preamble, steps[0], parts.parts, steps[1], parts.end])
    async with (
        running_gateway(config(engine, timeouts={"keepAliveSeconds": 0.02}, **sections)) as running,
        client.post(running.url + path, json=BODIES[path], headers={"authorization": f"Bearer {KEY}"}) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert await reply.content.readexactly(len(COMMENT)) == COMMENT
        steps[0].set()
        got = await reply.content.readuntil(parts.parts)
        got += await reply.content.readuntil(COMMENT)
        steps[1].set()
        got += await reply.read()
    assert without_comments(got) == parts.whole
    assert engine.asked == 1


@pytest.mark.parametrize("path", list(BODIES))
async def test_an_error_behind_a_comment_is_an_event(client: aiohttp.ClientSession, start: Any, path: str) -> None:
    engine = await start("a", answers("a"))
    engine.status = 400
    held = asyncio.Event()
    other = await start("b", lambda path: [COMMENT, held, None])
    async with running_gateway(config(other)) as running, running_gateway(config(engine)) as refusing:
        async with client.post(running.url + path, json=BODIES[path]) as reply:
            assert await reply.content.readexactly(len(COMMENT)) == COMMENT
            held.set()
            disconnected = await reply.read()
        status, _, refused = await ask(client, refusing, path)
    assert (status, json.loads(refused)["error"]["code"]) == (400, 400), "the status, where nothing was sent"
    event = disconnected.rsplit(b"data: ", 1)[1]
    if path == RESPONSES:
        assert json.loads(event)["type"] == "error" and json.loads(event)["code"] == "engine_disconnected"
    elif path == MESSAGES:
        assert disconnected.startswith(b"event: error\n") and json.loads(event)["type"] == "error"
    else:
        assert json.loads(event)["error"]["code"] == "engine_disconnected"


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_request_in_the_queue_gets_comments(client: aiohttp.ClientSession, start: Any, path: str) -> None:
    """The client also gets the engine's refusal of the request, as an event."""
    release = asyncio.Event()
    engine = await start("a", lambda path: [release, answer(path, "a").whole])
    admission = {"requestsPerEngineMax": 1}
    document = config(engine, timeouts={"keepAliveSeconds": 0.02}, admission=admission)
    async with running_gateway(document) as running:
        first = asyncio.create_task(ask(client, running, path))
        await until(lambda: engine.asked)
        async with client.post(running.url + path, json=BODIES[path]) as reply:
            assert await reply.content.readexactly(2 * len(COMMENT)) == 2 * COMMENT
            assert reply.status == 200 and "x-spillway-engine" not in reply.headers
            assert engine.asked == 1
            engine.status = 400
            release.set()
            body = without_comments(await reply.read())
        assert without_comments((await first)[2]) == answer(path, "a").whole
    said = json.loads(body.rsplit(b"data: ", 1)[1])
    assert "not so" in (said["message"] if path == RESPONSES else said["error"]["message"])


async def test_no_comment_where_it_is_off(client: aiohttp.ClientSession, start: Any) -> None:
    engine = await start("a", answers("a"))
    async with running_gateway(config(engine, timeouts={"keepAliveSeconds": 0})) as running:
        assert (await ask(client, running, CHAT))[2] == answer(CHAT, "a").whole


# -- silence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("works", [True, False])
async def test_a_silent_stream_of_an_engine_that_works_goes_on(
    client: aiohttp.ClientSession, start: Any, works: bool
) -> None:
    """A parser holds arguments back, and the engine's metrics count tokens meanwhile."""
    release = asyncio.Event()
    parts = answer(CHAT, "a")
    engine = await start("a", lambda path: [parts.preamble + parts.parts, release, parts.end])
    engine.metrics = b"vllm:generation_tokens_total 1.0\nvllm:num_requests_running 1.0\n"
    async with running_gateway(config(engine)) as running:
        asked = asyncio.create_task(ask(client, running, CHAT))
        seen = running.engine("a")
        await until(lambda: seen.requests and _exchange(seen).state is State.ANSWERING)
        exchange = _exchange(seen)
        await until(lambda: seen._computed_tokens == 1.0)
        if works:
            engine.metrics = engine.metrics.replace(b" 1.0\n", b" 2.0\n", 1)
            await until(lambda: seen.progressed_by is None)
        exchange.since -= 121  # more than idleSeconds
        exchange.on_timer()
        if works:
            assert _left(exchange) == pytest.approx(119, abs=60)
            exchange.since -= 900  # more than a plain reply may take
            exchange.on_timer()
        release.set()
        _, _, body = await asked

    assert json.loads(body.rsplit(b"data: ", 1)[1])["error"]["code"] == "engine_timeout"


def _exchange(engine: Engine) -> Exchange:
    (exchange,) = engine.requests
    assert isinstance(exchange, Exchange)
    return exchange


def _left(exchange: Exchange) -> float:
    """Seconds until its present wait ends."""
    assert exchange.due is not None
    return exchange.due - asyncio.get_running_loop().time()


async def _metrics(client: aiohttp.ClientSession, running: RunningGateway) -> str:
    async with client.get(running.url + "/metrics") as reply:
        return await reply.text()
