"""Every route of the table through a real gateway: bytes, streams, retries, cancellation, errors in its own shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.testing.faults import DieInStream, ErrorInStream, Hang, HeadThenDie, Status
from spillway_gateway.testing.running import gateway_config, running_gateway, until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hi"}]]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "instructions": "be brief"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "system": "be brief"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {}},
    "/v1/embeddings": {"input": ["one", "two"]},
    "/v2/embed": {"texts": ["one"]},
    "/pooling": {"input": [1, 2, 3]},
    "/classify": {"input": "hi"},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/score": {"queries": "a", "documents": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v2/rerank": {"query": "a", "documents": ["b", "c"]},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104, 105]},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def form(model: str = "fake") -> bytes:
    parts = [
        b'--xyz\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + model.encode(),
        b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"content-type: audio/wav\r\n\r\nRIFF\x00\r\n--xy\x01",
        b"--xyz--\r\n",
    ]
    return b"\r\n".join(parts)


def body_for(path: str, **fields: Any) -> tuple[bytes, dict[str, str]]:
    if path.startswith("/v1/audio"):
        return form(), {"content-type": "multipart/form-data; boundary=xyz"}
    document = {"model": "fake", **BODIES[path], "unknown_field": {"kept": 1.50}, **fields}
    return json.dumps(document).encode(), {"content-type": "application/json"}


async def post(client: Any, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any, bytes]:
    async with client.post(url, data=body, headers=headers) as reply:
        return reply.status, reply.headers, await reply.read()


def check_shape(path: str, body: bytes) -> dict[str, Any]:
    document = json.loads(body)
    dialect = next(route.dialect for route in ROUTES if route.path == path)
    if dialect is Dialect.ANTHROPIC:
        assert document["type"] == "error" and set(document["error"]) == {"type", "message"}
    else:
        assert set(document["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = document["error"]
    return error


@pytest.mark.parametrize("path", [route.path for route in ROUTES])
async def test_body_and_reply_pass_as_they_are(start_engine: Any, client: Any, path: str) -> None:
    engine = await start_engine()
    body, headers = body_for(path)
    async with running_gateway(gateway_config([engine])) as running:
        through = await post(client, running.url + path, body, headers)
        direct = await post(client, engine.url + path, body, headers)

        assert (through[0], through[2]) == (direct[0], direct[2])
        assert through[0] == 200
        assert engine.seen[0].body == body
        assert through[1]["x-spillway-engine"] == "fake-0"
        assert not any(name == b"traceparent" for name, _ in engine.seen[0].headers)  # the engine samples by itself
        assert running.engine("fake-0").running_requests == running.engine("fake-0").queued_tokens == 0


@pytest.mark.parametrize("path", STREAMED)
async def test_streams_pass_and_survive_an_engine_before_the_first_byte(
    start_engine: Any, client: Any, path: str
) -> None:
    engines = [await start_engine(name="a"), await start_engine(name="b")]
    body, headers = body_for(path, stream=True)
    async with running_gateway(gateway_config(engines)) as running:
        status, answered, whole = await post(client, running.url + path, body, headers)
        first = next(engine for engine in engines if engine.name == answered["x-spillway-engine"])
        assert (status, whole.count(b"data: ") > 4) == (200, True)
        for fault in (HeadThenDie(), Status(503), DieInStream(0)):
            first.fault = fault
            status, answered, again = await post(client, running.url + path, body, headers)
            assert (status, answered["x-spillway-route"]) == (200, "retry")
            assert again.count(b"data: ") == whole.count(b"data: ")
        assert all(running.engine(name).running_requests == 0 for name in "ab")


@pytest.mark.parametrize("path", STREAMED)
async def test_a_broken_stream_ends_with_the_apis_own_error(start_engine: Any, client: Any, path: str) -> None:
    engine = await start_engine()
    engine.fault = DieInStream(3)
    body, headers = body_for(path, stream=True)
    async with running_gateway(gateway_config([engine])) as running:
        status, _, whole = await post(client, running.url + path, body, headers)

    last = whole.strip().split(b"\n\n")[-1]
    assert status == 200 and b"[DONE]" not in whole
    data = last.partition(b"data: ")[2]
    if path == "/v1/messages":
        assert last.startswith(b"event: error\n")
        assert check_shape(path, data)["type"] == "api_error"
    elif path == "/v1/responses":
        assert last.startswith(b"event: error\n")
        event = json.loads(data)
        assert (event["type"], event["code"], event["sequence_number"]) == ("error", "engine_disconnected", 3)
    else:
        assert check_shape(path, data)["code"] == "engine_disconnected"


@pytest.mark.parametrize("path", [*STREAMED, "/v1/embeddings", "/v1/rerank"])
async def test_a_client_that_disconnects_cancels_at_the_engine(start_engine: Any, client: Any, path: str) -> None:
    engine = await start_engine()
    engine.fault = Hang()
    body, headers = body_for(path)
    async with running_gateway(gateway_config([engine])) as running:
        request = asyncio.create_task(post(client, running.url + path, body, headers))
        await until(lambda: engine.seen)
        request.cancel()
        async with asyncio.timeout(120):
            await engine.seen[-1].cancelled.wait()
        await until(lambda: not running.gateway.lifecycle.running)


@pytest.mark.parametrize("path", [route.path for route in ROUTES if not route.path.startswith("/v1/audio")])
async def test_own_errors_have_the_apis_shape(start_engine: Any, client: Any, path: str) -> None:
    engine = await start_engine()
    deep = b'{"model":"fake","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    async with running_gateway(gateway_config([engine], limits={"bodyBytesMax": 250_000})) as running:
        for body, expected in (
            (body_for(path, model="absent")[0], 404),
            (b"{", 400),
            (b"[]", 400),
            (deep, 400),
            (b" " * 250_001, 413),
        ):
            status, _, answered = await post(client, running.url + path, body, {"content-type": "application/json"})
            assert status == expected
            check_shape(path, answered)
    assert engine.seen == []


async def test_an_alias_is_spliced_into_a_form(start_engine: Any, client: Any) -> None:
    engine = await start_engine()
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    async with running_gateway(gateway_config([engine], aliases=["nick"])) as running:
        url = running.url + "/v1/audio/transcriptions"
        assert (await post(client, url, form("nick"), headers))[0] == 200
        status, _, body = await post(client, url, b"no form", headers)

    assert engine.seen[0].body == form("fake")
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_multipart")


async def test_a_core_that_died_before_an_anthropic_stream_is_retried(start_engine: Any, client: Any) -> None:
    engines = [await start_engine(name="a"), await start_engine(name="b")]
    body, headers = body_for("/v1/messages", stream=True)
    async with running_gateway(gateway_config(engines)) as running:
        url = running.url + "/v1/messages"
        _, answered, _ = await post(client, url, body, headers)
        next(engine for engine in engines if engine.name == answered["x-spillway-engine"]).fault = ErrorInStream(0)
        status, answered, _ = await post(client, url, body, headers)

    assert (status, answered["x-spillway-route"]) == (200, "retry")


async def test_stored_responses_are_asked_of_the_engine_that_made_them(start_engine: Any) -> None:
    engines = [await start_engine(name=name) for name in "abcd"]
    async with (
        running_gateway(gateway_config(engines)) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for at in range(8):
            made = await client.responses.create(model="fake", input=f"question {at}")
            maker = next(engine for engine in engines if made.id in engine.responses)
            assert (await client.responses.retrieve(made.id)).output_text == made.output_text
            await client.responses.cancel(made.id)
            raw = await client.responses.with_raw_response.create(
                model="fake", input="and then?", previous_response_id=made.id
            )
            assert (raw.headers["x-spillway-engine"], raw.headers["x-spillway-route"]) == (maker.name, "pinned")
        stream = await client.responses.create(model="fake", input="streamed", stream=True)
        events = [event async for event in stream]
        assert events[0].type == "response.created" and events[-1].type == "response.completed"
        assert (await client.responses.retrieve(events[0].response.id)).status == "completed"
        with pytest.raises(openai.NotFoundError) as absent:
            await client.responses.retrieve("resp_absent")
        assert absent.value.code == "response_not_found"


async def test_embeddings_by_the_openai_client(start_engine: Any) -> None:
    engine = await start_engine()
    async with (
        running_gateway(gateway_config([engine])) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.embeddings.create(model="fake", input=["one", "two"], encoding_format="float")

    assert len(answer.data) == 2 and answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("versions", [["0.23.0"], ["0.30.0+cpu"], ["0.32.0rc1"], ["0.32.1", "0.23.0"], [None]])
async def test_tenants_are_kept_apart_on_every_route(
    start_engine: Any, client: Any, tmp_path: Path, versions: list[str | None]
) -> None:
    """A salt in the body, nothing cached, or the route is closed to them: by the oldest engine's vLLM."""
    engines = [await start_engine(name=f"e{number}") for number in range(len(versions))]
    for engine, version in zip(engines, versions, strict=True):
        engine.version = version
    keys = {"a": "sk-a" + "0" * 40, "b": "sk-b" + "0" * 40}
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in keys.items()]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (tmp_path / "salt").write_text("s" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    closed = {"/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations"}
    if versions != ["0.32.0rc1"]:
        closed |= {"/v1/messages", "/generative_scoring", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    needless = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    needless |= {"/v1/chat/completions/render", "/v1/completions/render"}
    async with running_gateway(gateway_config(engines, auth=auth)) as running:
        for route in ROUTES:
            body, headers = body_for(route.path)
            before = [len(engine.seen) for engine in engines]
            for key in keys.values():
                status, _, reply = await post(client, running.url + route.path, body, {**headers, "x-api-key": key})
                if route.path in closed:
                    assert status == 403 and b"auth.unsaltedRoutes" in reply
                    check_shape(route.path, reply)
                else:
                    assert status == 200
            status, _, reply = await post(client, running.url + route.path, body, headers)
            assert status == 401
            check_shape(route.path, reply)
            seen = [each for engine, first in zip(engines, before, strict=True) for each in engine.seen[first:]]
            salts = [json.loads(each.body).get("cache_salt") for each in seen]
            if route.path in needless:
                assert salts == [None, None]
            elif route.path not in closed:
                assert None not in salts and len(set(salts)) == 2

        made = {"model": "fake", "input": "a's own"}
        _, _, reply = await post(
            client, running.url + "/v1/responses", json.dumps(made).encode(), {"x-api-key": keys["a"]}
        )
        url = f"{running.url}/v1/responses/{json.loads(reply)['id']}"
        for tenant, expected in (("a", 200), ("b", 404)):
            async with client.get(url, headers={"x-api-key": keys[tenant]}) as answer:
                assert answer.status == expected

    settings = gateway_config(engines, auth={**auth, "unsaltedRoutes": "allow"})
    async with running_gateway(settings) as running:
        body, headers = body_for("/v1/messages")
        status, _, _ = await post(client, running.url + "/v1/messages", body, {**headers, "x-api-key": keys["a"]})
        (got,) = [each.body for engine in engines for each in engine.seen if each.path == "/v1/messages"][-1:]
        sent = json.loads(got)
        assert status == 200 and sent.pop("cache_salt") and sent == json.loads(body)


@pytest.mark.parametrize(("version", "status"), [("0.23.0", 403), ("0.32.0", 200)])
async def test_what_one_route_drops_is_closed_too(
    start_engine: Any, client: Any, tmp_path: Path, version: str, status: int
) -> None:
    """Second turns after the engine's own tools, and embeddings of inputs that it computes in pieces."""
    engine = await start_engine(max_model_len=64)
    engine.version = version
    key = "sk-a" + "0" * 40
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"tenants": [{"name": "a", "keys": [hash_key(key)]}]}))
    (tmp_path / "salt").write_text("s" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    engine.tokenize = lambda body: [1]
    async with running_gateway(gateway_config([engine], auth=auth)) as running:

        async def answered(path: str, **fields: Any) -> int:
            body = json.dumps({"model": "fake", **fields}).encode()
            found, _, _ = await post(client, running.url + path, body, {"x-api-key": key})
            return found

        function = {"type": "function", "name": "f", "parameters": {}}
        for tool in ("code_interpreter", "web_search_preview", "container", "mcp"):
            assert await answered("/v1/responses", input="hi", tools=[function, {"type": tool}]) == status
        assert await answered("/v1/responses", input="hi", tools=[function]) == 200
        for inputs in ("word " * 200, ["hi", "word " * 200], [[1] * 65], [1] * 65):
            assert await answered("/v1/embeddings", input=inputs) == status
        for inputs in ("hi", ["hi"] * 200, [1] * 64, [[1] * 64] * 3):
            assert await answered("/v1/embeddings", input=inputs) == 200
