"""A proxy that keeps bodies until they are answered, message by message; behind Envoy: test_envoy.py."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from gateway.tests.conftest import StartEngine, auth_files
from gateway.tests.picker.test_envoy import PROMPT, idle, running_picker
from spillway_gateway.access.keys import hash_key
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.settings import ConnectionsConfig
from spillway_gateway.picker import processed_request
from spillway_gateway.picker.body_modes import BUFFERED, FULL_DUPLEX_STREAMED, STREAMED, BodyModes, body_modes
from spillway_gateway.picker.messages import SERVICE, HttpHeaders, ProcessingRequest, ProcessingResponse
from spillway_gateway.picker.processed_request import EngineSide, ProcessedRequest
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.running import gateway_config, until
from spillway_settings.byte_sizes import ByteCount

KEPT = {
    "request_body_mode": BUFFERED,
    "response_body_mode": STREAMED,
    "send_body_without_waiting_for_header_response": True,
}


def opening(modes: dict[str, Any] | None = None, **headers: str) -> Any:
    message = ProcessingRequest(request_headers=HttpHeaders(), protocol_config=modes)
    given = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json", **headers}
    for name, value in given.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


class Call:
    """One call of a proxy."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: Any = None, **fields: Any) -> None:
        await self._call.write((message or ProcessingRequest(**fields)).SerializeToString())

    async def answer(self) -> Any:
        return ProcessingResponse.FromString(await self._call.read())

    async def status(self) -> grpc.StatusCode:
        """Return the status with which the picker ends the call."""
        status: grpc.StatusCode = await self._call.code()
        return status

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def calling(document: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """The gateway, and what begins a call."""
    async with running_picker(document) as (running, channel):
        yield running, lambda: Call(channel.stream_stream(f"/{SERVICE}/Process")())
        await until(lambda: idle(running))


def test_a_proxy_that_names_no_modes_gives_bodies_away():
    assert body_modes(opening()) == BodyModes(keeps_request=False, keeps_reply=False)
    assert body_modes(opening(KEPT)) == BodyModes(keeps_request=True, keeps_reply=True)
    mixed = {"request_body_mode": BUFFERED, "response_body_mode": FULL_DUPLEX_STREAMED}
    assert body_modes(opening(mixed)) == BodyModes(keeps_request=True, keeps_reply=False)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"request_body_mode": 0}, "request_body_mode is NONE"),
        ({"request_body_mode": STREAMED}, "request_body_mode is STREAMED"),
        ({"request_body_mode": 3}, "request_body_mode is BUFFERED_PARTIAL"),
        ({"response_body_mode": 0}, "response_body_mode is NONE"),
        ({"response_body_mode": BUFFERED}, "response_body_mode is BUFFERED"),
        ({"send_body_without_waiting_for_header_response": False}, "send_body_without_waiting_for_header_response"),
        ({"request_body_mode": 77}, "request_body_mode is 77"),
    ],
)
async def test_modes_in_which_no_request_can_be_answered_are_named(
    start_engine: StartEngine, changed: dict[str, Any], named: str
):
    document = gateway_config([await start_engine()], listen={"port": 0, "pickerPort": 0})
    async with calling(document) as (_, begin):
        call = begin()
        await call.send(opening(KEPT | changed))
        answer = (await call.answer()).immediate_response
        assert answer.status.code == 500 and named in json.loads(answer.body)["error"]["message"]


