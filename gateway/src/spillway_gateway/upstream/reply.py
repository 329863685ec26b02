"""An engine's reply on its way to the client: server-sent events (stream_relay.py), a plain reply whole, an error in
the dialect of the route.

Nothing of an answer reaches the client before its first part (streams) or the whole reply (plain), so until then the
request can be retried on another engine. A stream that breaks afterwards is continued by another engine if that is
possible; otherwise it ends with an error event and no [DONE].

A stream that waits gets comments meanwhile (keep_alive.py). The first one begins the reply with status 200, and an
error behind it is an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from time import perf_counter

from spillway_gateway.error_bodies import body_of, event_of, event_of_reply, headers_of
from spillway_gateway.errors import EngineFailed, GatewayError, UpstreamError, engine_failure
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.routing.fleet_view import TierLabel
from spillway_gateway.upstream.adapter_refusals import require_adapter
from spillway_gateway.upstream.answers import EDGE_BYTES, gives_up, is_cut, is_cut_inside, plain_failure
from spillway_gateway.upstream.connections import Connection
from spillway_gateway.upstream.continuation.continuing import Continuing
from spillway_gateway.upstream.exchange import Exchange, Step
from spillway_gateway.upstream.forward import Headers, header, reply_headers
from spillway_gateway.upstream.keep_alive import COMMENT, KeepAlive
from spillway_gateway.upstream.outbound import AttemptTrace, Client, OutboundRequest, UpstreamServices
from spillway_gateway.upstream.reading import ERROR_REPLY_BYTES_MAX, HeldBytes, collect
from spillway_gateway.upstream.reply_counts import ReplyCounts
from spillway_gateway.upstream.retry import RETRYABLE_STATUSES
from spillway_gateway.upstream.router import Attempt
from spillway_gateway.upstream.stream_relay import EVENT_STREAM, StreamRelay, is_event_stream
from spillway_settings.wire import ENGINE_HEADER, OVERHEAD_HEADER, PREFIX_TOKENS_HEADER, ROUTE_HEADER

logger = logging.getLogger(__name__)

_ENGINE, _ROUTE = ENGINE_HEADER.encode(), ROUTE_HEADER.encode()
_PREFIX_TOKENS, _OVERHEAD = PREFIX_TOKENS_HEADER.encode(), OVERHEAD_HEADER.encode()
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_EARLY = ((b"content-type", EVENT_STREAM + b"; charset=utf-8"),)


class EngineAnsweredError(UpstreamError):
    """The engine answered 502, 503 or 504. Retried; passed on unchanged if no other engine is left."""

    reason = "status"

    def __init__(self, engine: Engine, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"Engine {engine.name} answered {status}")
        self.status = status
        self.reply_headers = headers
        self.reply_body = body


class EngineErrorTooLong(UpstreamError):
    """The same with a body of more than ERROR_REPLY_BYTES_MAX, or one whose end does not come while a proxy keeps it:
    the client gets the status and the gateway's message."""

    reason = "status"

    def __init__(self, engine: Engine, status: int) -> None:
        super().__init__(
            f"Engine {engine.name} answered {status} with a body of more than {ERROR_REPLY_BYTES_MAX} bytes, or "
            "without an end"
        )
        self.status = status


