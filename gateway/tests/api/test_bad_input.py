"""No request makes the gateway fail: whatever is sent to the routes of its own OpenAPI document gets an answer of the
engine or a 4xx in the API's error shape. The engine here says 200 to all that it knows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spillway_gateway.api.openapi import openapi_document
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import Status
from spillway_gateway.testing.running import gateway_config, running_gateway
from spillway_gateway.testing.small_tokenizer import write_tokenizer

DOCUMENT = openapi_document(keys=False)
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
SECONDS_MAX = 60.0


class Reply(NamedTuple):
    status: int
    from_engine: bool
    body: bytes


class Target:
    """A gateway with a tokenizer in front of an engine that takes everything; one loop for all examples."""

    def __init__(self, runner: asyncio.Runner, port: int) -> None:
        self._runner = runner
        self.port = port

    def send(self, raw: bytes, *, then_end: bool = False) -> Reply | None:
        """The reply to these bytes; None if the connection was closed without one. then_end: the client sends no
        more, so that a server does not wait for the rest of half a request."""
        return self._runner.run(self._send(raw, then_end))

    async def _send(self, raw: bytes, then_end: bool) -> Reply | None:
        async with asyncio.timeout(SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(raw)
                if then_end:
                    writer.write_eof()
                answer = await reader.read()
            except ConnectionError:
                return None
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return Reply(int(head.split(b" ", 2)[1]), b"\r\nx-spillway-engine:" in head, body) if head else None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, "the quick brown fox", 300, TEMPLATE)
    with asyncio.Runner() as runner:
        opened = serving(folder)
        port = runner.run(opened.__aenter__())
        try:
            yield Target(runner, port)
        finally:
            runner.run(opened.__aexit__(None, None, None))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[int]:
    engine = FakeEngine(tokenize_route=False, record=False)
    engine.fault = Status(200)
    await engine.start()
    try:
        async with running_gateway(gateway_config([engine], tokenizer=str(folder), aliases=["alias"])) as running:
            yield int(running.url.rpartition(":")[2])
    finally:
        await engine.stop()


# -- requests of the document ------------------------------------------------------------------------------------------

text = st.text(max_size=20) | st.sampled_from(["fake", "alias", "user", "<|im_start|>", "\x00", "é" * 9, "nobody"])
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**64, 10**400, 1e308])
anything = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def fitting(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows, as far as the document's own schemas go."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of([fitting(option) for option in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", [])
        given_fields = {name: fitting(inner) for name, inner in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: given_fields[name] for name in required},
            optional={name: inner for name, inner in given_fields.items() if name not in required},
        )
    simple: dict[Any, st.SearchStrategy[Any]] = {
        "string": text,
        "boolean": st.booleans(),
        "null": st.none(),
        "object": st.dictionaries(text | st.sampled_from(["role", "content", "type", "text"]), anything, max_size=4),
    }
    if kind == "array":
        return st.lists(fitting(schema.get("items", {})), max_size=3)
    return simple.get(kind, anything)


def body_of(path: str, method: str) -> st.SearchStrategy[bytes]:
    content = DOCUMENT["paths"][path][method.lower()].get("requestBody", {}).get("content", {})
    schema = next(iter(content.values()), {}).get("schema", {})
    whole = fitting(schema)
    spoilt = st.tuples(whole, st.dictionaries(st.sampled_from(fields_of(schema)), anything, max_size=3)).map(
        lambda pair: {**pair[0], **pair[1]} if isinstance(pair[0], dict) else pair[0]
    )
    as_json = (whole | spoilt | anything).map(json.dumps).map(str.encode)
    torn = st.tuples(as_json, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
    )
    part = st.tuples(st.sampled_from([b"model", b"file", b"stream", b""]), st.binary(max_size=20))
    form = st.lists(part, max_size=4).map(
        lambda parts: (
            b"".join(b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % each for each in parts)
            + b"--b--\r\n"
        )
    )
    return as_json | torn | form | st.binary(max_size=60)


def fields_of(schema: dict[str, Any]) -> list[str]:
    return [*resolved(schema).get("properties", {}), "priority", "n", "kv_transfer_params"]


header_values = st.binary(max_size=30).map(
    lambda value: bytes(byte for byte in value if byte not in (0, 10, 13)).strip()
)
header_names = st.sampled_from(
    [b"content-type", b"x-request-id", b"traceparent", b"authorization", b"x-spillway-engine", b"connection",
     b"x-data-parallel-rank", b"accept", b"expect", b"te", b"upgrade"]
)  # fmt: skip
headers = st.lists(st.tuples(header_names, header_values), max_size=4)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    method, path = draw(st.sampled_from(OPERATIONS))
    body = draw(body_of(path, method))
    target = path.replace("{response_id}", draw(st.sampled_from(["resp_1", "%00", "..", "%ff", "a" * 3000])))
    query = draw(st.sampled_from(["", "?", "?stream=true", "?%00=%ff&&", "?a=" + "b" * 2000]))
    lines = [f"{method} {target}{query} HTTP/1.1".encode(), b"host: gateway", b"connection: close"]
    lines += [name + b": " + value for name, value in draw(headers)]
    lines.append(b"content-length: %d" % len(body))
    return path, b"\r\n".join(lines) + b"\r\n\r\n" + body


def post(path: str, body: bytes) -> tuple[str, bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return path, head.encode() + body


def deep_arguments(levels: int) -> bytes:
    arguments = "[" * levels + "]" * levels
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}).encode()


def deep_tool_use(levels: int) -> bytes:
    block = b'{"type": "tool_use", "name": "f", "input": {"a": ' + b"[" * levels + b"]" * levels + b"}}"
    return b'{"messages": [{"role": "assistant", "content": [' + block + b"]}]}"


CHAT = "/v1/chat/completions"


@settings(
    max_examples=4 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(request=requests())
@example(request=post(CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'))
@example(request=post(CHAT, b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"))
@example(request=post(CHAT, b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}"))
@example(request=post(CHAT, deep_arguments(100_000)))
@example(request=post(CHAT, deep_arguments(900)))
@example(request=post(CHAT, b'{"messages": [{"role": "assistant", "tool_calls": ' + b"[" * 990 + b"]" * 990 + b"}]}"))
@example(request=post("/v1/messages", deep_tool_use(900)))
@example(request=post(CHAT, b'{"messages": [], "tools": [{"function": {"name": 1, "parameters": {"x": 1e999}}}]}'))
@example(request=post(CHAT, b'{"messages": [], "chat_template_kwargs": {"messages": 1, "self": 2, "tools": 3}}'))
@example(request=post(CHAT, b'{"model": "alias", "messages": [], "\\ud800": 1, "\\u0000": {"model": "x"}}'))
@example(request=post(CHAT, b'{"model": "alias", "messages": [], "\\": 1}'))
@example(request=post(CHAT, b'{"model": "alias", "messages": [], "model": "alias"}'))
@example(request=post("/v1/completions", b'{"prompt": [1, -1, 1e20]}'))
@example(request=post("/v1/completions", b'\xff\xfe{"prompt": "x"}'))
@example(request=post("/inference/v1/generate", b'{"token_ids": [99999999999999999999]}'))
@example(request=post("/v1/responses", b'{"input": [], "previous_response_id": ""}'))
def test_no_request_of_the_document_makes_the_gateway_fail(target: Target, request: tuple[str, bytes]) -> None:
    path, raw = request
    reply = target.send(raw)

    assert reply is not None
    assert reply.status < 500, reply
    if reply.status >= 400 and not reply.from_engine:
        assert_error_shape(path, reply)


def assert_error_shape(path: str, reply: Reply) -> None:
    document = json.loads(reply.body)
    error = document["error"]
    assert error["message"] and isinstance(error["message"], str)
    if path.startswith("/v1/messages") and error.get("code") != "invalid_http":
        assert document["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}


# -- what is hardly HTTP -----------------------------------------------------------------------------------------------

pieces = st.binary(max_size=40) | st.sampled_from(
    [b"POST ", b"GET ", CHAT.encode(), b"/v1/%zz", b"/\xff\xfe", b" HTTP/1.1\r\n", b" HTTP/9.9\r\n", b"\r\n",
     b"\r\n\r\n", b"content-length: 5\r\n", b"content-length: -1\r\n", b"content-length: 99999999999999999999\r\n",
     b"host: x\r\n", b"transfer-encoding: chunked\r\n", b"5\r\n", b"zz\r\n", b"0\r\n\r\n", b"{}",
     b"expect: 100-continue\r\n",
     b"connection: upgrade\r\nupgrade: websocket\r\n", b"http://other/v1/models", b"*", b"?\x01"]
)  # fmt: skip


@settings(
    max_examples=2 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(raw=st.lists(pieces, max_size=12).map(b"".join))
@example(raw=b"POST " + CHAT.encode() + b"\xff HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
@example(raw=b"GET http://[::1/ HTTP/1.1\r\nhost: x\r\n\r\n")
@example(raw=b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")
@example(raw=b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n")
def test_bytes_that_are_hardly_http_do_no_harm(target: Target, raw: bytes) -> None:
    reply = target.send(raw, then_end=True)

    assert reply is None or reply.status < 500, reply
    alive = target.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert alive is not None and alive.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, deep_arguments(100_000)), (CHAT, deep_arguments(998)), ("/v1/messages", deep_tool_use(998))],
)
def test_arguments_nested_too_deeply_are_refused_and_leave_no_traceback(
    target: Target, caplog: pytest.LogCaptureFixture, path: str, body: bytes
) -> None:
    reply = target.send(post(path, body)[1])

    assert reply is not None and reply.status == 400 and not reply.from_engine
    assert json.loads(reply.body)["error"]["message"] == "The request body is nested too deeply"
    assert not any(record.exc_info or record.levelname == "ERROR" for record in caplog.records)