async def test_a_whole_body_is_answered_once_and_goes_on_as_it_came(start_engine: StartEngine):
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    async with calling(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as (_, begin):
        call = begin()
        await call.send(opening(KEPT))
        first = await call.answer()
        assert first.WhichOneof("kind") == "request_headers"
        assert not first.request_headers.response.header_mutation.set_headers, "as it came, if the picker dies now"
        await call.send(request_body={"body": body})  # trailers follow
        answer = await call.answer()
        common = answer.request_body.response
        assert not common.HasField("body_mutation") and common.clear_route_cache
        address = f"127.0.0.1:{engine.port}".encode()
        assert address in {option.header.raw_value for option in common.header_mutation.set_headers}
        assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == address.decode()
        await call.send(request_trailers={})
        assert (await call.answer()).WhichOneof("kind") == "request_trailers"
        head = HttpHeaders()
        head.headers.headers.add(key=":status", raw_value=b"200")
        await call.send(response_headers=head)
        reply = b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'
        await call.send(response_body={"body": reply[:20]})
        await call.send(response_body={"body": reply[20:], "end_of_stream": True})
        answers = [await call.answer() for _ in range(3)]
        assert [each.WhichOneof("kind") for each in answers] == ["response_headers", "response_body", "response_body"]
        assert not any(each.response_body.response.HasField("body_mutation") for each in answers[1:])
        assert await call.status() is grpc.StatusCode.OK


async def test_a_body_that_the_gateway_changes_comes_back_changed(start_engine: StartEngine, tmp_path: Path):
    engine = await start_engine()
    key = "key-of-ann-0123456789abcdef"
    auth = auth_files(tmp_path, [{"name": "ann", "keys": [hash_key(key)]}])
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    document = gateway_config([engine], auth=auth, listen={"port": 0, "pickerPort": 0})
    async with calling(document) as (_, begin):
        call = begin()
        await call.send(opening(KEPT, authorization=f"Bearer {key}"))
        await call.answer()
        await call.send(request_body={"body": body, "end_of_stream": True})
        changed = (await call.answer()).request_body.response.body_mutation.body
        assert json.loads(changed)["cache_salt"] and json.loads(changed)["prompt"] == PROMPT
        call.cancel()


@pytest.mark.parametrize(
    "fields", [{"request_body": {"body": b"x"}}, {"request_headers": {}}, {"response_body": {"body": b"x"}}], ids=str
)
async def test_a_message_that_is_not_due_after_the_body_ends_the_call(
    start_engine: StartEngine, fields: dict[str, Any]
):
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    async with calling(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as (_, begin):
        call = begin()
        await call.send(opening(KEPT))
        await call.answer()
        await call.send(request_body={"body": body, "end_of_stream": True})
        await call.answer()
        await call.send(**fields)
        assert await call.status() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("more_bytes", [1, 1_000_000])
async def test_a_whole_body_beyond_the_limit_is_answered_with_413(start_engine: StartEngine, more_bytes: int):
    engine = await start_engine()
    limits = {"bodyBytesMax": 5_000_000}
    document = gateway_config([engine], limits=limits, listen={"port": 0, "pickerPort": 0})
    async with calling(document) as (_, begin):
        call = begin()
        await call.send(opening(KEPT))
        await call.answer()
        await call.send(request_body={"body": bytes(5_000_000 + more_bytes), "end_of_stream": True})
        answer = (await call.answer()).immediate_response
        assert answer.status.code == 413 and b"limits.bodyBytesMax" in answer.body
        assert await call.status() is grpc.StatusCode.OK


async def test_before_its_engines_have_answered_a_call_is_for_the_proxys_failure_mode(start_engine: StartEngine):
    engine = await start_engine()
    engine.ready = (503, {"ready": False})
    document = gateway_config([engine], listen={"port": 0, "pickerPort": 0})
    async with running_picker(document, wait_ready=False) as (_, channel):
        call = Call(channel.stream_stream(f"/{SERVICE}/Process")())
        await call.send(opening(KEPT))
        assert await call.status() is grpc.StatusCode.UNAVAILABLE


async def test_a_body_that_does_not_come_ends_with_the_time_that_its_bytes_may_take(start_engine: StartEngine):
    document = gateway_config(
        [await start_engine()],
        timeouts={"bodyReadSeconds": 0.05},
        connections={"bodyBytesPerSecondMin": 1_000_000},
        listen={"port": 0, "pickerPort": 0},
    )
    async with calling(document) as (_, begin):
        call = begin()
        await call.send(opening(KEPT, **{"content-length": "1000"}))
        await call.answer()
        answer = (await call.answer()).immediate_response
        assert answer.status.code == 408 and b"timeouts.bodyReadSeconds" in answer.body
        assert await call.status() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("declared", "seconds"), [(b"6000", 60 + 6), (None, 60 + 50), (b"10000000", 60 + 50), (b"x", 60 + 50)]
)
def test_how_long_a_whole_body_may_take(declared: bytes | None, seconds: float):
    message = opening(KEPT) if declared is None else opening(KEPT, **{"content-length": declared.decode()})
    opened = OpenConnections(ConnectionsConfig(body_bytes_per_second_min=ByteCount(1000)), 10)
    request = ProcessedRequest(cast("Any", None), message, BodyModes(keeps_request=True), opened, 50_000)
    request.expect_body(60)
    assert request._whole_body_seconds() == seconds


async def test_one_of_a_given_and_a_changed_body_is_kept(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One body is kept while the request waits."""
    kept: list[bytes | None] = []
    send = EngineSide.send

    def recorded(engine: EngineSide, parts: Any) -> None:
        kept.append(engine.given_body)
        send(engine, parts)

    monkeypatch.setattr(EngineSide, "send", recorded)
    engine = await start_engine()
    key = "key-of-ann-0123456789abcdef"
    auth = auth_files(tmp_path, [{"name": "ann", "keys": [hash_key(key)]}])
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    for sections, expected in (({}, body), ({"auth": auth}, None)):
        document = gateway_config([engine], **sections, listen={"port": 0, "pickerPort": 0})
        async with calling(document) as (_, begin):
            call = begin()
            await call.send(opening(KEPT, authorization=f"Bearer {key}"))
            await call.answer()
            await call.send(request_body={"body": body, "end_of_stream": True})
            assert (await call.answer()).WhichOneof("kind") == "request_body"
            assert kept.pop() == expected
            call.cancel()


async def up_to_reply(call: Call, body: bytes, status: bytes, content_type: bytes = b"") -> None:
    """The request with a kept body is answered, and the head of the engine's reply is sent."""
    await call.send(opening(KEPT))
    await call.answer()
    await call.send(request_body={"body": body, "end_of_stream": True})
    await call.answer()
    head = HttpHeaders()
    head.headers.headers.add(key=":status", raw_value=status)
    if content_type:
        head.headers.headers.add(key="content-type", raw_value=content_type)
    await call.send(response_headers=head)


@pytest.mark.parametrize("status", ["200", "400"])
async def test_a_plain_reply_passes_on_before_its_trailers(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, status: str
):
    """Envoy tells of them once it has the answers to the chunks before them."""
    monkeypatch.setattr(processed_request, "KEPT_SILENT_SECONDS", 0.01)
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    async with calling(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as (_, begin):
        call = begin()
        await up_to_reply(call, body, status.encode())
        await call.send(response_body={"body": b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'})
        answers = [await call.answer() for _ in range(2)]
        assert [each.WhichOneof("kind") for each in answers] == ["response_headers", "response_body"]
        assert not answers[1].response_body.response.HasField("body_mutation")
        trailers = ProcessingRequest(response_trailers={})
        trailers.response_trailers.trailers.headers.add(key="Set-Cookie", raw_value=b"a=b")
        await call.send(trailers)
        assert (await call.answer()).response_trailers.header_mutation.remove_headers == ["set-cookie"]
        assert await call.status() is grpc.StatusCode.OK


CHUNK = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


@asynccontextmanager
async def kept_stream(engine: FakeEngine) -> AsyncIterator[Call]:
    """A call whose request was kept and answered, and whose reply is a stream that has not begun."""
    body = json.dumps({"model": engine.model, "prompt": PROMPT, "stream": True}).encode()
    async with calling(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as (_, begin):
        call = begin()
        await up_to_reply(call, body, b"200", b"text/event-stream")
        yield call


@pytest.mark.parametrize("before", [b"", CHUNK])
@pytest.mark.parametrize("cut", [b"data", CHUNK[:20], CHUNK[:-1], b": a comment"])
async def test_a_stream_that_ends_within_an_event_before_its_trailers_ends_for_its_client(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, before: bytes, cut: bytes
):
    """Envoy tells of trailers once all chunks are answered. The answer is not whole, and is broken off."""
    monkeypatch.setattr(processed_request, "KEPT_SILENT_SECONDS", 0.01)
    async with kept_stream(await start_engine()) as call:
        answers = []
        for chunk in (before, cut):
            if chunk:
                await call.send(response_body={"body": chunk})
        for _ in range(2 + bool(before)):
            answers.append(await call.answer())
        assert [each.WhichOneof("kind") for each in answers] == [
            "response_headers",
            *["response_body"] * (len(answers) - 1),
        ]
        assert not any(each.response_body.response.HasField("body_mutation") for each in answers[1:])
        await call.send(response_trailers={})
        assert (await call.answer()).WhichOneof("kind") == "immediate_response"
        assert await call.status() is grpc.StatusCode.OK


async def test_an_event_that_a_kept_stream_brings_slowly_passes_in_parts(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processed_request, "KEPT_SILENT_SECONDS", 0.01)
    async with kept_stream(await start_engine()) as call:
        kinds = []
        for chunk in (CHUNK[:10], CHUNK[10:25], CHUNK[25:], b"data: [DONE]\n\n"):
            await call.send(response_body={"body": chunk})
            kinds.append((await call.answer()).WhichOneof("kind"))
            if len(kinds) == 1:
                kinds.append((await call.answer()).WhichOneof("kind"))
        assert kinds == ["response_headers", *["response_body"] * 4]
        trailers = ProcessingRequest(response_trailers={})
        trailers.response_trailers.trailers.headers.add(key="Set-Cookie", raw_value=b"a=b")
        await call.send(trailers)
        assert (await call.answer()).response_trailers.header_mutation.remove_headers == ["set-cookie"]
        assert await call.status() is grpc.StatusCode.OK


async def test_an_error_with_trailers_is_answered(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch):
    """The gateway answers, with the engine's status: nothing of the error was passed on, and its end does not come
    before."""
    monkeypatch.setattr(processed_request, "KEPT_SILENT_SECONDS", 0.01)
    engine = await start_engine()
    body = json.dumps({"model": engine.model, "prompt": PROMPT}).encode()
    async with calling(gateway_config([engine], listen={"port": 0, "pickerPort": 0})) as (_, begin):
        call = begin()
        await up_to_reply(call, body, b"503")
        await call.send(response_body={"body": b'{"error":{"message":"full"}}'})
        answer = (await call.answer()).immediate_response
        assert answer.status.code == 503 and b"without an end" in answer.body
        assert await call.status() is grpc.StatusCode.OK


def test_silence_ends_the_collecting_of_a_reply_and_never_the_reply():
    opened = OpenConnections(ConnectionsConfig(), 10)
    request = ProcessedRequest(cast("Any", None), opening(KEPT), BodyModes(keeps_reply=True), opened, 50_000)
    kept, side = request.engine_connections.kept_reply, request.engine_connections
    assert kept is not None and not side.collected
    assert request.take_reply_bytes(100) and side.collected
    kept.take(bytes(processed_request.KEPT_REPLY_BYTES_MAX + 1), last=False)
    assert not request.take_reply_bytes(100)
    request.give_reply_bytes(100)  # what is here passes on, and its last bytes may be held back for a while
    assert not side.collected
