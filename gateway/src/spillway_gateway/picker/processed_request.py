"""One request that a proxy processes with the gateway's help: both a client and a connection to an engine.

The proxy sends the request's headers and body, and gets back the request as the engine is to receive it, with the
engine's address; then it sends the reply's headers and body, and gets back the reply as the client is to receive it.
Bodies pass both ways as they come, or the proxy keeps them until they are answered (body_modes.py). An answer of the
gateway itself, an error for example, is an immediate response. When the client leaves, or the engine breaks off, the
proxy ends the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from spillway_gateway.client.body_budget import BodyBudgetSpent
from spillway_gateway.client.connection import EXTENSION
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.errors import EngineBadReply, RequestTooLarge
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.picker import mutations
from spillway_gateway.picker.body_modes import BodyModes
from spillway_gateway.picker.chunk_answers import Answer, ChunkAnswers
from spillway_gateway.picker.grpc_call import MessageTooLong
from spillway_gateway.upstream.exchange import ClientDisconnected
from spillway_gateway.upstream.forward import Body, Headers, header

# Bounds on a plain reply or an event that the proxy keeps; beyond them it passes on as it comes: Envoy tells of
# trailers, and so of the reply's end, once the bytes before them are answered.
KEPT_SILENT_SECONDS = 1.0
KEPT_REPLY_BYTES_MAX = 256 * 1024  # of a plain reply that is collected: Envoy keeps it within its own buffer's limit
Message = MutableMapping[str, Any]


class Proxy(Protocol):
    """The stream of messages of one request.

    Attributes:
        failure: with which the stream ends, once the request has; to the request it is as if the client had left.
    """

    failure: Exception | None

    async def read(self) -> Any:
        """The proxy's next message; None after the last one. Raises BodyBudgetSpent."""

    def take(self) -> Any:
        """Return the proxy's next message if it has arrived; else None."""

    def refuse(self, kind: str) -> None:
        """End the stream with an error: the message that came last is not due."""

    def begin_reply(self) -> None:
        """The proxy's further messages are the engine's reply."""

    async def write(self, message: bytes) -> None: ...


