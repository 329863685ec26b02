"""Spans as a collector gets them: over HTTP, in OTLP's own encoding."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from spillway_gateway.config.settings import parse_config
from spillway_gateway.errors import ConfigError
from spillway_gateway.testing.fake_engine import Scripted
from spillway_gateway.testing.faults import Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until
from spillway_gateway.tracing.attributes import operation_of

CHAT = "/v1/chat/completions"
SECRET = "the-prompt-itself"
TRACE_ID = "ab" * 16
SAMPLED = f"00-{TRACE_ID}-{'cd' * 8}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{'cd' * 8}-00"


class Collector:
    """Collects exported spans, by name. Complete once the gateway has stopped."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: defaultdict[str, list[Span]] = defaultdict(list)
        self.services: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        exported = ExportTraceServiceRequest.FromString(body)
        assert SECRET not in str(exported)
        for resource in exported.resource_spans:
            self.services.add(attributes(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.name].append(span)
        return web.Response(content_type="application/x-protobuf")

    def one(self, name: str) -> Span:
        (span,) = self.spans[name]
        return span


def attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield collector
    await runner.cleanup()


@asynccontextmanager
async def traced(engines: list[Any], collector: Collector, **tracing: Any) -> AsyncIterator[RunningGateway]:
    settings = {"otlpEndpoint": collector.url, "exportSeconds": 60, **tracing}
    async with running_gateway(gateway_config(engines, tracing=settings)) as running:
        yield running


async def chat(running: RunningGateway, headers: dict[str, str] | None = None, **fields: Any) -> int:
    body = {"model": "fake", "messages": [{"role": "user", "content": SECRET}], **fields}
    async with aiohttp.ClientSession() as client, client.post(running.url + CHAT, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status


def sent_trace(engine: Any) -> str:
    (value,) = [value for name, value in engine.seen[-1].headers if name == b"traceparent"]
    return str(value.decode())


@pytest.mark.parametrize("stream", [True, False])
async def test_one_trace_runs_from_the_client_to_the_engine(
    start_engine: Any, collector: Collector, stream: bool
) -> None:
    engine = await start_engine("a")
    async with traced([engine], collector) as running:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "x-request-id": "mine"}
        assert await chat(running, headers, stream=stream) == 200

    server, attempt = collector.one(f"POST {CHAT}"), collector.one("chat fake")
    assert server.trace_id.hex() == TRACE_ID and server.parent_span_id.hex() == "cd" * 8
    for name in ("admission", "route", "chat fake"):
        assert collector.one(name).parent_span_id == server.span_id
    assert collector.one("first byte").parent_span_id == attempt.span_id
    assert sent_trace(engine) == f"00-{TRACE_ID}-{attempt.span_id.hex()}-01"
    assert (b"tracestate", b"vendor=1") in engine.seen[-1].headers

    assert server.kind == Span.SPAN_KIND_SERVER and attempt.kind == Span.SPAN_KIND_CLIENT
    seen = attributes(server)
    assert seen["http.response.status_code"] == 200 and seen["http.route"] == CHAT
    assert (seen["gen_ai.operation.name"], seen["gen_ai.request.model"]) == ("chat", "fake")
    assert seen["spillway.request_id"] == "mine" and seen["gen_ai.request.stream"] is stream
    tried = attributes(attempt)
    assert tried["spillway.engine"] == "a" and tried["server.port"] == engine.port
    assert tried["http.response.status_code"] == 200 and tried["gen_ai.response.time_to_first_chunk"] >= 0
    route = collector.one("route")
    assert attributes(route)["spillway.route.reason"] == "only"
    assert [attributes(event)["spillway.engine"] for event in route.events] == ["a"]
    assert server.start_time_unix_nano <= attempt.start_time_unix_nano <= attempt.end_time_unix_nano
    assert collector.services == {"spillway-gateway"}


async def test_each_try_is_a_span_and_the_failed_one_says_why(start_engine: Any, collector: Collector) -> None:
    engines = [await start_engine("a"), await start_engine("b")]
    async with traced(engines, collector) as running:
        assert await chat(running) == 200
        first = next(engine for engine in engines if engine.seen)
        first.fault = Status(503)
        assert await chat(running) == 200

    failed, again = sorted(collector.spans["chat fake"], key=lambda span: span.start_time_unix_nano)[1:]
    assert failed.status.code == 2 and attributes(failed)["error.type"] == "status"
    assert attributes(failed)["http.response.status_code"] == 503 and not attributes(failed)["spillway.retry"]
    assert again.status.code == 0 and attributes(again)["spillway.retry"]
    assert failed.parent_span_id == again.parent_span_id and failed.trace_id == again.trace_id
    assert attributes(failed)["spillway.engine"] == first.name != attributes(again)["spillway.engine"]
    assert len(collector.spans["route"]) == 3


async def test_a_caller_that_does_not_sample_is_followed(start_engine: Any, collector: Collector) -> None:
    engine = await start_engine("a")
    async with traced([engine], collector) as running:
        assert await chat(running, {"traceparent": NOT_SAMPLED}) == 200

    assert not collector.spans
    sent = sent_trace(engine)
    assert sent.startswith(f"00-{TRACE_ID}-") and sent.endswith("-00") and sent != NOT_SAMPLED


async def test_without_a_caller_s_word_the_ratio_decides(start_engine: Any, collector: Collector) -> None:
    engine = await start_engine("a")
    async with traced([engine], collector, sampleRatio=0) as running:
        assert await chat(running) == 200
        assert int(sent_trace(engine)[-2:], 16) & 1 == 0  # the bit beside it marks a random id
        assert await chat(running, {"traceparent": SAMPLED}) == 200

    assert len(collector.spans[f"POST {CHAT}"]) == 1


async def test_what_is_no_traceparent_begins_a_trace(start_engine: Any, collector: Collector) -> None:
    engine = await start_engine("a")
    async with traced([engine], collector) as running:
        assert await chat(running, {"traceparent": '00-"bad', "tracestate": "vendor=1"}) == 200

    server = collector.one(f"POST {CHAT}")
    assert server.parent_span_id == b""
    assert server.trace_id.hex() in sent_trace(engine)
    assert not [value for name, value in engine.seen[-1].headers if name == b"tracestate"]


async def test_errors_of_the_gateway_are_recorded(start_engine: Any, collector: Collector) -> None:
    engine = await start_engine("a")
    async with traced([engine], collector) as running:
        assert await chat(running, model="unknown") == 404
        engine.fault = Status(503)
        assert await chat(running) == 503

    unknown, refused = sorted(collector.spans[f"POST {CHAT}"], key=lambda span: span.start_time_unix_nano)
    assert attributes(unknown)["error.type"] == "model_not_found"
    assert attributes(unknown)["http.response.status_code"] == 404
    assert refused.status.code == 2 and attributes(refused)["http.response.status_code"] == 503


async def test_a_collector_that_is_away_delays_no_request(start_engine: Any) -> None:
    engine = await start_engine("a")
    absent = Collector()
    absent.url = "http://127.0.0.1:1/v1/traces"
    async with traced([engine], absent, exportSeconds=0.2, waitingSpansMax=4) as running:
        for _ in range(20):
            assert await chat(running) == 200


def test_off_nothing_of_it_is_imported() -> None:
    script = (
        "import sys; from spillway_gateway.app import Gateway\n"
        "from spillway_gateway.config.settings import parse_config\n"
        "Gateway(parse_config({'models': [{'name': 'm', 'engines': [{'name': 'e', 'url': 'http://127.0.0.1:1'}]}]}))\n"
        "rooms = ('opentelemetry.sdk', 'opentelemetry.exporter', 'spillway_gateway.tracing')\n"
        "print([name for name in sys.modules if name.startswith(rooms)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("tracing", "setting"),
    [
        ({"otlpEndpoint": "collector:4318"}, "otlpEndpoint"),
        ({"sampleRatio": 1.5}, "sampleRatio"),
        ({"exportSeconds": 0}, "exportSeconds"),
        ({"waitingSpansMax": 0}, "waitingSpansMax"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tracing: dict[str, Any], setting: str) -> None:
    models = [{"name": "m", "engines": [{"name": "e", "url": "http://127.0.0.1:1"}]}]

    with pytest.raises(ConfigError, match=rf"tracing\.{setting}"):
        parse_config({"models": models, "tracing": tracing})


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        (CHAT, "chat"),
        ("/v1/messages", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
    ],
)
def test_operations_have_their_conventional_names(path: str, operation: str) -> None:
    assert operation_of(path) == operation


@pytest.mark.parametrize("hand_over", ["store", "connector"])
async def test_each_of_two_legs_is_a_span(start_engine: Any, collector: Collector, hand_over: str) -> None:
    block, store = 16, "nvme/0123456789abcdef"
    engines = [await start_engine(name, block_tokens=block, publisher=KvPublisher()) for name in ("p", "d")]
    for engine in engines:
        engine.prefill(list(range(block)))
        engine.store = store
        engine.announce_stored(store)
    settings = {"otlpEndpoint": collector.url, "exportSeconds": 60}
    place = {"do_remote_prefill": True, "remote_engine_id": "secret-p", "remote_request_id": "secret-r"}
    place |= {"remote_host": "secret-h", "remote_port": 1, "remote_block_ids": [1]}
    kept = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "kv_transfer_params": place}
    if hand_over == "connector":
        engines[0].script = lambda path, body: Scripted(document=kept)
    legs = {"mode": "always", "uncachedTokensMin": block, "handOverSecondsMax": 120, "handOver": hand_over}
    document = gateway_config(engines, tracing=settings, disaggregation=legs)
    for entry, role in zip(document["models"][0]["engines"], ("prefill", "decode"), strict=True):
        entry["role"] = role
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        index = running.gateway.fleets[0].index
        await until(lambda: index.stores_of("p") and index.stores_of("d") and index.block_sizes == (block,))
        body = {"model": "fake", "prompt": list(range(1000, 1100))}
        async with client.post(running.url + "/v1/completions", json=body) as reply:
            assert reply.status == 200
    spans = [attributes(span) for span in collector.spans["text_completion fake"]]
    assert [(span["spillway.leg"], span["spillway.engine"]) for span in spans] == [("prefill", "p"), ("decode", "d")]
    first, second = map(attributes, collector.spans["route"])
    assert (first["spillway.legs"], first["spillway.legs.reason"]) == ("two", "always")
    assert first["spillway.legs.two_legs_ms"] > 0 and "spillway.legs" not in second
    assert "secret" not in repr(collector.spans), "where an engine keeps blocks"
