"""One client request on its way through an engine and back.

Nothing reaches the client before the engine's first body byte (streams) or whole reply (plain), so until then any
failure can be made good on another engine. Afterwards bytes pass as they come, and a broken stream ends with an error
event in OpenAI's shape and no [DONE].

Everything that ends a wait from outside (client gone, engine given up, deadline, shutdown) goes through `abort`, which
cancels this request's own task with a cause; the connection to the engine is closed in the same step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import msgspec

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.config.settings import LimitsConfig, TimeoutsConfig
from spillway_gateway.error_bodies import Dialect, body_of, event_of, headers_of
from spillway_gateway.errors import (
    EngineBadReply,
    EngineDisconnected,
    EngineEnding,
    EngineFailed,
    EngineFirstByteTimeout,
    EngineIdleTimeout,
    EngineRefused,
    EngineWentDown,
    GatewayError,
    ModelNotFound,
    NoEngineReady,
    UpstreamError,
)
from spillway_gateway.fleet.engines import Engine, Lease, ModelFleet, PromptBlocks
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.lifecycle import RunningRequest
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.connection import EngineConnection
from spillway_gateway.upstream.forward import Body, Headers, header, reply_headers, request_head
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.retry import (
    RETRYABLE_STATUSES,
    RetryBudget,
    failure_within,
    is_attempt,
    may_retry,
    plain_failure,
    stream_failure,
)
from spillway_gateway.upstream.sse import EventFramer, count_events, is_done, is_last_of_typed
from spillway_gateway.upstream.usage import ReplyUsage, Usage, merged, usage_in_events, usage_in_reply
from spillway_gateway.write_coalescing import TurnWrites

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
END_OF_REPLY_SECONDS_MAX = 1.0  # from [DONE] to the end of the engine's reply, whose connection may then be used again
BYTES_PER_TOKEN = 4  # of a long reply that does not say how many tokens it took
ERROR_REPLY_BYTES_MAX = 64 * 1024  # of a 5xx reply kept while another engine is tried; a longer one is not passed on


class Client(Protocol):
    """Who asks (client/connection.py)."""

    def call_when_left(self, left: Callable[[], None]) -> None: ...

    def forget(self, left: Callable[[], None]) -> None: ...

    def reply(self, status: int, headers: Headers, body: bytes) -> bool: ...


class AttemptTrace(Protocol):
    """The trace of one attempt (tracing/request_trace.py)."""

    headers: Headers

    def first_byte(self) -> None: ...

    def end(self, status: int, error: str | None) -> None: ...


class RequestTrace(Protocol):
    """The trace of one request (tracing/request_trace.py, which is imported only where traces are exported)."""

    def admitted(self, asked_ns: int) -> None: ...

    def routed(self, asked_ns: int, decision: Decision) -> None: ...

    def attempt(self, model: str, engine: Engine, headers: Headers, *, again: bool) -> AttemptTrace | None: ...


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class ClientStalled(ClientGone):
    """The client took no bytes for longer than the idle timeout."""


class EngineAnsweredError(UpstreamError):
    """The engine answered 502, 503 or 504: worth another engine, and passed on unchanged when there is none."""

    reason = "status"

    def __init__(self, engine: Engine, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"Engine {engine.name} answered {status}")
        self.status = status
        self.reply_headers = headers
        self.reply_body = body


class EngineErrorTooLong(UpstreamError):
    """The same with a body that is too long to keep; the client gets the status and the gateway's own words."""

    reason = "status"

    def __init__(self, engine: Engine, status: int) -> None:
        super().__init__(
            f"Engine {engine.name} answered {status} with a body of more than {ERROR_REPLY_BYTES_MAX} bytes"
        )
        self.status = status