class ProcessedRequest:
    """The client of a request, as ClientRequest is of a connection to the gateway. Used on the event loop, by the task
    that serves the request.

    Args:
        proxy: the stream.
        opening: its first message, with the request's headers.
        modes: which bodies the proxy keeps.
        open_connections: the budgets for bodies and replies.
        body_bytes_max: limits.bodyBytesMax.
    """

    def __init__(
        self, proxy: Proxy, opening: Any, modes: BodyModes, open_connections: OpenConnections, body_bytes_max: int
    ) -> None:
        self._proxy = proxy
        self._modes = modes
        self._open_connections = open_connections
        self._body_bytes_max = body_bytes_max
        self._given = mutations.headers_of(opening.request_headers.headers)
        self._read = opening.request_headers.end_of_stream
        self._reserved_bytes = 0
        self._body_seconds: float | None = None
        self.body_timed_out = False
        self._on_disconnect: Callable[[], None] | None = None
        self._lost = False
        subset = mutations.subset_of(opening)
        self.engine_connections = EngineSide(proxy, self._given, subset, modes, bodiless=self._read)
        self._start: Message | None = None
        self._head_sent = False
        self._own_body = bytearray()  # of an immediate response
        self._answered = False

    def scope(self) -> MutableMapping[str, Any]:
        """The request's ASGI scope."""
        method, path, query, headers = mutations.request_scope(self._given)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {},
            "extensions": {EXTENSION: self},
        }

    def disconnect(self) -> None:
        """Note that the proxy has ended the stream."""
        self._lost = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    # -- ASGI --------------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Receive what has arrived of the request's body, at least its next part."""
        if self._lost:
            return {"type": "http.disconnect"}
        if self._modes.keeps_request and not self._read:
            return await self._receive_whole()
        parts: list[bytes] = []
        while not self._read and (message := self._proxy.take()) is not None:
            if not self._take_part(message, parts):
                return {"type": "http.disconnect"}
        if not self._read and not parts:
            try:
                async with asyncio.timeout(self._body_seconds):
                    message = await self._proxy.read()
            except TimeoutError:
                self.body_timed_out = True
                return {"type": "http.request", "body": b"", "more_body": True}
            if message is None or not self._take_part(message, parts):
                return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"".join(parts), "more_body": not self._read}

    async def _receive_whole(self) -> Message:
        """The whole body, within the time that its bytes may take on a connection of a client."""
        await self._proxy.write(mutations.body_wanted())
        try:
            async with asyncio.timeout(self._whole_body_seconds()):
                message = await self._proxy.read()
        except TimeoutError:
            self.body_timed_out = True
            return {"type": "http.request", "body": b"", "more_body": True}
        if isinstance(self._proxy.failure, MessageTooLong):
            self._proxy.failure = None
            raise RequestTooLarge("The request body is larger than the gateway's limits.bodyBytesMax")
        parts: list[bytes] = []
        if message is None or not self._take_part(message, parts):
            return {"type": "http.disconnect"}
        self._read = True  # also if trailers follow: those come after the answer
        body = self.engine_connections.given_body = b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": False}

    def _whole_body_seconds(self) -> float | None:
        """Return the seconds that a whole body may take, by its length: no part of it arrives before its end."""
        declared = header(self._given, b"content-length") or b""
        size = min(int(declared), self._body_bytes_max) if declared.isdigit() else self._body_bytes_max
        waits = self._body_seconds
        return None if waits is None else waits + size / self._open_connections.bounds.body_bytes_per_second_min

    def _take_part(self, message: Any, parts: list[bytes]) -> bool:
        """Take a message. Returns whether it was due."""
        kind = message.WhichOneof("kind")
        if kind == "request_body":
            parts.append(message.request_body.body)
            self._read = message.request_body.end_of_stream
        elif kind == "request_trailers":
            self._read = True
            self.engine_connections.request_trailers = mutations.headers_of(message.request_trailers.trailers)
        else:
            self._proxy.refuse(kind)
            return False
        return True

    async def send(self, message: Message) -> None:
        """Send a message of the reply. Those after its end, or after the proxy has ended the stream, are dropped."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._lost or self._answered or self._start is None:
            return
        body, self._answered = message.get("body", b""), not message.get("more_body", False)
        status, headers = self._start["status"], list(self._start["headers"])
        engine = self.engine_connections
        if engine.reply_given is None:
            self._own_body += body
            if self._answered:
                await self._proxy.write(mutations.immediate(status, headers, bytes(self._own_body)))
            return
        if engine.kept_reply is not None:
            await self._answer_chunks(engine.reply_given, engine.kept_reply, status, headers, body)
            return
        if not self._head_sent:
            if engine.reply_bodiless and body:  # an answer of the gateway in place of the engine's
                await self._proxy.write(mutations.immediate(status, headers, body))
                return
            self._head_sent = True
            await self._proxy.write(mutations.reply_to_client(engine.reply_given, status, headers))
        if engine.reply_bodiless:
            return
        for piece in mutations.reply_body_pieces(body, last=self._answered and engine.trailers is None):
            await self._proxy.write(piece)
        if self._answered and engine.trailers is not None:
            await self._proxy.write(mutations.without_reply_trailers(engine.trailers))

    async def _answer_chunks(
        self, given: Headers, chunks: ChunkAnswers, status: int, headers: Headers, body: bytes
    ) -> None:
        """Send a part of a reply whose chunks the proxy keeps."""
        proxy, engine = self._proxy, self.engine_connections
        if not self._head_sent:
            if self._answered and not chunks.is_kept(body):  # an answer of the gateway in place of the engine's
                await proxy.write(mutations.immediate(status, headers, body))
                return
            self._head_sent = True
            await proxy.write(mutations.reply_to_client(given, status, headers))
        await engine.answer(chunks.pass_on(body))
        if not self._answered:
            return
        await engine.answer(chunks.end())
        if chunks.unanswerable:  # why the reply ends early. The proxy has begun it, so it breaks it off
            await proxy.write(mutations.immediate(status, headers, b""))
        elif engine.trailers is not None:
            await proxy.write(mutations.without_reply_trailers(engine.trailers))
        else:
            engine.answered = True

    # -- the client --------------------------------------------------------------------------------------------------

    def take_whole_body(self) -> bytes | None:
        """Return None: the body comes in parts."""
        return None

    def expect_body(self, seconds: float) -> None:
        """Bound each wait for a part of the body from now on."""
        self._body_seconds = seconds

    def forget_given_body(self) -> None:
        """Drop the given body: the engine gets another one."""
        self.engine_connections.given_body = None

    def check_body_budget(self, body_bytes: int) -> None:
        """Raises BodyBudgetSpent if a body of that size would exceed the budget now."""
        self._open_connections.body_budget.check(body_bytes, body_bytes)

    def reserve_body_bytes(self, more_bytes: int) -> None:
        """Reserve bytes until the request ends. Raises BodyBudgetSpent."""
        reserved = self._reserved_bytes + more_bytes
        self._open_connections.body_budget.reserve(more_bytes, reserved)
        self._reserved_bytes = reserved

    def release_body_bytes(self) -> None:
        self._open_connections.body_budget.release(self._reserved_bytes)
        self._reserved_bytes = 0

    def end_with_reply(self) -> None:
        """Do nothing: the client's connection is the proxy's."""

    def take_reply_bytes(self, more_bytes: int) -> bool:
        """Count bytes of a reply that is collected, until give_reply_bytes(). Returns False if the budget is full."""
        kept = self.engine_connections.kept_reply
        self.engine_connections.collected = kept is not None
        if kept is not None and kept.kept_bytes > KEPT_REPLY_BYTES_MAX:
            return False
        return self._open_connections.reply_budget.take(more_bytes)

    def give_reply_bytes(self, taken_bytes: int) -> None:
        self.engine_connections.collected = False
        self._open_connections.reply_budget.hold(-taken_bytes)

    def set_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._on_disconnect = callback
        if self._lost:
            asyncio.get_running_loop().call_soon(self.disconnect)

    def clear_disconnect_callback(self, callback: Callable[[], None]) -> None:
        self._on_disconnect = None

    @property
    def writable(self) -> bool:
        """A comment of the gateway cannot begin a reply, whose head is the engine's, nor be the answer to a chunk."""
        return self._head_sent and not self._answered and not self._lost and not self._modes.keeps_reply

    def reply(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole reply as messages."""
        return False


class EngineSide:
    """The connection to the request's engine, which the proxy opens. As the only one, it is all connections too.

    Attributes:
        reply_given: the headers of the engine's reply, as the proxy has them; None before.
        reply_bodiless: it ended with them: the proxy takes no answer to a body that it did not send.
        request_trailers: the request's trailers, for whose answer the proxy waits; None if it has none.
        trailers: the reply's trailers, as the proxy has them; None if it has none, or not yet.
        answered: the client has the whole reply; only trailers may follow.
        given_body: the request's body, if the proxy keeps it and the engine gets it as it is.
        kept_reply: the reply, if the proxy keeps its chunks.
        collected: its chunks are to be passed on together; silence ends that, and never a reply that passes on already.
    """

    reach_another = False  # what the proxy does if the engine fails is its own configuration

    def __init__(
        self, proxy: Proxy, given: Headers, subset: frozenset[str] | None, modes: BodyModes, *, bodiless: bool
    ) -> None:
        self._proxy = proxy
        self._given = given
        self._subset = subset
        self._bodiless = bodiless
        self._destination = ""
        self._outgoing: Sequence[Body] = ()
        self._read = False
        self.reply_given: Headers | None = None
        self.reply_bodiless = False
        self.request_trailers: Headers | None = None
        self.trailers: Headers | None = None
        self.answered = False
        self._keeps_request = modes.keeps_request and not bodiless
        self.given_body: bytes | None = None
        self.kept_reply = ChunkAnswers() if modes.keeps_reply else None
        self.collected = False
        self.status = 0
        self.headers: Headers = []

    # -- upstream.connections.Connections ------------------------------------------------------------------------------

    def unreachable(self, engines: Mapping[str, Engine]) -> frozenset[str]:
        """The engines that the proxy does not accept."""
        if self._subset is None:
            return frozenset()
        return frozenset(name for name, engine in engines.items() if _address(engine) not in self._subset)

    def take_idle(self, engine: Engine) -> EngineSide:
        self._destination = _address(engine)
        return self

    async def open(self, engine: Engine) -> EngineSide:
        return self.take_idle(engine)

    def release(self, engine: Engine, connection: EngineSide) -> None:
        """Do nothing: the proxy closes the connection with the stream."""

    # -- upstream.connections.Connection -------------------------------------------------------------------------------

    @property
    def got_bytes(self) -> bool:
        """The request is not sent again in any case."""
        return True

    @property
    def complete(self) -> bool:
        return self._read

    @property
    def passes_on_seconds(self) -> float | None:
        return None if self.kept_reply is None else KEPT_SILENT_SECONDS

    def send(self, parts: Sequence[Body]) -> None:
        self._outgoing = parts

    async def head(self) -> None:
        """Give the proxy the request for the engine, and wait for the reply's head."""
        head, body = self._outgoing
        self._outgoing = ()
        self._proxy.begin_reply()
        given_body, self.given_body = self.given_body, None
        if self._keeps_request:
            changed = None if body is given_body else body
            await self._proxy.write(
                mutations.whole_request_to_engine(self._given, bytes(head), self._destination, changed)
            )
        else:
            await self._proxy.write(mutations.request_to_engine(self._given, bytes(head), self._destination))
            for piece in (
                () if self._bodiless else mutations.request_body_pieces(body, last=self.request_trailers is None)
            ):
                await self._proxy.write(piece)
            if self.request_trailers is not None:
                await self._proxy.write(mutations.without_request_trailers(self.request_trailers))
        kinds = ("response_headers", "request_trailers")[: 1 + self._keeps_request]
        while (message := await self._next(*kinds)).WhichOneof("kind") == "request_trailers":
            trailers = mutations.headers_of(message.request_trailers.trailers)
            await self._proxy.write(mutations.without_request_trailers(trailers))
        given = mutations.headers_of(message.response_headers.headers)
        status = header(given, b":status") or b""
        if not status.isdigit() or not 200 <= int(status) < 600:
            raise EngineBadReply(f"the engine's reply has the status {status[:20]!r}, which HTTP does not have")
        encoding = header(given, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise EngineBadReply(f"the engine's reply has the content-encoding {encoding[:20]!r}; none was asked for")
        self._read = self.reply_bodiless = message.response_headers.end_of_stream
        self.status = int(status)
        self.headers = [pair for pair in given if not pair[0].startswith(b":")]
        self.reply_given = given

    async def chunk(self) -> bytes:
        while not self._read:
            waits = self.kept_reply is not None and self.collected and self.kept_reply.kept_bytes > 0
            try:
                async with asyncio.timeout(KEPT_SILENT_SECONDS if waits else None):
                    message = await self._next("response_body", "response_trailers")
            except TimeoutError:
                self.collected = False
                return b""  # not complete: what is here passes on
            if message.WhichOneof("kind") == "response_trailers":
                self._read, self.trailers = True, mutations.headers_of(message.response_trailers.trailers)
                if self.answered:
                    await self._proxy.write(mutations.without_reply_trailers(self.trailers))
                break
            self._read = message.response_body.end_of_stream
            body: bytes = message.response_body.body
            if self.kept_reply is not None:
                await self.answer(self.kept_reply.take(body, last=self._read))
            if body:
                return body
        return b""

    async def answer(self, answers: Sequence[Answer]) -> None:
        """Send answers to chunks of the reply."""
        for each in answers:
            await self._proxy.write(mutations.chunk_answer(each))

    async def _next(self, *kinds: str) -> Any:
        """Return the next message, which has to be of one of these kinds. Raises ClientDisconnected."""
        try:
            message = await self._proxy.read()
        except BodyBudgetSpent as spent:  # the reply has begun, so there is no other one
            self._proxy.failure = spent
            raise ClientDisconnected from spent
        if message is not None and message.WhichOneof("kind") not in kinds:
            self._proxy.refuse(message.WhichOneof("kind"))
            message = None
        if message is None:  # the client left, or the engine broke off: the proxy does not say which
            raise ClientDisconnected
        return message


def _address(engine: Engine) -> str:
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    return f"{host}:{engine.port}"
