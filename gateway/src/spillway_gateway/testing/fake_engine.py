"""An OpenAI-speaking engine on loopback, without a model or a model of time: real HTTP, real KV events, faults by name.

Its answer is a function of the prompt, so that a test recognises a wrong or torn one, or what the test scripts. Prefix
caching is real in miniature: blocks of prompt tokens are kept and announced, and usage reports how many tokens were
found. spillway_simulator is for what depends on rates, queues and tiers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from spillway_gateway.testing.fake_documents import (
    POOLING_PATHS,
    completion_events,
    completion_reply,
    completion_usage,
    error_document,
    messages_events,
    messages_reply,
    pooling_reply,
    response_document,
    response_events,
    untyped_event,
)
from spillway_gateway.testing.faults import (
    DieInStream,
    ErrorInStream,
    Fault,
    Hang,
    HeadThenDie,
    HoldInStream,
    Slow,
    Status,
)
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_settings.wire import HAND_OVER_MEMBER, PROMOTE_PATH

Tokenize = Callable[[dict[str, Any]], list[int]]
Detokenize = Callable[[list[int]], str]


def byte_tokens(body: dict[str, Any]) -> list[int]:
    """One token per byte of the prompt; a stand-in for a model's tokenizer."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return [token for one in prompt for token in ([one] if isinstance(one, int) else byte_tokens({"prompt": one}))]
    if isinstance(prompt, str):
        return list(prompt.encode())
    given = body.get("input", body.get("query", body.get("text_1")))
    if isinstance(given, (str, list)):
        return list(json.dumps(given).encode())
    messages = body.get("messages") or []
    if messages and isinstance(messages[0], list):
        messages = messages[0]
    text = "".join(f"<{message.get('role')}>{message.get('content')}" for message in messages)
    return list(text.encode())


