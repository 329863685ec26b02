"""A real Envoy in front, and the gateway as its endpoint picker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.tests.conftest import StartEngine, auth_files
from spillway_gateway.access.keys import hash_key
from spillway_gateway.listeners.server import PortInUse
from spillway_gateway.picker.messages import SERVICE, HttpHeaders, ProcessingRequest, ProcessingResponse
from spillway_gateway.picker.mutations import DESTINATION_HEADER
from spillway_gateway.testing.certificates import make_pair
from spillway_gateway.testing.envoy import envoy_config, running_envoy
from spillway_gateway.testing.faults import DieInStream, ErrorInStream, HoldInStream, Status
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until
from spillway_gateway.testing.running_fronts import running_fronts

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40


MODES = pytest.mark.parametrize("keeps", [False, True], ids=["bodies as they come", "bodies kept"])


@asynccontextmanager
async def behind_envoy(
    *engines: Any, keeps: bool = False, **sections: Any
) -> AsyncIterator[tuple[str, RunningGateway]]:
    """The URL of an Envoy in front of these engines, and the gateway that picks. keeps: Envoy keeps bodies."""
    async with AsyncExitStack() as stack:
        document = gateway_config(engines, **{"listen": {"port": 0, "pickerPort": 0}} | sections)
        running = await stack.enter_async_context(running_gateway(document))
        assert running.picker_port is not None
        url = await stack.enter_async_context(running_envoy(envoy_config(running.picker_port, keeps_bodies=keeps)))
        yield url, running


@asynccontextmanager
async def running_picker(
    document: dict[str, Any], host: str = "127.0.0.1", *, wait_ready: bool = True
) -> AsyncIterator[tuple[RunningGateway, grpc.aio.Channel]]:
    """The gateway, and a channel to its picker as a proxy has one."""
    async with (
        running_gateway(document, wait_ready=wait_ready) as running,
        grpc.aio.insecure_channel(f"{host}:{running.picker_port}") as channel,
    ):
        yield running, channel


async def post(url: str, path: str, body: object, **headers: str) -> tuple[int, dict[str, str], bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers}
    async with aiohttp.ClientSession() as session, session.post(url + path, data=data, headers=sent) as reply:
        return reply.status, {name.lower(): value for name, value in reply.headers.items()}, await reply.read()


def idle(running: RunningGateway) -> bool:
    """Whether nothing counts as running any more."""
    gateway = running.gateway
    engines = [engine for fleet in gateway.fleets for engine in fleet.engines.values()]
    return not gateway.lifecycle.running and all(engine.running_requests == 0 for engine in engines)


@MODES
async def test_requests_go_where_their_prefix_is_and_the_answer_is_the_engines(start_engine: StartEngine, keeps: bool):
    engines = [await start_engine(f"fake-{number}") for number in range(2)]
    async with behind_envoy(*engines, keeps=keeps) as (url, running):
        body = {"model": engines[0].model, "prompt": PROMPT, "max_tokens": 4}
        answers = [await post(url, "/v1/completions", body) for _ in range(4)]
        direct = await post(engines[0].url, "/v1/completions", body)
        assert [status for status, _, _ in answers] == [200] * 4
        assert len({headers["x-spillway-engine"] for _, headers, _ in answers}) == 1, "the index is the gateway's"
        assert json.loads(answers[0][2])["choices"] == json.loads(direct[2])["choices"]
        await until(lambda: idle(running))


@MODES
@pytest.mark.parametrize("prompt_bytes", [10, 70_000, 1_500_000])
async def test_a_stream_passes_whole_behind_a_body_of_any_length(
    start_engine: StartEngine, prompt_bytes: int, keeps: bool
):
    engine = await start_engine(max_model_len=4_000_000, words=40)
    engine.write_bytes = 61  # chunks of a reply end within its events
    async with behind_envoy(engine, keeps=keeps) as (url, running):
        body = {"model": engine.model, "prompt": "x" * prompt_bytes, "stream": True}
        status, headers, through = await post(url, "/v1/completions", body)
        _, _, direct = await post(running.url, "/v1/completions", body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert texts(through) == texts(direct) and through.endswith(b"data: [DONE]\n\n")
        assert len(engine.seen[-2].body) > prompt_bytes
        await until(lambda: idle(running))


@MODES
async def test_requests_and_replies_without_a_body_pass(start_engine: StartEngine, keeps: bool):
    """An answer to a body that it did not send is a broken rule to Envoy: clients got 500, also for what was done."""
    engine = await start_engine()
    async with behind_envoy(engine, keeps=keeps) as (url, running), aiohttp.ClientSession() as session:
        made = json.loads((await post(url, "/v1/responses", {"model": engine.model, "input": "hello"}))[2])
        path = f"{url}/v1/responses/{made['id']}"
        for method, of in (("GET", path), ("HEAD", path), ("POST", path + "/cancel")):
            async with session.request(method, of) as reply:
                direct = await session.request(method, of.replace(url, running.url))
                answer = await reply.read()
                assert reply.status == direct.status < 300 and answer == await direct.read()
                assert bool(answer) == (method != "HEAD")
        await until(lambda: idle(running))


def texts(stream: bytes) -> list[str]:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


@MODES
async def test_what_the_gateway_refuses_or_answers_itself_asks_no_engine(start_engine: StartEngine, keeps: bool):
    engine = await start_engine()
    async with behind_envoy(engine, keeps=keeps) as (url, running):
        before = len(engine.seen)
        status, _, wrong = await post(url, "/v1/completions", b"{")
        assert status == 400 and json.loads(wrong)["error"]["type"] == "invalid_request_error"
        status, _, unknown = await post(url, "/v1/chat/completions", {"model": "none", "messages": []})
        assert status == 404 and json.loads(unknown)["error"]["code"] == "model_not_found"
        status, _, _ = await post(url, "/v1/nothing", {})
        assert status == 404
        async with aiohttp.ClientSession() as session, session.get(url + "/v1/models") as reply:
            assert [card["id"] for card in (await reply.json())["data"]] == [engine.model]
        assert [seen.path for seen in engine.seen[before:]].count("/v1/completions") == 0
        await until(lambda: idle(running))


@MODES
async def test_keys_and_salts_are_the_gateways_and_no_client_chooses_the_address(
    start_engine: StartEngine, tmp_path: Path, keeps: bool
):
    engine, other = await start_engine(), await start_engine("not-of-this-gateway")
    key = "key-of-ann-0123456789abcdef"
    (tmp_path / "engine").write_text("engines-own-key-0123456789")
    tenants = [{"name": "ann", "keys": [hash_key(key)]}]
    auth = auth_files(tmp_path, tenants, engineKeyFile=str(tmp_path / "engine"))
    async with behind_envoy(engine, keeps=keeps, auth=auth) as (url, _):
        body = {"model": engine.model, "prompt": PROMPT}
        status, _, _ = await post(url, "/v1/completions", body)
        assert status == 401
        stolen = {DESTINATION_HEADER: f"127.0.0.1:{other.port}", "x-spillway-route": "x"}
        sent = {"authorization": f"Bearer {key}"} | stolen
        status, headers, _ = await post(url, "/v1/completions", body, **sent)
        assert status == 200 and headers["x-spillway-engine"] == engine.name
        seen = engine.seen[-1]
        assert json.loads(seen.body)["cache_salt"]
        given = dict(seen.headers)
        assert given[b"authorization"] == b"Bearer engines-own-key-0123456789"
        assert b"x-spillway-route" not in given and not other.seen


@MODES
async def test_clients_that_leave_end_their_requests_everywhere_and_are_no_fault_of_the_engine(
    start_engine: StartEngine, keeps: bool
):
    engine = await start_engine(words=20)
    engine.fault = HoldInStream(2, asyncio.Event())
    async with behind_envoy(engine, keeps=keeps) as (url, running):
        body = {"model": engine.model, "prompt": PROMPT, "stream": True}
        for _ in range(2 * running.gateway.config.breaker.failures):
            async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as reply:
                await reply.content.readany()
                assert not idle(running)
                reply.close()
            await until(lambda: idle(running))
            await asyncio.wait_for(engine.seen[-1].cancelled.wait(), 60)
        engine.fault = None
        assert (await post(url, "/v1/completions", body))[0] == 200
        assert running.engine(engine.name).breaker.opened_total == 0


@MODES
@pytest.mark.parametrize("fault", [Status(503), DieInStream(2), "gone"], ids=str)
async def test_an_engine_that_fails_gives_its_place_back(start_engine: StartEngine, fault: Any, keeps: bool):
    engine = await start_engine(words=20)
    async with behind_envoy(engine, keeps=keeps) as (url, running):
        if fault == "gone":
            await engine.stop()
        else:
            engine.fault = fault
        for stream in (False, True):
            body = {"model": engine.model, "prompt": PROMPT, "stream": stream}
            try:
                status, _, answer = await post(url, "/v1/completions", body)
            except aiohttp.ClientError:
                pass  # Envoy breaks a reply off that its engine broke off
            else:
                begun = isinstance(fault, DieInStream)
                assert status >= 500 or (begun and not answer.endswith(b"data: [DONE]\n\n")), answer
        await until(lambda: idle(running))


@MODES
async def test_a_stream_that_begins_with_an_error_is_answered_with_a_status(start_engine: StartEngine, keeps: bool):
    engine = await start_engine()
    engine.fault = ErrorInStream(0)
    async with behind_envoy(engine, keeps=keeps) as (url, running):
        body = {"model": engine.model, "prompt": PROMPT, "stream": True}
        status, _, answer = await post(url, "/v1/completions", body)
        assert (status, json.loads(answer)["error"]["code"]) == (502, "engine_failed")
        await until(lambda: idle(running))


async def test_a_proxy_that_names_a_subset_gets_an_engine_of_it(start_engine: StartEngine):
    engines = [await start_engine(f"fake-{number}") for number in range(3)]
    wanted = engines[2]
    config_of = envoy_config
    async with AsyncExitStack() as stack:
        document = gateway_config(engines, listen={"port": 0, "pickerPort": 0})
        running = await stack.enter_async_context(running_gateway(document))
        assert running.picker_port is not None
        config = config_of(running.picker_port, subset=[f"127.0.0.1:{wanted.port}"])
        url = await stack.enter_async_context(running_envoy(config))
        for number in range(6):
            body = {"model": wanted.model, "prompt": f"{number} {PROMPT}"}
            status, headers, _ = await post(url, "/v1/completions", body)
            assert status == 200 and headers["x-spillway-engine"] == wanted.name


@pytest.mark.parametrize("subset", [[], ["192.0.2.1:8100"]], ids=["empty", "unknown"])
async def test_a_subset_without_an_engine_is_503(start_engine: StartEngine, subset: list[str]):
    engine = await start_engine()
    async with running_gateway(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as running:
        assert running.picker_port is not None
        async with running_envoy(envoy_config(running.picker_port, subset=subset)) as url:
            status, _, answer = await post(url, "/v1/completions", {"model": engine.model, "prompt": PROMPT})
        assert (status, json.loads(answer)["error"]["code"]) == (503, "no_engine_ready")
        assert not [seen for seen in engine.seen if seen.path == "/v1/completions"]


async def test_while_no_picker_answers_requests_pass_or_fail_as_the_proxy_says(start_engine: StartEngine):
    engine = await start_engine()
    body, stolen = {"model": engine.model, "prompt": PROMPT}, {DESTINATION_HEADER: "127.0.0.1:1"}
    for address, expected in (([f"127.0.0.1:{engine.port}"], 200), (None, 500)):
        async with running_gateway(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as running:
            assert running.picker_port is not None
            config = envoy_config(running.picker_port, fail_open_to=address)
            envoy = running_envoy(config)
            url = await envoy.__aenter__()
            assert (await post(url, "/v1/completions", body))[0] == 200
        try:
            while (found := await post(url, "/v1/completions", body, **stolen))[0] != expected:
                pass  # until Envoy's health check has seen that the picker is gone
            assert "x-spillway-engine" not in found[1]
        finally:
            await envoy.__aexit__(None, None, None)


async def test_the_health_service_says_when_the_gateway_drains(start_engine: StartEngine):
    engine = await start_engine()
    document = gateway_config([engine], listen={"port": 0, "pickerPort": 0})
    async with running_picker(document) as (running, channel):
        health = health_pb2_grpc.HealthStub(channel)
        states = health_pb2.HealthCheckResponse
        serving = states.SERVING
        services = ("", "envoy.service.ext_proc.v3.ExternalProcessor", "readiness", "liveness")

        async def status(service: str) -> int:
            found: int = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
            return found

        assert [await status(service) for service in services] == [serving] * 4
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == serving
        running.gateway.lifecycle.drain()
        assert (await watch.read()).status == states.NOT_SERVING
        assert [await status(service) for service in services] == [states.NOT_SERVING] * 3 + [serving]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_before_its_engines_have_answered_the_picker_serves_nobody(start_engine: StartEngine):
    engine = await start_engine()
    engine.ready = (503, {"ready": False})
    document = gateway_config([engine], listen={"port": 0, "pickerPort": 0})
    async with (
        running_gateway(document, wait_ready=False) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.picker_port}") as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        states = health_pb2.HealthCheckResponse

        async def status(service: str) -> int:
            found: int = (await health.Check(health_pb2.HealthCheckRequest(service=service))).status
            return found

        assert [await status(service) for service in (SERVICE, "readiness")] == [states.NOT_SERVING] * 2
        assert await status("liveness") == states.SERVING
        engine.ready = (200, {"ready": True})
        await running.until_engine(engine.name, lambda engine: engine.routable)
        assert await status(SERVICE) == states.SERVING
        await engine.stop()
        await running.until_engine(engine.name, lambda engine: not engine.routable)
        assert await status(SERVICE) == states.SERVING, "the picker itself says that no engine can take a request"


@pytest.mark.parametrize(("host", "client"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "[::1]")])
async def test_the_picker_listens_on_both_families_of_addresses(start_engine: StartEngine, host: str, client: str):
    document = gateway_config([await start_engine()], listen={"port": 0, "pickerPort": 0, "host": host})
    async with running_picker(document, client) as (_, channel):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_several_processes_answer_proxies_from_one_index(start_engine: StartEngine):
    engines = [await start_engine(f"fake-{number}") for number in range(2)]
    async with AsyncExitStack() as stack:
        document = gateway_config(engines, listen={"port": 0, "pickerPort": 0})
        running = await stack.enter_async_context(running_fronts(document, count=2))
        urls = []
        for front in running.started:
            assert front.picker_port is not None
            urls.append(await stack.enter_async_context(running_envoy(envoy_config(front.picker_port))))
        body = {"model": engines[0].model, "prompt": PROMPT, "max_tokens": 4}
        answers = [await post(url, "/v1/completions", body) for url in [*urls, *urls]]
        assert [status for status, _, _ in answers] == [200] * 4
        assert len({headers["x-spillway-engine"] for _, headers, _ in answers}) == 1


async def test_a_watched_health_service_delays_no_end(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spillway_gateway.picker.server.END_SECONDS", 3600.0)
    document = gateway_config([await start_engine()], listen={"port": 0, "pickerPort": 0})
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        async with running_gateway(document) as running:
            address = f"127.0.0.1:{running.picker_port}"
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await watch.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (ProcessingRequest(request_headers=HttpHeaders()).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (ProcessingRequest(response_headers=HttpHeaders()).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(5 * 2**20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["no message", "no kind", "a second head", "a reply before its request", "too long"],
)
async def test_a_body_that_cannot_be_read_ends_the_call_and_is_no_fault_of_the_gateway(
    start_engine: StartEngine, message: bytes, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
):
    document = gateway_config([await start_engine()], listen={"port": 0, "pickerPort": 0})
    async with running_picker(document) as (running, channel):
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(opening())
        await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is code
        await until(lambda: idle(running))
    assert "the gateway failed" not in caplog.text


def opening() -> bytes:
    message = ProcessingRequest(request_headers=HttpHeaders())
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("content-type", "application/json")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    serialized: bytes = message.SerializeToString()
    return serialized


async def test_a_request_for_whose_bytes_there_is_no_room_is_answered_with_503(start_engine: StartEngine):
    mib = 1024 * 1024
    limits = {"bodyBytesMax": 3 * mib, "bodiesBytesMax": 4 * mib}
    document = gateway_config([await start_engine()], limits=limits, listen={"port": 0, "pickerPort": 0})
    async with running_picker(document) as (running, channel):
        budget = running.gateway.open_connections.body_budget
        budget.reserve(4 * mib, 1)  # by others
        body = ProcessingRequest(request_body={"body": bytes(100_000)}).SerializeToString()
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(opening())
        await call.write(body)
        answer = ProcessingResponse.FromString(await call.read()).immediate_response
        assert answer.status.code == 503 and json.loads(answer.body)["error"]["code"] == "gateway_overloaded"
        await until(lambda: idle(running) and budget.reserved_bytes == 4 * mib)


async def test_a_reply_passes_while_bodies_of_others_fill_their_budget(start_engine: StartEngine):
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    document = gateway_config([engine], listen={"port": 0, "pickerPort": 0})
    async with running_picker(document) as (running, channel):
        opened = running.gateway.open_connections
        bodies_bytes_max = running.gateway.config.limits.bodies_bytes_max
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(opening())
        await call.write(ProcessingRequest(request_body={"body": body, "end_of_stream": True}).SerializeToString())
        for _ in range(2):
            await call.read()
        opened.body_budget.reserve(bodies_bytes_max, 1)
        head = ProcessingRequest(response_headers=HttpHeaders())
        head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        await call.write(head.SerializeToString())
        sent = b"x" * 1_000_000
        await call.write(ProcessingRequest(response_body={"body": sent, "end_of_stream": True}).SerializeToString())
        await call.done_writing()
        came = b""
        while (message := await call.read()) is not grpc.aio.EOF:
            came += ProcessingResponse.FromString(message).response_body.response.body_mutation.streamed_response.body
        assert came == sent and await call.code() is grpc.StatusCode.OK
        await until(lambda: idle(running))
        assert opened.reply_budget.held_bytes == 0
        assert opened.body_budget.reserved_bytes == bodies_bytes_max


async def test_trailers_of_a_request_are_answered_after_its_body(start_engine: StartEngine):
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    document = gateway_config([engine], listen={"port": 0, "pickerPort": 0})
    async with running_picker(document) as (running, channel):
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(opening())
        await call.write(ProcessingRequest(request_body={"body": body}).SerializeToString())
        trailers = ProcessingRequest(request_trailers={})
        trailers.request_trailers.trailers.headers.add(key="x-data-parallel-rank", raw_value=b"1")
        await call.write(trailers.SerializeToString())
        answers = [ProcessingResponse.FromString(await call.read()) for _ in range(3)]
        assert [each.WhichOneof("kind") for each in answers] == ["request_headers", "request_body", "request_trailers"]
        assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
        assert answers[2].request_trailers.header_mutation.remove_headers == ["x-data-parallel-rank"]
        call.cancel()
        await until(lambda: idle(running))


async def test_a_picker_port_in_use_is_named(start_engine: StartEngine):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        document = gateway_config([await start_engine()], listen={"port": 0, "pickerPort": port})
        with pytest.raises(PortInUse, match=rf"cannot listen on 127.0.0.1:{port} .* change listen.pickerPort"):
            async with running_gateway(document):
                pass


async def test_the_picker_has_the_main_listeners_certificate_and_its_successor(
    start_engine: StartEngine, tmp_path: Path
):
    def renew() -> bytes:
        certificate, key = make_pair("gateway")
        (tmp_path / "tls.crt").write_bytes(certificate)
        (tmp_path / "tls.key").write_bytes(key)
        return certificate

    async def serving(trusted: bytes, port: int | None) -> bool:
        options = [("grpc.ssl_target_name_override", "127.0.0.1")]
        credentials = grpc.ssl_channel_credentials(trusted)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    first = renew()
    files = {"certFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key")}
    listen = {"port": 0, "pickerPort": 0, "tls": {**files, "reloadSeconds": 0.05}}
    async with running_gateway(gateway_config([await start_engine()], listen=listen)) as running:
        port = running.picker_port
        assert await serving(first, port)
        second = renew()
        while not await serving(second, port):
            pass  # until the files are read again
        assert not await serving(first, port)
