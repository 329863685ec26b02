"""Replies that something between compresses, although engines are asked for identity."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.access.keys import hash_key
from spillway_gateway.errors import EngineBadReply
from spillway_gateway.testing.running import running_gateway
from spillway_gateway.upstream.content_encoding import PIECE_BYTES_MAX, inflater_of

KEY = "sk-a" + "0" * 40
ENCODE: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "X-GZIP": gzip.compress, "deflate": zlib.compress}


def inflated(encoding: bytes, parts: list[bytes]) -> bytes:
    inflater = inflater_of([encoding])
    assert inflater is not None
    whole = b""
    for part in parts:
        inflater.feed(part)
        while inflater.pending:
            whole += inflater.more()
    inflater.end()
    return whole


@given(st.binary(max_size=2_000), st.lists(st.integers(0, 2_000), max_size=4), st.sampled_from(sorted(ENCODE)))
def test_a_body_is_what_it_was_wherever_it_is_cut(body: bytes, cuts: list[int], encoding: str) -> None:
    packed = ENCODE[encoding](body)
    ends = sorted({min(cut, len(packed)) for cut in cuts})
    parts = [packed[start:end] for start, end in zip([0, *ends], [*ends, len(packed)], strict=True)]

    assert inflated(encoding.encode(), parts) == body


PACKED = gzip.compress(b"x", mtime=0)  # the same in each process, as names of tests have to be


@pytest.mark.parametrize("broken", [b"no gzip", PACKED[:-1], PACKED + b"more"])
def test_a_broken_body_is_named(broken: bytes) -> None:
    with pytest.raises(EngineBadReply):
        inflated(b"gzip", [broken])


@pytest.mark.parametrize("encodings", [[b"br"], [b"zstd"], [b"gzip, gzip"], [b"gzip", b"br"], [b"\xff"]])
def test_what_cannot_be_read_is_refused(encodings: list[bytes]) -> None:
    with pytest.raises(EngineBadReply):
        inflater_of(encodings)


@pytest.mark.parametrize("encodings", [[], [b""], [b"identity"], [b"Identity", b" identity , "]])
def test_identity_needs_nothing(encodings: list[bytes]) -> None:
    assert inflater_of(encodings) is None


def test_a_few_bytes_that_become_many_are_given_in_pieces() -> None:
    inflater = inflater_of([b"gzip"])
    assert inflater is not None
    inflater.feed(gzip.compress(bytes(64 * 1024 * 1024)))
    tracemalloc.start()
    try:
        while inflater.pending:
            assert len(inflater.more()) <= PIECE_BYTES_MAX
        assert tracemalloc.get_traced_memory()[1] < 16 * PIECE_BYTES_MAX
    finally:
        tracemalloc.stop()


Reply = Callable[[asyncio.StreamWriter], Any]


@asynccontextmanager
async def raw_engine(reply: Reply) -> AsyncIterator[str]:
    """Answers polls, and each other request by `reply`, which closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                models = json.dumps({"data": [{"id": "fake", "max_model_len": 4_096}]}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models)
                )
            else:
                await reply(writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_read_and_events_come_one_by_one(tmp_path: Path, stream: bool) -> None:
    """A tenant's limit holds, and each event reaches the client before the engine sends the next one."""
    read = asyncio.Event()
    usage = {"usage": {"prompt_tokens": 10, "completion_tokens": 500}}

    async def reply(writer: asyncio.StreamWriter) -> None:
        if not stream:
            body = gzip.compress(json.dumps(usage).encode())
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            return
        packer = zlib.compressobj(wbits=31)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n\r\n")
        for event in (b'data: {"n":1}\n\n', b"data: " + json.dumps(usage).encode() + b"\n\n"):
            writer.write(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH))
            await writer.drain()
            await read.wait()
        writer.write(packer.compress(b"data: [DONE]\n\n") + packer.flush())

    tenants = {"tenants": [{"name": "a", "keys": [hash_key(KEY)], "tokensPerMinute": 1_000}]}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(tenants))
    (tmp_path / "salt").write_text("s" * 32)
    auth = {"keysFile": str(tmp_path / "keys.yaml"), "saltSecretFile": str(tmp_path / "salt")}
    async with raw_engine(reply) as url, aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
        model = {"name": "fake", "engines": [{"name": "e", "url": url}]}
        async with running_gateway({"models": [model], "auth": auth}) as gateway:
            statuses = []
            for _ in range(3):
                read.clear()
                body = {"model": "fake", "prompt": "x", "stream": stream}
                async with http.post(gateway.url + "/v1/completions", json=body) as answer:
                    statuses.append(answer.status)
                    assert "content-encoding" not in answer.headers
                    if stream and answer.status == 200:
                        assert await answer.content.readuntil(b"\n\n") == b'data: {"n":1}\n\n'
                    read.set()
                    assert answer.status != 200 or b"500" in await answer.read()
    assert statuses == [200, 200, 429]


async def test_an_encoding_that_cannot_be_read_is_an_error_of_the_engine() -> None:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\nxx")

    async with raw_engine(reply) as url, aiohttp.ClientSession() as http:
        model = {"name": "fake", "engines": [{"name": "e", "url": url}]}
        async with (
            running_gateway({"models": [model]}) as gateway,
            http.post(gateway.url + "/v1/completions", json={"model": "fake", "prompt": "x"}) as answer,
        ):
            assert (answer.status, (await answer.json())["error"]["code"]) == (502, "engine_bad_reply")