@dataclass
class Seen:
    """One request as the engine saw it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # the gateway closed the connection first


@dataclass
class Scripted:
    """A reply in place of the engine's own: `document` to a plain request, or `text` in its place; `events`, then
    [DONE], to one that streams. Faults apply to it."""

    document: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200  # of the document
    text: bytes | None = None


Script = Callable[[str, dict[str, Any]], Scripted | None]  # of path and body; None: the engine's own reply


class FakeEngine:
    """Serves from start() to stop(). Attributes may be changed while it runs.

    name_header: the header of each reply that holds the name. resolvable: adapters that it loads when a request names
    them, with whether the load succeeds. models_key: the key that /v1/models needs.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        adapters: Sequence[str] = (),
        name: str = "fake-0",
        max_model_len: int = 100_000,
        block_tokens: int = 16,
        tokenize: Tokenize = byte_tokens,
        detokenize: Detokenize = lambda tokens: bytes(tokens).decode(),
        words: int = 4,
        publisher: KvPublisher | None = None,
        ready_route: bool = True,
        tokenize_route: bool = True,
        record: bool = True,
        script: Script | None = None,
        name_header: str = "x-fake-engine",
    ) -> None:
        self.model = model
        self.adapters = tuple(adapters)
        self.resolvable: dict[str, bool] = {}
        self.models_key: str | None = None
        self.version: str | None = "0.23.0"
        self.name, self.max_model_len, self.block_tokens = name, max_model_len, block_tokens
        self.tokenize = tokenize
        self.detokenize = detokenize
        self.words = words
        self.publisher = publisher
        self.ready_route = ready_route
        self.tokenize_route = tokenize_route
        self.script = script
        self.name_header = name_header
        self.pages: dict[str, bytes] = {}  # further GET routes: path -> body
        self.ready: tuple[int, dict[str, Any]] = (200, {"ready": True})
        self.health_status = 200
        self.fault: Fault | None = None
        self.store: str | None = None  # in which it announces the prompts that are handed over
        self.hint_status: Callable[[Seen], int] = lambda seen: 202  # of the answer to a promotion hint
        self.write_bytes: int | None = None  # streams are written in pieces of so many bytes; None: event by event
        self.end_seconds = 0.0  # between [DONE] and the end of a stream
        self.seen: list[Seen] = []
        self.record = record
        self.connections: set[_Connection] = set()
        self.port = 0
        self.cached: dict[bytes, int] = {}  # chain digest of a block -> its engine key
        self.responses: dict[str, dict[str, Any]] = {}  # stored by id
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        """Accept no new connections, as a failing network would. Open ones go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def stop(self) -> None:
        """Stop like a killed process: connections break, and the port refuses."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.kill()
        await asyncio.sleep(0)

    # -- answers -----------------------------------------------------------------------------------------------------

    def words_for(self, tokens: list[int]) -> list[str]:
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
        return [f" {digest[at % 56 : at % 56 + 6]}" for at in range(self.words)]

    def response_id(self, tokens: list[int]) -> str:
        return f"resp_{self.name}_{hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]}"

    def announce_stored(self, store: str) -> None:
        """All blocks so far lie in this store, and it loads from there. store: as in KV events."""
        if self.publisher is not None:
            self.publisher.stored(list(self.cached.values()), None, [], 0, medium=store)

    def prefill(self, tokens: list[int], salt: str | None = None, model: str | None = None) -> int:
        """Keep and announce the prompt's full blocks; returns how many tokens were found. model: as the request names
        it; an adapter has blocks of its own."""
        adapter = model if model in self.adapters else None
        digest = hashlib.sha256(repr((adapter, salt)).encode()).digest()
        found = 0
        parent: int | None = None
        still_cached = True
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = tokens[start : start + self.block_tokens]
            digest = hashlib.sha256(digest + repr(block).encode()).digest()
            known = self.cached.get(digest)
            if known is not None and still_cached:
                found += self.block_tokens
            else:
                still_cached = False
                self.cached[digest] = known = int.from_bytes(digest[-8:], "big")
                if self.publisher is not None:
                    extra = [name for name in (adapter, salt if start == 0 else None) if name is not None]
                    keys = [extra or None]
                    self.publisher.stored([known], parent, block, self.block_tokens, lora_name=adapter, extra_keys=keys)
            parent = known
        return min(found, max(0, len(tokens) - 1))


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport
        self._parser: httptools.HttpRequestParser
        self._task: asyncio.Task[None] | None = None
        self._current: Seen | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self.engine.connections.add(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._url = b""
        self._body = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        if self._current is not None:
            self._current.cancelled.set()
        if self._task is not None:
            self._task.cancel()

    def kill(self) -> None:
        self._current = None
        self.transport.abort()

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers, self._url, self._body = [], b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.decode()
        if self._parser.get_method() == b"GET":
            self._get(path)
            return
        seen = Seen(path, self._headers, self._body)
        if self.engine.record:
            self.engine.seen.append(seen)
        self._current = seen
        fault = self.engine.fault
        if isinstance(fault, Status):
            failure = error_document(f"fault: {fault.status}", fault.status, fault.kind)
            self._json(fault.status, failure if fault.status >= 400 else {})
            return
        if path.startswith("/v1/audio/"):
            self._json(200, {"text": f"{len(seen.body)} bytes received", "usage": {"type": "duration", "seconds": 1}})
            return
        try:
            body = json.loads(seen.body or b"{}")
        except ValueError:
            self._json(400, error_document("not JSON", 400))
            return
        if path == PROMOTE_PATH:
            self._json(self.engine.hint_status(seen), {})
        elif path == "/tokenize" and not self.engine.tokenize_route:
            self._json(404, {"detail": "Not Found"})
        elif path == "/tokenize":
            tokens = self.engine.tokenize(body)
            self._json(200, {"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens})
        elif path == "/detokenize":
            self._json(200, {"prompt": self.engine.detokenize(body["tokens"])})
        elif path.endswith("/count_tokens"):
            self._json(200, {"input_tokens": len(self.engine.tokenize(body))})
        elif path.startswith("/v1/responses/"):
            self._stored(path.removesuffix("/cancel"))
        elif fault is None and not body.get("stream"):
            self._plain(path, body)
        else:
            self._task = asyncio.get_running_loop().create_task(self._infer(path, body, fault))

    # -- replies -----------------------------------------------------------------------------------------------------

    def _get(self, path: str) -> None:
        if path in self.engine.pages:
            self._write(200, self.engine.pages[path], b"text/plain")
        elif path == "/health":
            self._write(self.engine.health_status, b"", b"application/json")
        elif path == "/ready" and self.engine.ready_route:
            self._json(*self.engine.ready)
        elif path == "/version" and self.engine.version is not None:
            self._json(200, {"version": self.engine.version})
        elif path == "/v1/models" and not self._may_list():
            self._json(401, {"error": "Unauthorized"})
        elif path == "/v1/models":
            card = {"id": self.engine.model, "object": "model", "created": 1, "owned_by": "fake"}
            adapters = [{**card, "id": name, "parent": self.engine.model} for name in self.engine.adapters]
            data = [{**card, "max_model_len": self.engine.max_model_len}, *adapters]
            self._json(200, {"object": "list", "data": data})
        elif path.startswith("/v1/responses/"):
            self._stored(path.partition("?")[0])
        else:
            self._json(404, {"detail": "Not Found"})

    def _may_list(self) -> bool:
        key = self.engine.models_key
        return key is None or (b"authorization", f"Bearer {key}".encode()) in self._headers

    def _stored(self, path: str) -> None:
        stored = self.engine.responses.get(path.rpartition("/")[2])
        if stored is None:
            self._json(404, error_document("no such response", 404))
        else:
            self._json(200, stored)

    def _name_line(self) -> bytes:
        return f"{self.engine.name_header}: {self.engine.name}".encode()

    def _json(self, status: int, document: object) -> None:
        self._write(status, json.dumps(document).encode(), b"application/json")

    def _write(self, status: int, body: bytes, content_type: bytes) -> None:
        self._current = None
        self.transport.write(
            b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n\r\n%s"
            % (status, content_type, len(body), self._name_line(), body)
        )

    def _refusal(self, body: dict[str, Any], tokens: list[int]) -> tuple[int, object] | None:
        name = body.get("model")
        if name in self.engine.resolvable and name not in self.engine.adapters:
            if not self.engine.resolvable[name]:
                return 400, error_document(f"LoRA adapter '{name}' was found but could not be loaded.", 400)
            self.engine.adapters += (name,)
        if name not in (None, self.engine.model, *self.engine.adapters):
            return 404, error_document(f"The model `{body.get('model')}` does not exist.", 404)
        if len(tokens) > self.engine.max_model_len:
            return 400, error_document(f"maximum context length is {self.engine.max_model_len} tokens", 400)
        return None

    def _plain(self, path: str, body: dict[str, Any]) -> None:
        scripted = self.engine.script(path, body) if self.engine.script is not None else None
        if scripted is not None:
            whole = json.dumps(scripted.document).encode()
            self._write(scripted.status, whole if scripted.text is None else scripted.text, b"application/json")
            return
        tokens = self.engine.tokenize(body)
        refusal = self._refusal(body, tokens)
        if refusal is not None:
            self._json(*refusal)
            return
        cached = self.engine.prefill(tokens, body.get("cache_salt"), body.get("model"))
        if self.engine.store is not None and HAND_OVER_MEMBER in (body.get("kv_transfer_params") or {}):
            self.engine.announce_stored(self.engine.store)
        text = "".join(self.engine.words_for(tokens))
        if path in POOLING_PATHS:
            self._json(200, pooling_reply(path, body, self.engine.model, len(tokens)))
            return
        if path == "/v1/messages":
            self._json(200, messages_reply(text, self.engine.model, self._typed_usage(tokens)))
            return
        if path == "/v1/responses":
            name = self.engine.response_id(tokens)
            document = response_document(name, text, self.engine.model, self._typed_usage(tokens))
            self.engine.responses[name] = document
            self._json(200, document)
            return
        usage = completion_usage(len(tokens), self.engine.words, cached)
        self._json(200, completion_reply(path, text, self.engine.model, usage))

    def _typed_usage(self, tokens: list[int]) -> dict[str, int]:
        return {
            "input_tokens": len(tokens),
            "output_tokens": self.engine.words,
            "total_tokens": len(tokens) + self.engine.words,
        }

    async def _infer(self, path: str, body: dict[str, Any], fault: Fault | None) -> None:
        if isinstance(fault, Hang):
            await asyncio.get_running_loop().create_future()
        if isinstance(fault, HoldInStream) and fault.after_chunks == 0:
            await fault.release.wait()
        if isinstance(fault, Slow):
            await asyncio.sleep(fault.first_byte_seconds)
        tokens = self.engine.tokenize(body)
        refusal = self._refusal(body, tokens)
        if refusal is not None:
            self._json(*refusal)
            return
        if not body.get("stream"):
            if isinstance(fault, (DieInStream, HeadThenDie)):
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
                self.transport.write(head + b"{")
                self.kill()
                return
            self._plain(path, body)
            return
        await self._stream(path, body, tokens, fault)

    async def _stream(self, path: str, body: dict[str, Any], tokens: list[int], fault: Fault | None) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
            b"%s\r\n\r\n" % self._name_line()
        )
        if isinstance(fault, HeadThenDie):
            await asyncio.sleep(0.01)  # the head travels alone
            self.kill()
            return
        for sent, event in enumerate(self._events(path, body, tokens)):
            if isinstance(fault, DieInStream) and sent == fault.after_chunks:
                if fault.inside:
                    self._chunk(event[: len(event) // 2])
                await asyncio.sleep(0.01)
                self.kill()
                return
            if isinstance(fault, ErrorInStream) and sent == fault.after_chunks:
                await self._write_event(untyped_event(error_document("EngineCore died", 500)))
                break
            if isinstance(fault, HoldInStream) and sent == fault.after_chunks:
                await fault.release.wait()
            await self._write_event(event)
            await asyncio.sleep(fault.between_chunks_seconds if isinstance(fault, Slow) else 0)
        if path not in ("/v1/messages", "/v1/responses"):
            await self._write_event(b"data: [DONE]\n\n")
        if self.engine.end_seconds:
            await asyncio.sleep(self.engine.end_seconds)
        self._current = None
        self.transport.write(b"0\r\n\r\n")

    def _events(self, path: str, body: dict[str, Any], tokens: list[int]) -> list[bytes]:
        scripted = self.engine.script(path, body) if self.engine.script is not None else None
        if scripted is not None:
            return [untyped_event(document) for document in scripted.events]
        cached = self.engine.prefill(tokens, body.get("cache_salt"), body.get("model"))
        if path == "/v1/messages":
            return messages_events(self.engine.words_for(tokens), self.engine.model, self._typed_usage(tokens))
        if path == "/v1/responses":
            name = self.engine.response_id(tokens)
            words, usage = self.engine.words_for(tokens), self._typed_usage(tokens)
            self.engine.responses[name] = response_document(name, "".join(words), self.engine.model, usage)
            return response_events(name, words, self.engine.model, usage)
        usage = completion_usage(len(tokens), self.engine.words, cached)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return completion_events(path, self.engine.words_for(tokens), self.engine.model, usage, with_usage=with_usage)

    async def _write_event(self, event: bytes) -> None:
        size = self.engine.write_bytes or len(event)
        for start in range(0, len(event), size):
            if start:
                await asyncio.sleep(0)  # so that the reader sees a read of its own
            self._chunk(event[start : start + size])

    def _chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))
