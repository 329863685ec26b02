"""The place and the tokens that a request takes of its tenant's limits, whatever an engine says, on a real gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.audit import AuditLog
from spillway_gateway.access.keys import hash_key
from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.faults import Hang
from spillway_gateway.testing.running import gateway_config, running_gateway, until
from spillway_gateway.testing.running_fronts import running_fronts
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.reply import Reply
from spillway_gateway.upstream.reply_counts import ReplyCounts

KEY = "sk-a" + "0" * 40
HEADERS = {"authorization": f"Bearer {KEY}"}
ODD: tuple[Any, ...] = (
    *(-1, -(10**6), 10**9, 2**31, 2**63, 2**64, 10**30, 1.5, 7.0, 1e300, True, False, "9", "", None, [], [9], {}),
)
FIELDS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def auth(folder: Path, **limits: Any) -> dict[str, str]:
    tenants = {"tenants": [{"name": "a", "keys": [hash_key(KEY)], **limits}]}
    (folder / "keys.yaml").write_text(yaml.safe_dump(tenants))
    (folder / "salt").write_text("s" * 32)
    return {"keysFile": str(folder / "keys.yaml"), "saltSecretFile": str(folder / "salt")}


def usage_of(path: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return usage in the shape of the route."""
    cached = {"cached_tokens": counts["cached_tokens"]}
    if path == "/v1/responses":
        names = ("input_tokens", "output_tokens")
        return {**dict(zip(names, list(counts.values())[:2], strict=True)), "input_tokens_details": cached}
    return {**counts, "prompt_tokens_details": cached}


def scripted(path: str, usage: Any) -> Scripted:
    holder: dict[str, Any] = {"choices": [{"text": "x"}], "usage": usage}
    if path == "/v1/responses":  # whole, as the gateway looks for a moment whether an engine that breaks off has died
        holder = {"type": "response.completed", "response": {"status": "completed", "usage": usage}}
    return Scripted(document={"choices": [{"text": "x"}], "usage": usage}, events=[{"choices": []}, holder])