@dataclass(slots=True)
class UpstreamServices:
    """What all requests share. running: requests here, which a shutdown may have to end. A new configuration replaces
    budget, timeouts and limits."""

    pool: ConnectionPool
    budget: RetryBudget
    metrics: GatewayMetrics
    timeouts: TimeoutsConfig
    limits: LimitsConfig
    running: set[RunningRequest]
    admissions: Mapping[str, Admission]  # by model
    recent: Recent


class OutboundRequest(msgspec.Struct, frozen=True):
    path: bytes
    headers: Headers  # the caller's
    body: Body
    request_id: bytes
    stream: bool
    prompt: PromptBlocks
    received_at: float  # perf_counter() when the body was whole; a loop's own clock may tick in milliseconds
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    method: bytes = b"POST"
    dialect: Dialect = Dialect.OPENAI
    retryable: bool = True
    only_engine: str | None = None  # it keeps what is asked for
    on_reply: Callable[[str, bytes], None] | None = None  # engine's name, and the reply or its first events
    trace: RequestTrace | None = None
    charged_tokens: int = 0  # of the tenant's limits, besides the prompt's
    on_end: Callable[[Usage], None] | None = None


class Relay:
    """One request. `run` answers the client in every case and leaves no count, timer or connection behind."""

    def __init__(
        self, request: OutboundRequest, fleet: ModelFleet, services: UpstreamServices, client: Client, send: Send
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._services = services
        self._client = client
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._turn = TurnWrites.here()
        self._task: asyncio.Task[Any] | None = None
        self._in_attempt = False
        self._cause: Exception | None = None
        self._client_gone = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._sending = False
        self._answered = False
        self.bytes_sent = False
        self._is_events = False
        self._framer = EventFramer()
        self._whole = False  # the reply's last event was passed on; what happens afterwards changes nothing
        self._failed = False  # the engine failed in words, within a stream
        self._overhead = 0.0
        self._dispatched = False
        self._decided: Lease | None = None
        self._last_chunk = b""
        self._events_sent = 0
        self._reply_bytes = 0  # of a plain reply that was too long to hold back
        self._usage: Usage | None = None
        self.status = 0  # 499: the client went away
        self.error_code: str | None = None  # of an error that the gateway itself answered
        self.first_byte_seconds: float | None = None  # since the request was read; streams only
        self._attempt_trace: AttemptTrace | None = None
        self._attempt_status = 0  # of the engine's reply
        self._connection: EngineConnection | None = None  # lent by the pool to the current attempt

    async def run(self) -> None:
        services = self._services
        self._task = asyncio.current_task()
        self._client.call_when_left(self._client_left)
        services.running.add(self)
        self._turn.requests += 1
        services.budget.earn()
        try:
            admission = services.admissions.get(self._fleet.name)
            if admission is None:
                raise ModelNotFound(f"The model {self._fleet.name!r} was removed a moment ago")
            await self._enter(admission)
            try:
                await self._attempts()
            finally:
                admission.leave()
        except ClientGone as gone:
            if self._whole and not isinstance(gone, ClientStalled):  # as SDKs do at [DONE], before the reply's own end
                return
            phase = "after_first_byte" if self.bytes_sent else "before_first_byte"
            services.metrics.disconnect(self._fleet.name, phase).inc()
            self.status = 499
            if isinstance(gone, ClientStalled):
                logger.warning("request %s: the client took no bytes and was let go", self._id())
        except GatewayError as error:
            await self._answer_error(error)
        finally:
            services.running.discard(self)
            self._turn.requests -= 1
            self._client.forget(self._client_left)
            if self._timer is not None:
                self._timer.cancel()
            self._count()

    def abort(self, cause: Exception) -> None:
        """End the current wait with `cause`; harmless when the request is not waiting for an engine any more."""
        if self._in_attempt and self._cause is None and self._task is not None and not self._answered:
            self._cause = cause
            self._task.cancel()

    def engine_went_down(self, engine: Engine) -> None:
        """The engine does not answer polls any more. Worth leaving only if nothing was sent and another is ready."""
        if not self.bytes_sent and any(other.routable for other in self._fleet.engines.values() if other is not engine):
            self.abort(EngineWentDown(f"Engine {engine.name} stopped answering"))

    def engine_ends(self, engine: Engine) -> None:
        self.abort(EngineEnding(f"Engine {engine.name} is shutting down, and this reply was not finished in time"))

    async def _enter(self, admission: Admission) -> None:
        """Wait until the engines have room; an abort ends the wait as it ends one for an engine."""
        if self._client_gone:
            raise ClientGone
        self._in_attempt = True
        trace = self._request.trace
        asked_ns = time.time_ns() if trace is not None else 0
        try:
            await admission.enter(self._request.tenant, self._request.priority)
        except asyncio.CancelledError:
            cause, self._cause = self._cause, None
            if cause is None or self._task is None:
                raise
            self._task.uncancel()
            raise cause from None
        finally:
            self._in_attempt = False
            if trace is not None:
                trace.admitted(asked_ns)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def _attempts(self) -> None:
        services = self._services
        tried: frozenset[str] = frozenset()
        attempts = 0
        failure: UpstreamError | None = None
        while True:
            if self._client_gone:
                raise ClientGone
            trace = self._request.trace
            asked_ns = time.time_ns() if trace is not None else 0
            try:
                lease = self._fleet.choose(self._request.prompt, tried, self._request.only_engine)
            except NoEngineReady:
                if failure is not None:
                    raise failure from None
                raise
            self._decided = lease
            services.recent.decided(self._fleet.name, self._request.request_id, lease.decision)
            if trace is not None:
                trace.routed(asked_ns, lease.decision)
                self._attempt_status = 0
                self._attempt_trace = trace.attempt(
                    self._fleet.name, lease.engine, self._request.headers, again=bool(tried)
                )
            try:
                await self._attempt(lease)
                lease.close(time.monotonic())
                self._end_attempt(None)
                return
            except UpstreamError as error:
                failure = error
                if type(error) in (EngineDisconnected, EngineBadReply):  # a connection does not know its engine
                    failure = type(error)(f"Engine {lease.engine.name} failed: {error.message}")
                    failure.__cause__ = error
                self._engine_failed(lease, error)
                self._end_attempt(error.reason)
            finally:
                lease.close()
                self._end_attempt("cancelled")  # the client left, or the gateway ends; nothing where it has ended
            tried |= {lease.engine.name}
            attempts += is_attempt(failure)
            movable = self._request.retryable and self._request.only_engine is None
            engines_left = any(engine.routable and name not in tried for name, engine in self._fleet.engines.items())
            again = may_retry(
                bytes_sent=self.bytes_sent,
                attempts=attempts,
                attempts_max=services.limits.attempts_max,
                engines_left=movable and engines_left,
            )
            if not again:
                raise failure
            if not services.budget.spend(failure):
                logger.warning("request %s: %s; the budget for retries is used up", self._id(), failure.message)
                raise failure
            services.metrics.retry(lease.engine.name, failure.reason).inc()
            logger.warning("request %s: %s; trying another engine", self._id(), failure.message)

    def _end_attempt(self, error: str | None) -> None:
        if self._attempt_trace is not None:
            self._attempt_trace.end(self._attempt_status, error)
            self._attempt_trace = None

    def _engine_failed(self, lease: Lease, error: UpstreamError) -> None:
        engine = lease.engine
        if not isinstance(error, EngineEnding):  # which is no fault of the engine
            lease.failed(time.monotonic())
        if isinstance(error, EngineRefused):
            engine.refused(error.message)
        elif not isinstance(error, (EngineAnsweredError, EngineErrorTooLong)):
            engine.poll_soon()
        if self.bytes_sent:
            self._services.metrics.broken(engine.name, error.reason).inc()

    async def _attempt(self, lease: Lease) -> None:
        engine = lease.engine
        self._in_attempt = True
        self._sending = False
        engine.waiting.add(self)
        engine.requests.add(self)
        assumed: asyncio.TimerHandle | None = None
        if not self._request.stream:
            assumed = self._loop.call_later(lease.expected_prefill_seconds, lease.prefill_assumed)
        try:
            await self._reply(lease, await self._exchange(engine))
        except asyncio.CancelledError:
            cause, self._cause = self._cause, None
            if cause is None or self._task is None:
                raise
            self._task.uncancel()
            raise cause from None
        finally:
            self._in_attempt = False
            if assumed is not None:
                assumed.cancel()
            engine.waiting.discard(self)
            engine.requests.discard(self)
            if self._connection is not None:
                self._services.pool.give_back(engine, self._connection)
                self._connection = None

    async def _exchange(self, engine: Engine) -> EngineConnection:
        """Send the request and wait for the reply's head. A reused connection that turns out closed is no failure of
        the engine: one fresh connection decides."""
        request = self._request
        pool = self._services.pool
        timeouts = self._services.timeouts
        head = request_head(
            engine.base_path.encode() + request.path,
            engine.host_header,
            request.headers if self._attempt_trace is None else self._attempt_trace.headers,
            len(request.body),
            request.request_id,
            method=request.method,
        )
        self._expect_within(timeouts.first_byte_seconds if request.stream else timeouts.plain_seconds)
        connection = pool.take_idle(engine)
        if connection is not None:
            self._connection = connection
            self._dispatch(connection, head)
            try:
                await connection.head()
                return connection
            except EngineDisconnected:
                if connection.got_bytes:
                    raise
                self._connection = None
                pool.give_back(engine, connection)
        connection = await pool.open(engine)
        self._connection = connection
        self._dispatch(connection, head)
        await connection.head()
        return connection

    def _dispatch(self, connection: EngineConnection, head: bytes) -> None:
        connection.send((head, self._request.body))
        if not self._dispatched:
            self._dispatched = True
            self._overhead += perf_counter() - self._request.received_at

    # -- reply -------------------------------------------------------------------------------------------------------

    async def _reply(self, lease: Lease, connection: EngineConnection) -> None:
        self._attempt_status = connection.status
        if connection.status in RETRYABLE_STATUSES:
            body = await self._collect(connection, ERROR_REPLY_BYTES_MAX)
            if not connection.complete:
                raise EngineErrorTooLong(lease.engine, connection.status)
            raise EngineAnsweredError(lease.engine, connection.status, connection.headers, body)
        content_type = header(connection.headers, b"content-type") or b""
        if content_type[:17].lower() == b"text/event-stream":
            self._is_events = True
            await self._relay_events(lease, connection)
        else:
            await self._relay_plain(lease, connection)

    async def _relay_events(self, lease: Lease, connection: EngineConnection) -> None:
        loop = self._loop
        metrics = self._services.metrics
        idle_seconds = self._services.timeouts.idle_seconds
        chunk = await self._next_events(connection)
        if (failure := stream_failure(chunk)) is not None:
            raise EngineFailed(f"Engine {lease.engine.name} failed: {failure}")
        now = perf_counter()
        lease.first_byte(time.monotonic(), measures_prefill=True)
        lease.began()
        lease.engine.waiting.discard(self)
        self.first_byte_seconds = now - self._request.received_at
        metrics.first_byte(self._fleet.name, lease.engine.name).observe(self.first_byte_seconds)
        self._services.recent.first_byte(self._fleet.name, lease.engine.name, self.first_byte_seconds)
        if self._attempt_trace is not None:
            self._attempt_trace.first_byte()
        self._expect_within(idle_seconds)
        headers = [
            pair
            for pair in reply_headers(connection.headers)
            if pair[0] not in (b"cache-control", b"x-accel-buffering", b"content-length")
        ]
        headers.append((b"cache-control", b"no-cache"))
        headers.append((b"x-accel-buffering", b"no"))
        self._overhead += perf_counter() - now
        if self._request.on_reply is not None and connection.status == 200:
            self._request.on_reply(lease.engine.name, chunk)
        await self._start(connection.status, headers, lease)
        while chunk:
            self.bytes_sent = True
            self._last_chunk = chunk
            if self._note_events(lease, chunk):
                await self._finish(chunk)
                self._answered = True
                await self._end_of_reply(connection)
                return
            self._sending = True
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sending = False
            self._deadline = loop.time() + idle_seconds
            chunk = await self._next_events(connection)
        if not self._failed and not self._whole:
            lease.succeeded()
        await self._finish(b"")

    async def _next_events(self, connection: EngineConnection) -> bytes:
        """Whole events; empty at the end of the stream."""
        while chunk := await connection.chunk():
            if events := self._framer.feed(chunk):
                return events
        return self._framer.rest()

    def _note_events(self, lease: Lease, events: bytes) -> bool:
        """What whole events say besides their text. True when nothing follows them."""
        self._events_sent += count_events(events)
        self._note_usage(lease, usage_in_events(events))
        if not self._failed and failure_within(events):
            self._failed = True
            lease.failed(time.monotonic())
        done = is_done(events)
        if done or (self._request.dialect is not Dialect.OPENAI and is_last_of_typed(events)):
            if not self._whole and not self._failed:
                lease.succeeded()
            self._whole = True
        return done

    async def _end_of_reply(self, connection: EngineConnection) -> None:
        """The client has all of it; a connection whose reply ended properly can be used again."""
        try:
            async with asyncio.timeout(END_OF_REPLY_SECONDS_MAX):
                while await connection.chunk():
                    pass
        except (TimeoutError, UpstreamError):
            pass  # it is closed instead

    async def _relay_plain(self, lease: Lease, connection: EngineConnection) -> None:
        buffer_bytes = self._services.limits.plain_reply_buffer_bytes
        body = await self._collect(connection, buffer_bytes)
        if self._attempt_trace is not None:
            self._attempt_trace.first_byte()
        if (failure := plain_failure(connection.status, body)) is not None:
            raise EngineFailed(f"Engine {lease.engine.name} failed: {failure}")
        now = perf_counter()
        lease.first_byte(time.monotonic(), measures_prefill=False)
        headers = reply_headers(connection.headers)
        self._overhead += perf_counter() - now
        if self._request.on_reply is not None and connection.status == 200:
            self._request.on_reply(lease.engine.name, body)
        if connection.complete:
            self._note_usage(lease, usage_in_reply(body))
            self._complete_headers(connection.status, headers, lease)
            if not self._client.reply(connection.status, headers, body):
                await self._send_head(connection.status, headers)
                self.bytes_sent = True
                await self._finish(body)
            self.bytes_sent = True
            self._plain_succeeded(lease, connection.status)
            return
        await self._start(connection.status, headers, lease)
        reader = ReplyUsage()
        while body:
            self.bytes_sent = True
            reader.feed(body)
            self._reply_bytes += len(body)
            self._sending = True
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._sending = False
            body = await connection.chunk()
        self._note_usage(lease, reader.told)
        self._plain_succeeded(lease, connection.status)
        await self._finish(b"")

    def _plain_succeeded(self, lease: Lease, status: int) -> None:
        if status < 500:  # else the request or the engine may be to blame
            lease.succeeded()

    async def _collect(self, connection: EngineConnection, bytes_max: int) -> bytes:
        """The whole body, or its start once it is longer than bytes_max."""
        body = await connection.chunk()
        if connection.complete:
            return body
        parts = [body]
        size = len(body)
        while size <= bytes_max and (part := await connection.chunk()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)

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
        headers.append((b"x-spillway-overhead-ms", b"%.3f" % (self._overhead * 1000)))
        if header(headers, b"x-request-id") is None:
            headers.append((b"x-request-id", self._request.request_id))

    async def _send_head(self, status: int, headers: Headers) -> None:
        self._sending = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self._sending = False

    async def _finish(self, body: bytes) -> None:
        self._sending = True  # a client that takes no more bytes now is no fault of the engine
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._sending = False

    async def _answer_error(self, error: GatewayError) -> None:
        self.error_code = None if isinstance(error, EngineAnsweredError) else error.code
        if self.bytes_sent:
            logger.warning("request %s: ended after the first byte: %s", self._id(), error.message)
            if self._whole:
                await self._finish(b"")
            elif self._is_events:
                event = event_of(
                    error,
                    self._request.dialect,
                    at_event_boundary=self._framer.at_boundary,
                    last_chunk=self._last_chunk,
                )
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
            # A plain reply that was too long to hold back stays incomplete; the server closes the connection, which
            # is the only way left to say so.
            return
        if isinstance(error, EngineAnsweredError):
            await self._start(error.status, reply_headers(error.reply_headers), self._decided)
            await self._send({"type": "http.response.body", "body": error.reply_body, "more_body": False})
            return
        logger.warning("request %s: answered %d: %s", self._id(), error.status, error.message)
        body = body_of(error, self._request.dialect)
        headers = [*headers_of(error), (b"content-length", str(len(body)).encode())]
        await self._start(error.status, headers, self._decided if isinstance(error, UpstreamError) else None)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    # -- waits -------------------------------------------------------------------------------------------------------

    def _client_left(self) -> None:
        self._client_gone = True
        self.abort(ClientGone())

    def _expect_within(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return  # fires early, sees the later deadline, and waits on
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
            return
        self._timer = None
        name = self._decided.engine.name if self._decided is not None else "?"
        timeouts = self._services.timeouts
        if self._sending:
            self.abort(ClientStalled())
        elif self.bytes_sent:
            self.abort(EngineIdleTimeout(f"Engine {name} sent nothing for {timeouts.idle_seconds:g} s"))
        else:
            seconds = timeouts.first_byte_seconds if self._request.stream else timeouts.plain_seconds
            self.abort(EngineFirstByteTimeout(f"Engine {name} sent no reply within {seconds:g} s"))

    # -- accounts ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self._fleet.name

    @property
    def lease(self) -> Lease | None:
        """Of the last engine tried."""
        return self._decided

    @property
    def overhead_seconds(self) -> float:
        return self._overhead

    @property
    def usage(self) -> Usage:
        """Token counts as the reply told them. A stream that tells none is counted by its events, which come one for
        each token or few, and a long plain reply by its bytes."""
        told = self._usage or Usage(None, None, None)
        if told.completion_tokens is None and self._is_events:
            return told._replace(completion_tokens=self._events_sent)
        if self._usage is None and self._reply_bytes:
            return told._replace(completion_tokens=self._reply_bytes // BYTES_PER_TOKEN)
        return told

    def _note_usage(self, lease: Lease, told: Usage | None) -> None:
        if told is None:
            return
        before = self._usage
        told = merged(before, told)
        assert told is not None
        self._usage = told
        if told.cached_tokens is not None and (before is None or before.cached_tokens is None):
            metrics = self._services.metrics
            metrics.predicted_tokens(self._fleet.name).inc(lease.decision.held.total_tokens)
            metrics.actual_tokens(self._fleet.name).inc(told.cached_tokens)

    def _count(self) -> None:
        metrics = self._services.metrics
        lease = self._decided
        engine = lease.engine.name if lease is not None else "none"
        route = lease.decision.reason.value if lease is not None else "none"
        status = f"{self.status // 100}xx" if self.status else "aborted"
        metrics.request(self._fleet.name, engine, route, status).inc()
        metrics.overhead(self._fleet.name).observe(self._overhead)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: model %s engine %s route %s status %d overhead %.3f ms",
                self._id(),
                self._fleet.name,
                engine,
                route,
                self.status,
                self._overhead * 1000,
            )

    def _id(self) -> str:
        return self._request.request_id.decode("latin-1")
