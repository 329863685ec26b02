"""An engine's reply on its way to the client: server-sent events as they come, a plain reply whole, an error in the
dialect of the route.

Nothing reaches the client before the engine's first body byte (streams) or whole reply (plain), so until then the
request can be retried on another engine. A stream that breaks afterwards is continued by another engine where that is
possible, and ends with an error event and no [DONE] where it is not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from time import perf_counter

from spillway_gateway.error_bodies import Dialect, body_of, event_of, headers_of
from spillway_gateway.errors import EngineDisconnected, EngineFailed, GatewayError, UpstreamError
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import Lease
from spillway_gateway.upstream.adapter_refusals import REFUSED, require_adapter
from spillway_gateway.upstream.connection import EngineConnection
from spillway_gateway.upstream.continuing import Continuing
from spillway_gateway.upstream.forward import Headers, header, reply_headers
from spillway_gateway.upstream.outbound import AttemptTrace, Client, OutboundRequest, Send, UpstreamServices
from spillway_gateway.upstream.reading import HeldBytes, collect, next_events, read_to_end
from spillway_gateway.upstream.reply_counts import ReplyCounts
from spillway_gateway.upstream.retry import RETRYABLE_STATUSES, failure_within, plain_failure, stream_failure
from spillway_gateway.upstream.sse import EVENT_BYTES_MAX, EventFramer, is_done, is_last_of_typed
from spillway_gateway.upstream.usage import Usage
from spillway_gateway.upstream.waits import RequestWaits

logger = logging.getLogger(__name__)

ERROR_REPLY_BYTES_MAX = 64 * 1024  # of a retryable error reply kept while another engine is tried
IDS_BYTES_MAX = 48  # of an event for each token that its prompt is estimated to have


class EngineAnsweredError(UpstreamError):
    """The engine answered 502, 503 or 504. Retried; passed on unchanged where no other engine is left."""

    reason = "status"

    def __init__(self, engine: Engine, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"Engine {engine.name} answered {status}")
        self.status = status
        self.reply_headers = headers
        self.reply_body = body


class EngineErrorTooLong(UpstreamError):
    """The same with a body of more than ERROR_REPLY_BYTES_MAX: the client gets the status and the gateway's message."""

    reason = "status"

    def __init__(self, engine: Engine, status: int) -> None:
        super().__init__(
            f"Engine {engine.name} answered {status} with a body of more than {ERROR_REPLY_BYTES_MAX} bytes"
        )
        self.status = status


