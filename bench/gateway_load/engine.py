"""Mock engines with little work per request: four ports, one process, no HTTP library.

    python -m gateway_load.engine --ports 8001,8002 --tokenizer FOLDER --chunks 32 --chunk-seconds 0.02

Answers chat completions plain, and streamed with one event per token and a pause between two; /tokenize and
.../render as vLLM does, but with a made-up id for each BYTES_PER_TOKEN of a long body: prompts that begin alike have
ids that begin alike, and tokenising, which a real engine would do on its own machine, is not measured here. Every other
GET is a 200, as probes need it. It reads only what the routers under test send: one request at a time on a
connection, its body with a length or in chunks. It stays apart from the gateway's fake engine, which takes 280 us of
CPU time for a plain answer where this one takes 14, and would be the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from pathlib import Path

import uvloop

from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt, render_and_encode
from spillway_gateway.tokens.tokenizer import PromptTokenizer

LONG_BODY_BYTES = 700  # above the gateway's own probe, whose ids must be true
BYTES_PER_TOKEN = 4
PROMPT_TOKENS = 600  # as reported
VOCABULARY = 49_152
_PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


def _reply(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


_USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 32, "total_tokens": PROMPT_TOKENS + 32}
_ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * 32, "tool_calls": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
}
PLAIN = _reply(_json(_ANSWER))
MODELS = _reply(_json({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}]}))
EMPTY = _reply(b"{}")
PAGE = _reply(_PAGE, b"text/plain; version=0.0.4")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(content: str, finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": finish}
    document = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + _json(document) + b"\n\n"


EVENT = _chunk(_event(" word", None))
STREAM_END = _chunk(_event("", "stop")) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. chunks: events of a stream before its last; pause_seconds: between two."""

    def __init__(self, tokenizer: PromptTokenizer, chunks: int, pause_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokenizer = tokenizer
        self._chunks = chunks
        self._pause = pause_seconds
        self._left = 0
        self._got = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        got = self._got + data if self._got else data
        end = got.find(b"\r\n\r\n")
        if end < 0:
            self._got = got
            return
        head = got[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            stop = head.find(b"\r\n", at)
            length = int(head[at + 15 : stop if stop >= 0 else end])
            whole = len(got) >= end + 4 + length
        else:
            whole = b"transfer-encoding: chunked" not in head or got.endswith(b"0\r\n\r\n")
        if not whole:
            self._got = got
            return
        self._got = b""
        self._answer(got[: got.index(b" ", 5)], got[end + 4 :])

    def _answer(self, line: bytes, body: bytes) -> None:
        write = self._transport.write
        if line == b"POST /v1/chat/completions":
            if b'"stream":true' in body or b'"stream": true' in body:
                write(STREAM_HEAD)
                self._left = self._chunks
                self._next()
            else:
                write(PLAIN)
        elif line == b"POST /tokenize":
            write(self._tokens(body))
        elif line.endswith(b"/render"):
            write(_reply(_json({"token_ids": _made_up(body), "model": "m"})))
        elif line == b"GET /v1/models":
            write(MODELS)
        elif line == b"GET /metrics":
            write(PAGE)
        elif line == b"GET /ready":
            write(_reply(b"{}", status=b"404 Not Found"))
        else:
            write(EMPTY)

    def _next(self) -> None:
        if not self._left:
            self._transport.write(STREAM_END)
            return
        self._transport.write(EVENT)
        self._left -= 1
        self._timer = self._loop.call_later(self._pause, self._next)

    def _tokens(self, body: bytes) -> bytes:
        if len(body) > LONG_BODY_BYTES:
            tokens = _made_up(body)
        else:
            asked = json.loads(body)
            prompt = ChatPrompt(asked["messages"]) if "messages" in asked else CompletionPrompt(asked["prompt"])
            tokens = list(render_and_encode(self._tokenizer, prompt))
        return _reply(_json({"count": len(tokens), "max_model_len": 8192, "tokens": tokens, "token_strs": None}))


def _made_up(body: bytes) -> list[int]:
    whole = len(body) // BYTES_PER_TOKEN * BYTES_PER_TOKEN
    return [word % VOCABULARY for word in memoryview(body)[:whole].cast("I")]


async def _serve(given: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    tokenizer = PromptTokenizer.load(given.tokenizer)
    for port in given.ports:
        await loop.create_server(
            lambda: Engine(tokenizer, given.chunks, given.chunk_seconds), "127.0.0.1", port, backlog=4096
        )
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="gateway_load.engine")
    parser.add_argument("--ports", type=lambda text: [int(port) for port in text.split(",")], required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--chunk-seconds", type=float, default=0.02)
    given = parser.parse_args()
    gc.disable()
    uvloop.run(_serve(given))


if __name__ == "__main__":
    main()
