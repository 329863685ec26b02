"""Keys, salts, limits and admission through a real gateway and engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.access.keys import hash_key
from spillway_gateway.error_bodies import RETRY_JITTER_SECONDS_MAX
from spillway_gateway.testing.faults import HoldInStream, Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import gateway_config, running_gateway, until

KEYS = {"a": "sk-a" + "0" * 40, "b": "sk-b" + "0" * 40}


def auth(folder: Path, **of_a: Any) -> dict[str, str]:
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in KEYS.items()]
    tenants[0].update(of_a)
    (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "salt").write_text("s" * 32)
    (folder / "engine").write_text("engine-key")
    return {
        "keysFile": str(folder / "keys.yaml"),
        "saltSecretFile": str(folder / "salt"),
        "engineKeyFile": str(folder / "engine"),
    }


async def ask(session: Any, url: str, tenant: str | None, **fields: Any) -> tuple[int, dict[str, str], Any]:
    body = {"model": "fake", "prompt": list(range(200)), **fields}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
    async with session.post(url + "/v1/completions", json=body, headers=headers) as reply:
        text = await reply.text()
        return (
            reply.status,
            {name.lower(): value for name, value in reply.headers.items()},
            json.loads(text) if not fields.get("stream") else text,
        )


async def test_tenants_never_meet_in_the_cache_and_their_keys_stay_here(start_engine: Any, tmp_path: Path) -> None:
    publisher = KvPublisher()
    fake = await start_engine(publisher=publisher)
    async with running_gateway(gateway_config([fake], auth=auth(tmp_path))) as gateway, aiohttp.ClientSession() as http:

        async def cached(tenant: str, **fields: Any) -> tuple[int, str]:
            status, headers, reply = await ask(http, gateway.url, tenant, **fields)
            assert status == 200
            details = reply["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
            return details["cached_tokens"], headers["x-spillway-prefix-tokens"]

        assert (await cached("a"))[0] == 0
        assert (await cached("b"))[0] == 0
        index = gateway.gateway.fleets[0].index
        blocks = 2 * 192 // fake.block_tokens
        await until(lambda: index.block_tokens == fake.block_tokens and index.blocks >= blocks)  # both have sent events
        hits, expected = await cached("a")
        assert hits == 192 and int(expected) == 192  # routing counts the salt in as the engine does
        assert (await cached("a", cache_salt="mine"))[0] == 0
        stolen = json.loads(fake.seen[0].body)["cache_salt"]
        assert (await cached("b", cache_salt=stolen))[0] == 0

    for seen in fake.seen:
        headers = dict(seen.headers)
        assert headers[b"authorization"] == b"Bearer engine-key"
        assert not any(key.encode() in value for key in KEYS.values() for value in headers.values())
        assert "mine" not in seen.body.decode()
    assert len({json.loads(seen.body)["cache_salt"] for seen in fake.seen}) == 4


async def test_refusals_have_the_shape_of_openai_errors(start_engine: Any, tmp_path: Path) -> None:
    fake = await start_engine()
    settings = auth(tmp_path, models=["other"], promptTokensPerMinute=10)
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
        status, _, reply = await ask(http, gateway.url, None)
        assert (status, reply["error"]["code"]) == (401, "missing_api_key")
        status, _, reply = await ask(http, gateway.url, "a")
        assert (status, reply["error"]["code"], reply["error"]["param"]) == (403, "model_not_allowed", "model")
        async with http.get(gateway.url + "/v1/models") as listed:
            assert listed.status == 401
        headers = {"authorization": f"Bearer {KEYS['a']}"}
        async with http.get(gateway.url + "/v1/models", headers=headers) as listed:
            assert (await listed.json())["data"] == []
    assert fake.seen == []


async def test_an_alias_in_a_tenants_list_is_a_name_it_may_use(start_engine: Any, tmp_path: Path) -> None:
    fake, other = await start_engine(), await start_engine("other-0", model="other")
    document = gateway_config([fake], auth=auth(tmp_path, models=["nick"]), aliases=["nick", "second"])
    document["models"].append({"name": "other", "engines": [{"name": other.name, "url": other.url}]})
    async with running_gateway(document) as gateway, aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {KEYS['a']}"}
        async with http.get(gateway.url + "/v1/models", headers=headers) as listed:
            assert [card["id"] for card in (await listed.json())["data"]] == ["nick"]
        async with http.get(gateway.url + "/v1/models/nick", headers=headers) as one:
            card = await one.json()
            assert (one.status, card["id"], card["object"], card["parent"]) == (200, "nick", "model", "fake")
        assert (await ask(http, gateway.url, "a", model="nick"))[0] == 200
        for name in ("fake", "second", "other"):
            status, _, reply = await ask(http, gateway.url, "a", model=name)
            assert (status, reply["error"]["code"]) == (403, "model_not_allowed")
            async with http.get(gateway.url + f"/v1/models/{name}", headers=headers) as one:
                assert (one.status, (await one.json())["error"]["code"]) == (404, "model_not_found")
        status, _, reply = await ask(http, gateway.url, "a", model="nothing")
        assert (status, reply["error"]["message"]) == (404, "The model 'nothing' does not exist; served here: nick")
        async with http.get(gateway.url + "/v1/models/fake") as one:
            assert one.status == 401


async def test_a_tenants_limits_are_its_own(start_engine: Any, tmp_path: Path) -> None:
    fake = await start_engine()
    settings = auth(tmp_path, promptTokensPerMinute=100)
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
        assert (await ask(http, gateway.url, "a"))[0] == 200
        status, headers, reply = await ask(http, gateway.url, "a")
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 60 + RETRY_JITTER_SECONDS_MAX
        assert (await ask(http, gateway.url, "b"))[0] == 200


async def test_replies_count_against_a_limit_of_all_tokens(start_engine: Any, tmp_path: Path) -> None:
    """The prompt is within the limit and the reply exceeds it, by its usage or by its counted events."""
    fake = await start_engine(words=500)
    for fields in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
        settings = auth(tmp_path, tokensPerMinute=300)
        async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
            assert (await ask(http, gateway.url, "a", **fields))[0] == 200
            status, headers, _ = await ask(http, gateway.url, "a")
            assert status == 429
            assert 70 <= int(headers["retry-after"]) <= 90 + RETRY_JITTER_SECONDS_MAX


async def test_a_request_refused_for_overload_gives_its_charge_back(start_engine: Any, tmp_path: Path) -> None:
    fake = await start_engine()
    release = asyncio.Event()
    admission = {"requestsPerEngineMax": 1, "waitingRequestsMax": 1, "normalWaitSeconds": 0.01}
    settings = auth(tmp_path, requestsPerMinute=1, promptTokensPerMinute=200, tokensPerMinute=500)
    document = gateway_config([fake], auth=settings, admission=admission)
    async with running_gateway(document) as gateway, aiohttp.ClientSession() as http:
        fake.fault = HoldInStream(2, release)
        first = asyncio.create_task(ask(http, gateway.url, "b", stream=True))
        await until(lambda: len(fake.seen) == 1)
        for _ in range(3):
            status, _, reply = await ask(http, gateway.url, "a")
            assert (status, reply["error"]["code"]) == (503, "engines_full")
        fake.fault = None
        release.set()
        assert (await first)[0] == 200
        assert (await ask(http, gateway.url, "a"))[0] == 200
        assert (await ask(http, gateway.url, "a"))[0] == 429


async def test_usage_settles_an_estimate_that_was_too_low(start_engine: Any, tmp_path: Path) -> None:
    """A text's tokens are estimated if there is no tokenizer; this engine counts each character as one."""
    fake = await start_engine()
    settings = auth(tmp_path, promptTokensPerMinute=300)
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
        status, _, reply = await ask(http, gateway.url, "a", prompt="word " * 100)
        assert status == 200 and reply["usage"]["prompt_tokens"] > 300
        assert (await ask(http, gateway.url, "a", prompt="x"))[0] == 429


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
HUNDRED = "東京" * 50
COUNTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [1] * 100 + [2.0]}),
    ("/v1/completions", {"prompt": [[1] * 50, [2] * 50]}),
    ("/v1/completions", {"prompt": HUNDRED}),
    ("/v1/completions", {"prompt": ["a", HUNDRED]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUNDRED}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 80}]}]}),
    ("/v1/chat/completions", {"messages": [], "tools": [{"function": {"name": "word" * 100}}]}),
    ("/v1/chat/completions/batch", {"messages": [[], [{"role": "user", "content": [{"text": HUNDRED}]}]]}),
    ("/v1/rerank", {"query": "q", "documents": [{"text": HUNDRED}]}),
    ("/v1/rerank", {"query": "q", "documents": {"content": [{"type": "text", "text": HUNDRED}]}}),
    ("/v1/embeddings", {"input": [{"content": [{"type": "text", "text": HUNDRED}]}]}),
    ("/inference/v1/generate", {"token_ids": [1] * 100, "stream": True}),
    ("/inference/v1/generate", {"token_ids": [1.0] * 100, "stream": True}),
    ("/tokenize", {"prompt": "word" * 100}),
    ("/detokenize", {"tokens": list(range(1000, 1100))}),
    ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "word" * 100}]}),
]