class Reply:
    """Of one request, over all its attempts.

    status: sent to the client; 499 where it disconnected first, 0 where nothing was sent. error_code: of an error that
    the gateway itself answered. first_byte_seconds: since the request was received; streams only. overhead_seconds: the
    gateway's own work so far. ended: the last event was passed on, and a failure afterwards changes nothing.
    continuing: of an answer that another engine may continue, else None.
    """

    __slots__ = (
        "_client",
        "_engine_failed",
        "_framer",
        "_last_chunk",
        "_model",
        "_request",
        "_send",
        "_services",
        "_waits",
        "continuing",
        "counts",
        "ended",
        "error_code",
        "first_byte_seconds",
        "overhead_seconds",
        "status",
    )

    def __init__(
        self,
        request: OutboundRequest,
        services: UpstreamServices,
        waits: RequestWaits,
        client: Client,
        send: Send,
        *,
        model: str,
        continuing: Continuing | None = None,
    ) -> None:
        self.continuing = continuing
        self._request = request
        self._model = model
        self._services = services
        self._waits = waits
        self._client = client
        self._send = send
        self._framer: EventFramer | None = None  # of a reply that is a stream of events
        self._engine_failed = False  # the stream held an error event of the engine
        self._last_chunk = b""
        self.counts = ReplyCounts(request)
        self.ended = False
        self.status = 0
        self.error_code: str | None = None
        self.first_byte_seconds: float | None = None
        self.overhead_seconds = 0.0

    async def relay(self, lease: Lease, connection: EngineConnection, trace: AttemptTrace | None) -> None:
        """Pass on a reply whose head has arrived. Raises UpstreamError for a failure of the engine; until
        waits.bytes_sent is set it may be retried."""
        self._framer, self.counts.streams = None, False
        if connection.status in RETRYABLE_STATUSES:
            body = await collect(connection, ERROR_REPLY_BYTES_MAX)
            if not connection.complete:
                raise EngineErrorTooLong(lease.engine, connection.status)
            raise EngineAnsweredError(lease.engine, connection.status, connection.headers, body)
        content_type = header(connection.headers, b"content-type") or b""
        if content_type[:17].lower() == b"text/event-stream":
            await self._relay_events(lease, connection, trace)
        else:
            await self._relay_plain(lease, connection, trace)

    # -- events ------------------------------------------------------------------------------------------------------

    async def _relay_events(self, lease: Lease, connection: EngineConnection, trace: AttemptTrace | None) -> None:
        waits, send, continuing = self._waits, self._send, self.continuing
        self.counts.streams = True
        framer = self._framer = EventFramer()
        if continuing is not None:
            framer = self._framer = EventFramer(EVENT_BYTES_MAX + IDS_BYTES_MAX * self._request.prompt.prompt_tokens)
        chunk = await next_events(connection, framer)
        if (failure := stream_failure(chunk)) is not None:
            raise EngineFailed(f"Engine {lease.engine.name} failed: {failure}")
        idle_seconds = self._services.timeouts.idle_seconds
        await self._start_events(lease, connection, chunk, idle_seconds, trace)
        loop_time = asyncio.get_running_loop().time
        if continuing is not None and connection.status == 200:
            waits.movable = lambda: continuing.possible(lease.engine)
            waits.stall_seconds = idle_seconds = min(idle_seconds, continuing.stall_seconds)
            waits.expect_within(idle_seconds)  # sooner than the timer would look at a deadline
        while chunk:
            waits.bytes_sent = True
            if continuing is not None:
                chunk = await self._without_ids(lease, continuing, chunk)
            self._last_chunk = chunk
            if self._read_events(lease, chunk):
                await self._finish(chunk)
                waits.answered = True
                await read_to_end(connection)
                return
            if chunk:
                waits.sending = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                waits.sending = False
            waits.deadline = loop_time() + idle_seconds
            chunk = await next_events(connection, framer)
        if not self._engine_failed and not self.ended:
            if continuing is not None and continuing.possible(lease.engine):
                raise EngineDisconnected("it ended the reply early")
            lease.succeeded()
        await self._finish(b"")

    async def _without_ids(self, lease: Lease, continuing: Continuing, events: bytes) -> bytes:
        """The events as the client gets them. Raises EngineFailed where the engine reports a failure that another one
        can make good; what comes before it has then been sent."""
        sent = continuing.sent
        passed = sent.take(events)
        if sent.failure is None:
            return passed
        failure, held = sent.failure, sent.held
        if not continuing.possible(lease.engine):
            sent.lose("failed")
            sent.failure = None
            return passed + held
        sent.failure = None
        if passed:
            self._read_events(lease, passed)
            await self._send({"type": "http.response.body", "body": passed, "more_body": True})
        raise EngineFailed(f"Engine {lease.engine.name} failed: {failure}")

    async def relay_continued(self, lease: Lease, connection: EngineConnection, trace: AttemptTrace | None) -> None:
        """Pass on the rest of an answer, of which the client has the beginning. Raises UpstreamError."""
        waits, continuing, name = self._waits, self.continuing, lease.engine.name
        assert continuing is not None and continuing.events is not None
        answer = continuing.events
        content_type = header(connection.headers, b"content-type") or b""
        if self._request.adapter is not None and connection.status in REFUSED:
            body = await collect(connection, ERROR_REPLY_BYTES_MAX)
            require_adapter(lease.engine, self._request.adapter, connection.status, body)
        if connection.status != 200 or content_type[:17].lower() != b"text/event-stream":
            raise EngineFailed(f"Engine {name} answered {connection.status} to a continuation")
        framer = self._framer = EventFramer(EVENT_BYTES_MAX + IDS_BYTES_MAX * self._request.prompt.prompt_tokens)
        events = await next_events(connection, framer)
        loop_time = asyncio.get_running_loop().time
        while events:
            try:
                passed = answer.take(events)
            except ValueError as error:
                raise EngineFailed(f"Engine {name} continued with what is no chunk: {error}") from error
            if continuing.failed_at is not None and answer.failure is None:
                self._resumed(lease, continuing, loop_time() - continuing.failed_at, trace)
            cached_tokens = answer.cached_tokens if answer.done else None
            self.counts.continued(passed, Usage(continuing.sent.prompt_tokens, answer.tokens, cached_tokens))
            if answer.done:
                lease.succeeded()
                self.ended = True
                await self._finish(passed)
                waits.answered = True
                await read_to_end(connection)
                return
            if passed:
                waits.sending = True
                await self._send({"type": "http.response.body", "body": passed, "more_body": True})
                waits.sending = False
            if answer.failure is not None:
                raise EngineFailed(f"Engine {name} failed: {answer.failure}")
            waits.deadline = loop_time() + waits.stall_seconds
            events = await next_events(connection, framer)
        raise EngineDisconnected("it ended the reply early")

    def _resumed(self, lease: Lease, continuing: Continuing, seconds: float, trace: AttemptTrace | None) -> None:
        """The first events of an engine that continues have come. seconds: since the other's failure."""
        lease.accepted(time.monotonic())
        lease.first_byte(time.monotonic(), measures_prefill=True)
        lease.began()
        if trace is not None:
            trace.first_byte()
        failure, continuing.failed_at = continuing.failure, None
        assert failure is not None
        self._waits.joining_seconds = 0.0
        self._waits.expect_within(self._waits.stall_seconds)
        self._waits.movable = lambda: continuing.possible(lease.engine)
        services = self._services
        services.metrics.continued(self._model, failure.reason).inc()
        services.metrics.pause(self._model).observe(seconds)
        services.recent.continued(self._model, seconds)

    async def complete(self) -> None:
        """End an answer whose engine failed after the last token."""
        continuing = self.continuing
        assert continuing is not None
        events = continuing.last_events()
        self.counts.continued(b"", Usage(continuing.sent.prompt_tokens, len(continuing.sent.tokens), None))
        self.ended = True
        await self._finish(events)
        self._waits.answered = True

    async def _start_events(
        self,
        lease: Lease,
        connection: EngineConnection,
        first_events: bytes,
        idle_seconds: float,
        trace: AttemptTrace | None,
    ) -> None:
        """Account for the first byte, and send the head."""
        services, engine = self._services, lease.engine
        now = perf_counter()
        if connection.status < 300:
            lease.accepted(time.monotonic())
        lease.first_byte(time.monotonic(), measures_prefill=True)
        lease.began()
        self.first_byte_seconds = now - self._request.received_at
        services.metrics.first_byte(self._model, engine.name).observe(self.first_byte_seconds)
        services.recent.first_byte(self._model, engine.name, self.first_byte_seconds)
        if trace is not None:
            trace.first_byte()
        self._waits.expect_within(idle_seconds)
        headers = [
            pair
            for pair in reply_headers(connection.headers)
            if pair[0] not in (b"cache-control", b"x-accel-buffering", b"content-length")
        ]
        headers.append((b"cache-control", b"no-cache"))
        headers.append((b"x-accel-buffering", b"no"))
        self.overhead_seconds += perf_counter() - now
        if self._request.on_reply is not None and connection.status == 200:
            self._request.on_reply(engine.name, first_events)
        await self._start(connection.status, headers, lease)

    def _read_events(self, lease: Lease, events: bytes) -> bool:
        """Take usage, errors and the end out of whole events. True when nothing follows them."""
        self.counts.read_events(lease.engine, events)
        if not self._engine_failed and failure_within(events):
            self._engine_failed = True
            lease.failed(time.monotonic())
        done = is_done(events)
        if done or (self._request.dialect is not Dialect.OPENAI and is_last_of_typed(events)):
            if not self.ended and not self._engine_failed:
                lease.succeeded()
            self.ended = True
        return done

    # -- plain -------------------------------------------------------------------------------------------------------

    async def _relay_plain(self, lease: Lease, connection: EngineConnection, trace: AttemptTrace | None) -> None:
        held = HeldBytes(self._client)
        try:
            await self._collect_plain(lease, connection, trace, held)
        finally:
            held.give_back()

    async def _collect_plain(
        self, lease: Lease, connection: EngineConnection, trace: AttemptTrace | None, held: HeldBytes
    ) -> None:
        waits = self._waits
        body = await collect(connection, self._services.limits.plain_reply_buffer_bytes, held)
        if trace is not None:
            trace.first_byte()
        status = connection.status
        if (failure := plain_failure(status, body)) is not None:
            raise EngineFailed(f"Engine {lease.engine.name} failed: {failure}")
        require_adapter(lease.engine, self._request.adapter, status, body)
        now = perf_counter()
        if status < 300:
            lease.accepted(time.monotonic())
        lease.first_byte(time.monotonic(), measures_prefill=False)
        headers = reply_headers(connection.headers)
        self.overhead_seconds += perf_counter() - now
        if self._request.on_reply is not None and status == 200:
            self._request.on_reply(lease.engine.name, body)
        if connection.complete:
            if status == 200:
                self.counts.read_plain(lease.engine, body)
            self._complete_headers(status, headers, lease)
            if not self._client.reply(status, headers, body):
                await self._send_head(status, headers)
                waits.bytes_sent = True
                await self._finish(body)
            waits.bytes_sent = True
            _plain_succeeded(lease, status)
            return
        await self._start(status, headers, lease)
        held.give_back()  # from here on the client's own connection counts
        while body:
            waits.bytes_sent = True
            self.counts.read_part(lease.engine, body)
            waits.sending = True
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            waits.sending = False
            body = await connection.chunk()
        _plain_succeeded(lease, status)
        await self._finish(b"")

    # -- to the client -----------------------------------------------------------------------------------------------

    async def _start(self, status: int, headers: Headers, lease: Lease | None) -> None:
        self._complete_headers(status, headers, lease)
        await self._send_head(status, headers)

    def _complete_headers(self, status: int, headers: Headers, lease: Lease | None) -> None:
        self.status = status
        if lease is not None:
            decision = lease.decision
            headers.append((b"x-spillway-engine", lease.engine.name.encode()))
            headers.append((b"x-spillway-route", decision.reason.value.encode()))
            headers.append((b"x-spillway-prefix-tokens", str(decision.held.total_tokens).encode()))
        headers.append((b"x-spillway-overhead-ms", b"%.3f" % (self.overhead_seconds * 1000)))
        if header(headers, b"x-request-id") is None:
            headers.append((b"x-request-id", self._request.request_id))

    async def _send_head(self, status: int, headers: Headers) -> None:
        waits = self._waits
        waits.sending = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        waits.sending = False

    async def _finish(self, body: bytes) -> None:
        waits = self._waits
        waits.sending = True  # a client that stops reading here is no failure of the engine
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        waits.sending = False

    async def answer_error(self, error: GatewayError, lease: Lease | None) -> None:
        """Answer a request that failed for good: with an error body, or an error event where a stream has begun."""
        request_id = self._request.request_id.decode("latin-1")
        self.error_code = None if isinstance(error, EngineAnsweredError) else error.code
        if self._waits.bytes_sent:
            logger.warning("request %s: ended after the first byte: %s", request_id, error.message)
            if self.ended:
                await self._finish(b"")
            elif self._framer is not None:
                event = event_of(
                    error,
                    self._request.dialect,
                    at_event_boundary=self._framer.at_boundary,
                    last_chunk=self._last_chunk,
                )
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
            # A plain reply that was too long to be held back stays incomplete. The server closes the connection, which
            # is all that tells the client.
            return
        if isinstance(error, EngineAnsweredError):
            await self._start(error.status, reply_headers(error.reply_headers), lease)
            await self._send({"type": "http.response.body", "body": error.reply_body, "more_body": False})
            return
        logger.warning("request %s: answered %d: %s", request_id, error.status, error.message)
        body = body_of(error, self._request.dialect)
        headers = [*headers_of(error), (b"content-length", str(len(body)).encode())]
        await self._start(error.status, headers, lease if isinstance(error, UpstreamError) else None)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    # -- usage -------------------------------------------------------------------------------------------------------

    def count_cached(self, lease: Lease | None) -> None:
        """Once, at the end: what routing expected to be cached and what the engine reports.

        vLLM leaves the number out where it is 0, as an engine that is not to report it does always.
        """
        usage = self.counts.reported
        if lease is None or usage is None or usage.prompt_tokens is None:
            return
        engine = lease.engine
        cached = usage.cached_tokens
        if cached:
            engine.reports_cached_tokens = True
        elif not engine.reports_cached_tokens:
            return
        metrics, held = self._services.metrics, lease.decision.held
        metrics.predicted_tokens(self._model, "device").inc(held.device_tokens)
        metrics.predicted_tokens(self._model, "cpu").inc(held.cpu_tokens)
        metrics.predicted_tokens(self._model, "shared").inc(held.shared_tokens)
        metrics.actual_tokens(self._model).inc(cached or 0)
        self._services.recent.reported(self._model, held.total_tokens, cached or 0)


def _plain_succeeded(lease: Lease, status: int) -> None:
    if status < 500:  # a 5xx may be the fault of the request or of the engine
        lease.succeeded()