class Reply:
    """The reply to one request, over all its attempts.

    status: sent to the client; 499 if it disconnected first, 0 if nothing was sent. error_code: of an error that
    the gateway itself answered. overhead_seconds: the gateway's own work so far. stream: the part of it that is a
    stream of events.
    """

    __slots__ = (
        "_client",
        "_comments_over",
        "_exchange",
        "_head_sent",
        "_keep_alive",
        "_model",
        "_request",
        "_services",
        "_silent_task",
        "counts",
        "error_code",
        "overhead_seconds",
        "status",
        "stream",
    )

    def __init__(
        self,
        request: OutboundRequest,
        services: UpstreamServices,
        exchange: Exchange,
        client: Client,
        *,
        model: str,
        continuing: Continuing | None = None,
    ) -> None:
        self._request = request
        self._model = model
        self._services = services
        self._exchange = exchange
        self._client = client
        self.counts = ReplyCounts(request)
        self._head_sent = False
        self._comments_over = False
        self._silent_task: asyncio.Task[None] | None = None
        self._keep_alive: KeepAlive | None = None
        if request.stream:
            self._keep_alive = KeepAlive(services.live.timeouts.keep_alive_seconds, self._is_silent)
        self.stream = StreamRelay(self, request, services, exchange, self.counts, model=model, continuing=continuing)
        self.status = 0
        self.error_code: str | None = None
        self.overhead_seconds = 0.0

    def add_overhead(self, seconds: float) -> None:
        self.overhead_seconds += seconds

    def abandon(self, attempt: Attempt | None, seconds: float) -> None:
        """The client has left. seconds: since the attempt's engine was chosen."""
        if attempt is not None:
            self.counts.abandoned(attempt.engine, seconds)
        self.status = 499

    def close(self) -> None:
        """The request has ended."""
        self._comments_over = True
        if self._keep_alive is not None:
            self._keep_alive.close()
        self.stream.close()

    async def relay(self, attempt: Attempt, connection: Connection, trace: AttemptTrace | None) -> None:
        """Pass on a reply whose head has arrived. Raises UpstreamError for a failure of the engine; until the exchange
        is committed it may be retried."""
        self.stream.reset()
        retryable, streams = connection.status in RETRYABLE_STATUSES, is_event_stream(connection)
        self.counts.begin_attempt(streams=streams and not retryable)
        if retryable:
            held = HeldBytes(self._client)
            try:
                body = await collect(connection, ERROR_REPLY_BYTES_MAX, held)
            finally:
                held.give_back()
            if not connection.complete:
                raise EngineErrorTooLong(attempt.engine, connection.status)
            if (failure := plain_failure(connection.status, body, self._request.dialect)) is not None:
                raise engine_failure(attempt.engine.name, failure)
            raise EngineAnsweredError(attempt.engine, connection.status, connection.headers, body)
        if streams:
            await self.stream.relay(attempt, connection, trace)
        else:
            await self._relay_plain(attempt, connection, trace)

    # -- a stream's ---------------------------------------------------------------------------------------------------

    async def start_events(self, status: int, headers: Headers, attempt: Attempt) -> None:
        """Send the head of a stream, unless a comment has."""
        if not self._head_sent:
            await self._start(status, [*headers, *_UNBUFFERED], attempt)

    async def pass_events(self, events: bytes) -> None:
        await self._exchange.send({"type": "http.response.body", "body": events, "more_body": True})
        if self._keep_alive is not None:
            self._keep_alive.sent()

    async def comment(self, comment: bytes) -> None:
        """Send a comment to the client of a stream, and before it the head if none was sent: with status 200, and
        without what is not known yet."""
        if not self._head_sent:
            await self._start(200, [*_EARLY, *_UNBUFFERED], None)
        await self.pass_events(comment)

    def _is_silent(self) -> None:
        """The client has got nothing for the time of the keep-alive."""
        if self._may_comment():
            self._silent_task = asyncio.get_running_loop().create_task(self._comment_on_silence())

    async def _comment_on_silence(self) -> None:
        """Send a comment, which does not wait, as the client takes bytes. So no other write of this reply comes
        between."""
        if self._may_comment():
            await self.comment(COMMENT)

    def _may_comment(self) -> bool:
        """Whether a comment may be sent: the stream is between two events, and its client reads."""
        exchange = self._exchange
        between = self.stream.at_boundary or not exchange.committed
        return between and not self._comments_over and not exchange.sending and self._client.writable

    # -- plain -------------------------------------------------------------------------------------------------------

    async def _relay_plain(self, attempt: Attempt, connection: Connection, trace: AttemptTrace | None) -> None:
        held = HeldBytes(self._client)
        try:
            await self._collect_plain(attempt, connection, trace, held)
        finally:
            held.give_back()

    async def _collect_plain(
        self, attempt: Attempt, connection: Connection, trace: AttemptTrace | None, held: HeldBytes
    ) -> None:
        body = await collect(connection, self._services.live.limits.plain_reply_buffer_bytes, held)
        if trace is not None:
            trace.first_byte()
        status, dialect = connection.status, self._request.dialect
        judged = self._request.computes and _is_json(connection)  # not what was computed before
        if (status == 500 or judged) and (failure := plain_failure(status, body, dialect)) is not None:
            raise engine_failure(attempt.engine.name, failure)
        judged = judged and status == 200
        if judged and connection.complete and is_cut_inside(body):
            raise EngineFailed(f"Engine {attempt.engine.name} failed: its reply is no whole JSON document")
        require_adapter(attempt.engine, self._request.adapter, status, body)
        now = perf_counter()
        if status < 300:
            attempt.accepted(time.monotonic())
        attempt.first_byte(time.monotonic(), measures_prefill=False)
        headers = reply_headers(connection.headers)
        self.overhead_seconds += perf_counter() - now
        if self._request.on_reply is not None and status == 200:
            self._request.on_reply(attempt.engine.name, body)
        if self._head_sent:  # a comment has begun a stream
            await self._answer_in_events(connection, body)
            _plain_succeeded(attempt, status)
            return
        if connection.complete:
            if status == 200:
                self.counts.read_plain(attempt.engine, body)
                usage = self.counts.reported
                if usage is not None and usage.prompt_tokens is not None:
                    attempt.counted(usage.prompt_tokens - (usage.cached_tokens or 0))
            self._complete_headers(status, headers, attempt)
            self._comments_over = True  # no comment may come between
            if not self._client.reply(status, headers, body):
                await self._send_head(status, headers)
                self._exchange.take(Step.COMMIT)
                await self.finish(body)
            _plain_succeeded(attempt, status)
            return
        self._comments_over = True
        self._exchange.take(Step.BEGIN)
        await self._start(status, headers, attempt)
        held.give_back()  # from here on the client's own connection counts
        loop_time = asyncio.get_running_loop().time
        given_up, before, beginning = False, b"", body[:EDGE_BYTES]
        while body:
            given_up = given_up or (judged and gives_up(before + body, dialect))
            before = (before + body[-EDGE_BYTES:])[-EDGE_BYTES:]
            self.counts.read_part(attempt.engine, body)
            await self._exchange.send({"type": "http.response.body", "body": body, "more_body": True})
            body = await connection.chunk()
            self._exchange.heard(loop_time())
        if given_up or (judged and is_cut(beginning, before)):
            attempt.failed(time.monotonic())
        else:
            _plain_succeeded(attempt, status)
        await self.finish(b"")

    async def _answer_in_events(self, connection: Connection, body: bytes) -> None:
        """A plain reply to a request whose client has the beginning of a stream: an error becomes an event. An answer
        cannot become one."""
        status = connection.status
        if status < 400:
            status, body = 502, b""
        self.error_code = "engine_bad_reply" if not body else None
        self._exchange.take(Step.COMMIT)
        await self.finish(event_of_reply(status, body, self._request.dialect))

    # -- to the client -----------------------------------------------------------------------------------------------

    async def _start(self, status: int, headers: Headers, attempt: Attempt | None) -> None:
        self._complete_headers(status, headers, attempt)
        await self._send_head(status, headers)

    def _complete_headers(self, status: int, headers: Headers, attempt: Attempt | None) -> None:
        self.status = status
        if attempt is not None:
            decision = attempt.decision
            headers.append((_ENGINE, attempt.engine.name.encode()))
            headers.append((_ROUTE, decision.reason.encode()))
            headers.append((_PREFIX_TOKENS, str(decision.held.total_tokens).encode()))
        headers.append((_OVERHEAD, b"%.3f" % (self.overhead_seconds * 1000)))
        headers.append((b"x-request-id", self._request.request_id))

    async def _send_head(self, status: int, headers: Headers) -> None:
        self._head_sent = True
        await self._exchange.send({"type": "http.response.start", "status": status, "headers": headers})

    async def finish(self, body: bytes) -> None:
        self._comments_over = True
        await self._exchange.send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_error(self, error: GatewayError, attempt: Attempt | None) -> None:
        """Answer a request that failed for good: with an error body, or an error event if a stream has begun."""
        request_id = self._request.shown_id
        self.error_code = None if isinstance(error, EngineAnsweredError) else error.code
        if self._head_sent:
            logger.warning("request %s: ended after the reply had begun: %s", request_id, error.message)
            stream, dialect = self.stream, self._request.dialect
            if stream.ended:
                await self.finish(b"")
            elif stream.framed or not self._exchange.committed:
                whole = stream.at_boundary or not self._exchange.committed
                if isinstance(error, EngineAnsweredError):
                    event = event_of_reply(error.status, error.reply_body, dialect)
                else:
                    event = event_of(error, dialect, at_event_boundary=whole, last_chunk=stream.last_chunk)
                await self.finish(event)
            # A plain reply that was too long to be held back stays incomplete. The server closes the connection, which
            # is all that tells the client.
            return
        self._comments_over = True  # no comment may come between head and body
        if isinstance(error, EngineAnsweredError):
            await self._start(error.status, reply_headers(error.reply_headers), attempt)
            await self.finish(error.reply_body)
            return
        logger.warning("request %s: answered %d: %s", request_id, error.status, error.message)
        body = body_of(error, self._request.dialect)
        headers = [*headers_of(error), (b"content-length", str(len(body)).encode())]
        await self._start(error.status, headers, attempt if isinstance(error, UpstreamError) else None)
        await self.finish(body)

    # -- usage -------------------------------------------------------------------------------------------------------

    def count_cached(self, attempt: Attempt | None) -> None:
        """Count once, at the end, what routing expected to be cached and what the engine reports.

        vLLM leaves the number out if it is 0, as an engine that is not to report it does always.
        """
        usage = self.counts.reported
        if attempt is None or usage is None or usage.prompt_tokens is None:
            return
        engine = attempt.engine
        cached = usage.cached_tokens or 0
        if cached:
            engine.reports_cached_tokens = True
        elif not engine.reports_cached_tokens:
            return
        held = attempt.decision.expected(usage.prompt_tokens, cached)
        if held is None:
            return
        metrics = self._services.metrics
        expected = (
            (TierLabel.DEVICE, held.device_tokens),
            (TierLabel.CPU, held.cpu_tokens),
            (TierLabel.SHARED, held.shared_tokens),
        )
        lost_in = held.tier_of_first_missing(cached)
        for tier, tokens in expected:
            metrics.predicted_tokens(self._model, tier).inc(tokens)
            metrics.missing_tokens(self._model, tier).inc(held.total_tokens - cached if tier is lost_in else 0)
        metrics.actual_tokens(self._model).inc(cached)
        self._services.router.count_cached(self._model, held, cached)


def _is_json(connection: Connection) -> bool:
    return (header(connection.headers, b"content-type") or b"")[:16].lower() == b"application/json"


def _plain_succeeded(attempt: Attempt, status: int) -> None:
    if status < 500:  # a 5xx may be the fault of the request or of the engine
        attempt.succeeded()