@pytest.mark.parametrize(("path", "body"), COUNTED)
async def test_whatever_form_a_prompt_has_it_counts(
    start_engine: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Only the estimate counts: this engine sends no usage."""
    fake = await start_engine()
    fake.fault = Status(200)
    settings = auth(tmp_path, promptTokensPerMinute=60, tokensPerMinute=1_000) | {"unsaltedRoutes": "allow"}
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {KEYS['a']}"}
        statuses = []
        for _ in range(2):
            async with http.post(gateway.url + path, json={"model": "fake", **body}, headers=headers) as reply:
                statuses.append(reply.status)
    assert statuses == [200, 429]


async def test_a_conversation_that_an_engine_keeps_counts_before_it_is_continued(
    start_engine: Any, tmp_path: Path
) -> None:
    fake = await start_engine()
    release = asyncio.Event()
    settings = auth(tmp_path, promptTokensPerMinute=600)
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:
        headers = {"authorization": f"Bearer {KEYS['a']}"}

        async def respond(**fields: Any) -> tuple[int, Any]:
            body = {"model": "fake", **fields}
            async with http.post(gateway.url + "/v1/responses", json=body, headers=headers) as reply:
                return reply.status, await reply.json(content_type=None) if not fields.get("stream") else None

        status, kept = await respond(input="word " * 100)
        assert status == 200 and 400 < kept["usage"]["input_tokens"] < 600
        fake.fault = HoldInStream(2, release)
        more = asyncio.create_task(respond(input="on", previous_response_id=kept["id"], stream=True))
        await until(lambda: len(fake.seen) == 2)
        async with asyncio.timeout(120):  # else it would be held as the second is
            assert (await respond(input="on"))[0] == 429  # though the second has sent no usage
        release.set()
        await more


UNCOUNTED: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/chat/completions", {"messages": IMAGE, "stream": True}, False),
    ("/v1/chat/completions", {"messages": IMAGE, "stream": True, "stream_options": {"include_usage": True}}, True),
    ("/v1/chat/completions", {"messages": IMAGE}, True),
    ("/v1/completions", {"prompt": None, "prompt_embeds": "AAAA", "stream": True}, False),
    ("/v1/completions", {"prompt": None, "prompt_embeds": "AAAA"}, True),
    ("/inference/v1/generate", {"token_ids": [1]}, False),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True}, True),
]


async def test_what_nothing_counts_is_refused_to_who_has_a_limit_of_it(start_engine: Any, tmp_path: Path) -> None:
    fake = await start_engine()
    fake.fault = Status(200)
    form = '--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nfake\r\n--b--\r\n'
    settings = {**auth(tmp_path, tokensPerMinute=1_000_000), "unsaltedRoutes": "allow"}
    async with running_gateway(gateway_config([fake], auth=settings)) as gateway, aiohttp.ClientSession() as http:

        async def status(tenant: str, path: str, body: str) -> int:
            headers = {"authorization": f"Bearer {KEYS[tenant]}"}
            async with http.post(gateway.url + path, data=body, headers=headers) as reply:
                if reply.status == 403:
                    assert (await reply.json())["error"]["code"] == "tokens_not_counted"
                return reply.status

        for path, body, passes in UNCOUNTED:
            text = json.dumps({"model": "fake", **body})
            assert await status("a", path, text) == (200 if passes else 403), (path, body)
            assert await status("b", path, text) == 200  # without a limit
        assert await status("a", "/v1/audio/transcriptions", form) == 403
        assert await status("b", "/v1/audio/transcriptions", form) == 200


async def test_full_engines_make_requests_wait_and_then_refuse(start_engine: Any) -> None:
    fake = await start_engine()
    release = asyncio.Event()
    admission = {"requestsPerEngineMax": 1, "waitingRequestsMax": 1}
    async with (
        running_gateway(gateway_config([fake], admission=admission)) as gateway,
        aiohttp.ClientSession() as http,
    ):
        queue = gateway.gateway.admissions["fake"]
        fake.fault = HoldInStream(2, release)
        first = asyncio.create_task(ask(http, gateway.url, None, stream=True))
        await until(lambda: len(fake.seen) == 1)
        gone = asyncio.create_task(ask(http, gateway.url, None))
        await until(lambda: queue.waiting_requests == 1)
        gone.cancel()
        await until(lambda: queue.waiting_requests == 0)  # a client that leaves gives its place back
        second = asyncio.create_task(ask(http, gateway.url, None))
        await until(lambda: queue.waiting_requests == 1)

        status, headers, reply = await ask(http, gateway.url, None)
        assert (status, reply["error"]["code"]) == (503, "engines_full")
        assert 2 <= int(headers["retry-after"]) <= 5

        fake.fault = None
        release.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]
        await until(lambda: queue.admitted_requests == 0)
    assert len(fake.seen) == 2


async def test_an_engine_that_only_fails_requests_is_left_alone_and_comes_back(start_engine: Any) -> None:
    sick, well = await start_engine("sick"), await start_engine("well")
    settings = {"breaker": {"failures": 2, "openSeconds": 1_000, "openSecondsMax": 1_000}}
    async with running_gateway(gateway_config([sick, well], **settings)) as gateway, aiohttp.ClientSession() as http:
        sick.fault = Status(503)
        engine = gateway.engine("sick")
        numbers = itertools.count()

        async def answered_by_the_other() -> None:
            status, headers, _ = await ask(http, gateway.url, None, prompt=[next(numbers)] * 40)
            assert (status, headers["x-spillway-engine"]) == (200, "well")

        for _ in range(40):
            await answered_by_the_other()
        assert not engine.breaker.closed
        assert engine.routable  # polls are still answered
        assert len(sick.seen) == 2
        engine.breaker._open_until = 0.0  # the time has passed
        for _ in range(40):
            await answered_by_the_other()
        assert len(sick.seen) == 3  # one probe, which failed

        sick.fault = None
        engine.breaker._open_until = 0.0
        while not engine.breaker.closed:
            assert (await ask(http, gateway.url, None, prompt=[next(numbers)] * 40))[0] == 200
        assert engine.running_requests == 0