@pytest.mark.parametrize("fronts", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_odd_usage_costs_no_place_no_audit_line_and_no_tokens(
    start_engine: Any, tmp_path: Path, path: str, stream: bool, fronts: int
) -> None:
    engine: FakeEngine = await start_engine(max_model_len=4_096)
    said: list[Any] = [
        usage_of(path, {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 0, field: odd})
        for field in FIELDS
        for odd in ODD
    ]
    said += ["oops", 7, [], [1], True, None, {}, {"prompt_tokens_details": 5}, {"prompt_tokens": {"a": 1}}]
    replies = iter(said)
    engine.script = lambda path, body: scripted(path, next(replies))
    limits = auth(tmp_path, concurrentRequestsMax=1, tokensPerMinute=2_000 * len(said), requestsPerMinute=10_000)
    audit = tmp_path / "audit"
    document = gateway_config([engine], auth=limits, audit={"enabled": True, "file": str(audit)})
    body = {"model": "fake", "prompt": "x" * 36, "input": "x" * 36, "stream": stream}

    async def ask_all(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            for usage in said:
                async with http.post(url + path, json=body, headers=HEADERS) as reply:
                    assert reply.status == 200, usage
                    await reply.read()

    def audited() -> list[dict[str, Any]]:
        lines = audit.read_text().splitlines() if audit.exists() else []
        return [json.loads(line) for line in lines]

    if fronts:
        async with running_fronts(document, count=fronts) as running:
            await ask_all(running.urls[0])
            taken = running.gateway.gatekeeper._usage["a"]
            await until(lambda: taken.running_requests == 0 and len(audited()) == len(said))
    else:
        async with running_gateway(document) as gateway:
            await ask_all(gateway.url)
            taken = gateway.gateway.gatekeeper._usage["a"]
            await until(lambda: taken.running_requests == 0 and len(audited()) == len(said))
    for line, usage in zip(audited(), said, strict=True):
        counts = line["prompt_tokens"], line["completion_tokens"] or 0, line["cached_tokens"] or 0
        assert all(type(each) is int and 0 <= each <= 64 * 4_096 + 200 for each in counts), (usage, line)
        assert counts[2] <= counts[0], (usage, line)


def request(dialect: Dialect = Dialect.OPENAI, **fields: Any) -> OutboundRequest:
    prompt = PromptBlocks([], 16, 9, 0)
    return OutboundRequest(b"/", [], b"x" * 100, b"id", False, prompt, 0.0, dialect=dialect, **fields)


def engine_of_length(length: int | None) -> Engine:
    engine = Engine("m", EngineConfig("e", "http://127.0.0.1:1"), RoutingConfig())
    engine.prompt_tokens_max = length
    return engine


numbers = st.integers() | st.floats() | st.booleans() | st.text(max_size=3) | st.none() | st.integers(0, 5_000)
usages = st.dictionaries(
    st.sampled_from(["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens",
                     "cache_creation_input_tokens"]),
    numbers,
)  # fmt: skip


@given(st.lists(usages, min_size=1, max_size=4), st.sampled_from([None, 1, 4_096]), st.booleans())
def test_counts_are_possible_whatever_is_said(said: list[dict[str, Any]], length: int | None, events: bool) -> None:
    counts = ReplyCounts(request(reply_tokens_max=None))
    for usage in said:
        document = json.dumps({"usage": usage}).encode()
        if events:
            counts.begin_attempt(streams=True)
            counts.read_events(engine_of_length(length), b"data: " + document + b"\n\n")
        else:
            counts.read_plain(engine_of_length(length), document)
    prompt, completion, cached = counts.usage
    length = length or 1 << 24
    assert prompt is None or (type(prompt) is int and 0 <= prompt <= length + 100)
    assert completion is None or (type(completion) is int and 0 <= completion <= length + 100)
    assert cached is None or (type(cached) is int and 0 <= cached <= (length + 100 if prompt is None else prompt))


def test_anthropics_input_is_what_no_cache_served() -> None:
    counts = ReplyCounts(request(Dialect.ANTHROPIC, reply_tokens_max=None))
    usage = {"input_tokens": 9, "output_tokens": 4, "cache_read_input_tokens": 128, "cache_creation_input_tokens": 16}
    counts.read_plain(engine_of_length(4_096), json.dumps({"usage": usage}).encode())

    assert counts.usage == (153, 4, 128)


@pytest.mark.parametrize("fails", ["count_cached", "audit", "usage", "on_end"])
async def test_a_place_is_given_back_whatever_else_fails_at_the_end(
    start_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    engine = await start_engine()

    def raises(*_: Any) -> Any:
        raise ValueError("of a defect")

    audit = tmp_path / "audit"
    document = gateway_config(
        [engine], auth=auth(tmp_path, concurrentRequestsMax=1), audit={"enabled": True, "file": str(audit)}
    )
    async with running_gateway(document) as gateway, aiohttp.ClientSession() as http:
        owner, name = {
            "count_cached": (Reply, "count_cached"),
            "audit": (AuditLog, "write"),
            "usage": (ReplyCounts, "usage"),
            "on_end": (type(gateway.gateway.router), "set_response_tokens"),
        }[fails]
        monkeypatch.setattr(owner, name, property(raises) if fails == "usage" else raises)
        for _ in range(3):
            body = {"model": "fake", "input": "x"}
            async with http.post(gateway.url + "/v1/responses", json=body, headers=HEADERS) as reply:
                assert reply.status == 200
                await reply.read()
        taken = gateway.gateway.gatekeeper._usage["a"]
        await until(lambda: taken.running_requests == 0)
        assert gateway.engine("fake-0").running_requests == 0
        if fails in ("count_cached", "on_end"):
            await until(lambda: audit.exists() and len(audit.read_text().splitlines()) == 3)


Abandon = Callable[[], Any]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 600}),
        ("/v1/completions", {"prompt": ["x", "y", "z"], "max_tokens": 100, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 600}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 600}),
    ],
)
async def test_a_plain_reply_that_its_client_abandons_counts_as_long_as_it_might_be(
    start_engine: Any, tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    engine = await start_engine()
    engine.fault = Hang()
    async with (
        running_gateway(gateway_config([engine], auth=auth(tmp_path, tokensPerMinute=1_000))) as gateway,
        aiohttp.ClientSession() as http,
    ):

        async def ask() -> int:
            async with http.post(gateway.url + path, json={"model": "fake", **fields}, headers=HEADERS) as reply:
                return reply.status

        for number in (1, 2):
            asked = asyncio.create_task(ask())
            await until(lambda number=number: len(engine.seen) == number)
            asked.cancel()
            await engine.seen[-1].cancelled.wait()
        taken = gateway.gateway.gatekeeper._usage["a"]
        await until(lambda: taken.running_requests == 0)
        engine.fault = None
        assert await ask() == 429


def test_an_abandoned_reply_without_a_length_counts_by_time() -> None:
    counts = ReplyCounts(request(reply_tokens_max=None, choices=2))
    counts.abandoned(engine_of_length(4_096), 3.0)
    assert counts.usage.completion_tokens == 600
    counts.abandoned(engine_of_length(4_096), 1e9)
    assert counts.usage.completion_tokens == 2 * 4_096

    counts = ReplyCounts(request(reply_tokens_max=0))  # an embedding
    counts.abandoned(engine_of_length(4_096), 3.0)
    assert counts.usage.completion_tokens == 0


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_stored_response_is_counted_once(start_engine: Any, tmp_path: Path, fronts: int) -> None:
    engine = await start_engine()
    document = gateway_config([engine], auth=auth(tmp_path, tokensPerMinute=600))

    async def read_often(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            body = {"model": "fake", "input": "x" * 400}
            async with http.post(url + "/v1/responses", json=body, headers=HEADERS) as reply:
                response = await reply.json()
            for _ in range(5):
                async with http.get(url + f"/v1/responses/{response['id']}", headers=HEADERS) as reply:
                    assert reply.status == 200 and (await reply.json())["usage"]["input_tokens"] > 300

    if fronts:
        async with running_fronts(document, count=fronts) as running:
            await read_often(running.urls[0])
    else:
        async with running_gateway(document) as gateway:
            await read_often(gateway.url)


@pytest.mark.parametrize("asked", [True, 1, "true", {}, []])
async def test_a_tenant_with_limits_gets_no_response_in_the_background(
    start_engine: Any, tmp_path: Path, asked: Any
) -> None:
    engine = await start_engine()
    async with aiohttp.ClientSession() as http:

        async def ask(url: str, background: Any) -> tuple[int, Any]:
            body = {"model": "fake", "input": "x", "background": background}
            async with http.post(url + "/v1/responses", json=body, headers=HEADERS) as reply:
                return reply.status, await reply.json()

        async with running_gateway(gateway_config([engine], auth=auth(tmp_path, concurrentRequestsMax=1))) as gateway:
            status, reply = await ask(gateway.url, asked)
            assert (status, reply["error"]["code"]) == (403, "background_not_counted")
            assert not engine.seen
            assert [(await ask(gateway.url, none))[0] for none in (False, None)] == [200, 200]
        async with running_gateway(gateway_config([engine], auth=auth(tmp_path))) as gateway:
            assert (await ask(gateway.url, asked))[0] == 200


async def test_requests_that_fail_by_their_own_fault_count(start_engine: Any, tmp_path: Path) -> None:
    engine = await start_engine()
    bodies = itertools.cycle([b"{", b"[]", b'{"model":"other","prompt":"x"}', b'{"model":"fake","prompt":"x","n":'])
    async with (
        running_gateway(gateway_config([engine], auth=auth(tmp_path, requestsPerMinute=6))) as gateway,
        aiohttp.ClientSession() as http,
    ):
        statuses = []
        for _ in range(8):
            async with http.post(gateway.url + "/v1/completions", data=next(bodies), headers=HEADERS) as reply:
                statuses.append(reply.status)
        assert statuses == [400, 400, 404, 400, 400, 400, 429, 429]
        assert gateway.gateway.gatekeeper._usage["a"].running_requests == 0


@pytest.mark.parametrize("fronts", [0, 2])
async def test_plain_replies_show_an_engines_rate_by_its_own_counts(start_engine: Any, fronts: int) -> None:
    """A tenant whose long prompts are cut by the engine, or cached there, makes it no faster for the others."""
    engine: FakeEngine = await start_engine()
    document = gateway_config([engine], routing={"prefillTokensPerSecond": 100})
    unique = itertools.count(1, 3_000)

    async def rate_after(running: Any, counts: dict[str, Any], **fields: Any) -> float:
        engine.script = lambda path, body: scripted(path, usage_of(path, counts))
        url = running.urls[0] if fronts else running.url
        engines = running.gateway.fleets[0].engines.values()
        async with aiohttp.ClientSession() as http:
            for _ in range(10):
                prompt = list(range(start := next(unique), start + 3_000))
                body = {"model": "fake", "prompt": [[start], prompt] if fields.get("n") else prompt, **fields}
                async with http.post(url + "/v1/completions", json=body) as reply:
                    assert reply.status == 200 and await reply.read()
        await until(lambda: not any(each.running_requests for each in engines))
        (rate,) = (each.rates.prefill_tokens_per_second for each in engines)
        return float(rate)

    async with running_fronts(document, count=fronts) if fronts else running_gateway(document) as running:
        cut = {"prompt_tokens": 8, "completion_tokens": 1, "cached_tokens": 0}
        cached = {"prompt_tokens": 3_000, "completion_tokens": 1, "cached_tokens": 2_900}
        assert [await rate_after(running, counts) for counts in (cut, cached)] == [100, 100]
        for fields in ({"truncate_prompt_tokens": 8}, {"n": 2}):
            assert await rate_after(running, cut, stream=True, **fields) == 100
        assert await rate_after(running, {"prompt_tokens": 3_000, "completion_tokens": 1, "cached_tokens": 0}) > 100
