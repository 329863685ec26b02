"""An engine's reply that is a stream of events, on its way to the client, and the rest of an answer that another engine
continues.

What comes before the first part of an answer is held back. If the engine fails until then, the request is sent to
another one, and the client still sees one preamble, with the ids of its answer (answers.py tells the parts apart).
Comments pass at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from time import perf_counter
from typing import Protocol

from spillway_gateway.error_bodies import Dialect
from spillway_gateway.errors import EngineDisconnected, EngineEnding, EngineFailed, engine_failure
from spillway_gateway.upstream.adapter_refusals import REFUSED, require_adapter
from spillway_gateway.upstream.answers import (
    BEFORE_AN_ANSWER,
    Event,
    Kind,
    endings,
    ends_too_early,
    ends_unmarked,
    first_event,
    may_end,
    says_it_ends,
    says_nothing,
    without_surplus,
)
from spillway_gateway.upstream.connections import Connection
from spillway_gateway.upstream.continuation.continued_events import ContinuedEvents
from spillway_gateway.upstream.continuation.continuing import Continuing
from spillway_gateway.upstream.exchange import Exchange, State, Step
from spillway_gateway.upstream.forward import Headers, header, reply_headers
from spillway_gateway.upstream.outbound import AttemptTrace, OutboundRequest, UpstreamServices
from spillway_gateway.upstream.reading import ERROR_REPLY_BYTES_MAX, collect, next_events, read_to_end
from spillway_gateway.upstream.reply_counts import ReplyCounts
from spillway_gateway.upstream.router import Attempt
from spillway_gateway.upstream.sse import EVENT_BYTES_MAX, EventFramer, is_done
from spillway_gateway.upstream.usage import Usage
from spillway_settings.wire import ENDING_ERROR

logger = logging.getLogger(__name__)

IDS_BYTES_MAX = 48  # of an event for each token that its prompt is estimated to have
PREAMBLE_BYTES_MAX = 512 * 1024  # held back; Responses repeat instructions and tools twice in theirs
EVENT_STREAM = b"text/event-stream"


class ToClient(Protocol):
    """The interface of the reply (reply.py) for a stream."""

    async def start_events(self, status: int, headers: Headers, attempt: Attempt) -> None:
        """Send the head, unless a comment has."""

    async def pass_events(self, events: bytes) -> None: ...

    async def comment(self, comment: bytes) -> None:
        """Send a comment, and before it the head if none was sent."""

    async def finish(self, body: bytes) -> None: ...


def is_event_stream(connection: Connection) -> bool:
    content_type = header(connection.headers, b"content-type") or b""
    return content_type[:17].lower() == EVENT_STREAM


class StreamRelay:
    """Relays the stream of one request, over all its attempts.

    ended: the last event was passed on, and a failure afterwards changes nothing. last_chunk: what the client got last.
    """

    __slots__ = (
        "_complete",
        "_continuing",
        "_counts",
        "_end_is_open",
        "_engine_failed",
        "_exchange",
        "_framer",
        "_model",
        "_reply",
        "_request",
        "_services",
        "ended",
        "first_byte_seconds",
        "last_chunk",
    )

    def __init__(
        self,
        reply: ToClient,
        request: OutboundRequest,
        services: UpstreamServices,
        exchange: Exchange,
        counts: ReplyCounts,
        *,
        model: str,
        continuing: Continuing | None,
    ) -> None:
        self._reply = reply
        self._request = request
        self._services = services
        self._exchange = exchange
        self._counts = counts
        self._model = model
        self._engine_failed = False  # the stream held an error event of the engine
        self._complete = False  # it held the end of its answer
        self._end_is_open = False  # the event that ends it is passed on in parts, of which the last is to come
        self._continuing = continuing
        self.ended = False
        self.first_byte_seconds: float | None = None
        self._framer: EventFramer | None = None  # of the present attempt; None before one whose reply is a stream
        self.last_chunk = b""

    @property
    def framed(self) -> bool:
        """Whether the present attempt's reply is a stream."""
        return self._framer is not None

    @property
    def at_boundary(self) -> bool:
        """Whether what was passed on ends with a whole event."""
        return self._framer is None or self._framer.at_boundary

    def close(self) -> None:
        """Pass on nothing more. Forget the reply, which holds this stream; otherwise each request would be a reference
        cycle."""
        del self._reply

    def reset(self) -> None:
        """Begin again, because another attempt has a reply."""
        self._framer = None
        self._complete = self._end_is_open = False

    async def relay(self, attempt: Attempt, connection: Connection, trace: AttemptTrace | None) -> None:
        """Pass on a stream from its beginning. Raises UpstreamError for a failure of the engine; until the exchange is
        committed the request may be sent to another one."""
        exchange, reply, continuing, engine = self._exchange, self._reply, self._continuing, attempt.engine
        dialect = self._request.dialect
        ids_bytes = IDS_BYTES_MAX * self._request.prompt.prompt_tokens if continuing is not None else 0
        framer = self._framer = EventFramer(EVENT_BYTES_MAX + ids_bytes)
        bytes_max = PREAMBLE_BYTES_MAX + ids_bytes
        loop_time = asyncio.get_running_loop().time
        held = b""
        begun = passing = False  # the first part of the answer has come; the client gets the events
        while True:
            whole = framer.at_boundary  # else the chunk is the rest of an event that was too long to be held back
            chunk = await next_events(connection, framer)
            whole_events = whole and framer.at_boundary
            plain = whole_events and not self._complete and not may_end(chunk, dialect)  # as most
            if whole_events and not plain:
                chunk, self._complete = without_surplus(chunk, dialect, complete=self._complete)
            elif self._complete:
                chunk = b""
            if not chunk:  # the end of the stream, or what follows that of its answer
                break
            if not begun and whole:
                event = first_event(chunk, dialect, ids_asked=self._request.asks_ids)
                if event.kind is Kind.FAILED and not passing:
                    raise engine_failure(engine.name, event.message)
                if connection.status == 200 and ends_too_early(event, dialect):
                    raise EngineFailed(f"Engine {engine.name} failed: it ended an answer that it had not begun")
                if event.kind is Kind.NOTHING and connection.status == 200:
                    await reply.comment(chunk)
                    continue
                if event.kind is Kind.PREAMBLE and not held and dialect is not Dialect.RESPONSES:
                    attempt.computed()  # vLLM sends it with the first token; of responses at once
                if event.kind is Kind.PART:
                    begun = True
                    exchange.take(Step.BEGIN)
                    self._begin(attempt, trace)
                elif event.kind in BEFORE_AN_ANSWER and framer.at_boundary and not passing and not event.binds:
                    held += chunk
                    if len(held) <= bytes_max:
                        continue
                    chunk, held = held, b""
            if not passing:
                passing = True
                chunk, held = held + chunk, b""
                await self._commit(attempt, connection, chunk)
            silent = begun and says_nothing(chunk, dialect)
            failure = None
            if continuing is not None:
                chunk, failure = continuing.take(chunk, engine)
            if failure is None:
                self.last_chunk = chunk
            if plain:
                self._counts.read_events(engine, chunk)
            elif self._read(attempt, chunk, whole=whole_events) and failure is None:
                await reply.finish(chunk)
                exchange.take(Step.FINISH)
                await read_to_end(connection)
                return
            if chunk:
                await reply.pass_events(chunk)
            if failure is not None:
                raise engine_failure(engine.name, failure)
            if begun and not silent:
                exchange.heard(loop_time())
        await self._end(attempt, connection, held)

    async def _end(self, attempt: Attempt, connection: Connection, held: bytes) -> None:
        """The stream has ended, without an event behind which nothing follows. Raises EngineDisconnected if its
        answer is not whole."""
        continuing, committed, whole = self._continuing, self._exchange.committed, self._engine_failed or self.ended
        if not whole:
            if continuing is not None and committed and continuing.possible(attempt.engine):
                raise EngineDisconnected("it ended the reply early")
            request = self._request
            if connection.status == 200 and not ends_unmarked(self.last_chunk, request.dialect, request.choices):
                raise EngineDisconnected("it ended the reply early")
            if connection.status < 500:
                attempt.succeeded()
        if not committed:  # of an error status, without an event that says so
            await self._commit(attempt, connection, held)
        await self._reply.finish(held)

    def _begin(self, attempt: Attempt, trace: AttemptTrace | None) -> None:
        """The first part of the answer has come."""
        services, engine = self._services, attempt.engine
        attempt.accepted(time.monotonic())
        alone = self._request.choices == 1  # of several prompts the first may be computed when the others are not
        if not alone:
            attempt.computed()
        attempt.first_byte(time.monotonic(), measures_prefill=alone)
        attempt.began()
        self.first_byte_seconds = perf_counter() - self._request.received_at
        services.metrics.first_byte(self._model, engine.name).observe(self.first_byte_seconds)
        services.router.count_first_byte(self._model, engine.name, self.first_byte_seconds)
        if logger.isEnabledFor(logging.DEBUG):
            seconds = self.first_byte_seconds
            logger.debug("request %s: engine %s began after %.3f s", self._request.shown_id, engine.name, seconds)
        if trace is not None:
            trace.first_byte()

    async def _commit(self, attempt: Attempt, connection: Connection, events: bytes) -> None:
        """The client gets these events, and from now on no other engine's answer from the start."""
        headers = [pair for pair in reply_headers(connection.headers) if pair[0] != b"content-length"]
        if self._request.on_reply is not None and connection.status == 200:
            self._request.on_reply(attempt.engine.name, events)
        await self._reply.start_events(connection.status, headers, attempt)
        self._exchange.take(Step.COMMIT)

    def _read(self, attempt: Attempt, events: bytes, *, whole: bool) -> bool:
        """Take usage, errors and the end out of events, or out of the next part of a long one. True when nothing
        follows them."""
        self._counts.read_events(attempt.engine, events)
        if not whole:
            self._counts.read_part(attempt.engine, events)
        found = endings(events, self._request.dialect)
        if not self.at_boundary:
            self._end_is_open = self._end_is_open or any(event.kind is Kind.END for event in found)
            found = [event for event in found if event.kind is not Kind.END]
        elif self._end_is_open:
            self._end_is_open, self._complete = False, True
            found.append(Event(Kind.END))
        for event in found:
            if event.kind is Kind.FAILED and not self._engine_failed:
                self._engine_failed = True
                now = time.monotonic()
                if event.message != ENDING_ERROR or not attempt.engine.says_it_ends(now):  # which is no fault of it
                    attempt.failed(now)
            elif not self.ended and not self._engine_failed:
                attempt.succeeded()  # also if it refuses: the request is at fault
            self.ended = True
        return is_done(events)

    # -- continued by another engine ---------------------------------------------------------------------------------

    async def relay_continued(
        self, attempt: Attempt, connection: Connection, trace: AttemptTrace | None, answer: ContinuedEvents
    ) -> None:
        """Pass on the rest of an answer, of which the client has the beginning. answer: reads it. Raises
        UpstreamError."""
        exchange, continuing, name = self._exchange, self._continuing, attempt.engine.name
        assert continuing is not None
        if self._request.adapter is not None and connection.status in REFUSED:
            body = await collect(connection, ERROR_REPLY_BYTES_MAX)
            require_adapter(attempt.engine, self._request.adapter, connection.status, body)
        if connection.status != 200 or not is_event_stream(connection):
            if connection.status == 503 and says_it_ends(503, await collect(connection, ERROR_REPLY_BYTES_MAX)):
                raise EngineEnding.of(name)
            raise EngineFailed(f"Engine {name} answered {connection.status} to a continuation")
        ids_bytes = IDS_BYTES_MAX * self._request.prompt.prompt_tokens
        framer = self._framer = EventFramer(EVENT_BYTES_MAX + ids_bytes)
        loop_time = asyncio.get_running_loop().time
        while events := await next_events(connection, framer):
            before = answer.tokens
            try:
                passed = answer.take(events)
            except ValueError as error:
                raise EngineFailed(f"Engine {name} continued with what is no chunk: {error}") from error
            goes_on = answer.tokens > before or answer.done or bool(passed)
            if exchange.state is State.BRIDGING and answer.failure is None and goes_on:
                self._resumed(attempt, continuing, loop_time() - exchange.since, trace)
            cached_tokens = answer.cached_tokens if answer.done else None
            self._counts.continued(passed, Usage(continuing.prompt_tokens, answer.tokens, cached_tokens))
            if answer.done:
                attempt.succeeded()
                self.ended = True
                await self._reply.finish(passed)
                exchange.take(Step.FINISH)
                await read_to_end(connection)
                return
            if passed:
                await self._reply.pass_events(passed)
            if answer.failure is not None:
                raise engine_failure(name, answer.failure)
            if goes_on:
                exchange.heard(loop_time())
        raise EngineDisconnected("it ended the reply early")

    def _resumed(self, attempt: Attempt, continuing: Continuing, seconds: float, trace: AttemptTrace | None) -> None:
        """The first events have come from the engine that continues. seconds: since the other engine failed."""
        attempt.accepted(time.monotonic())
        attempt.first_byte(time.monotonic(), measures_prefill=True)
        attempt.began()
        if trace is not None:
            trace.first_byte()
        self._exchange.take(Step.RESUME)
        assert continuing.failure is not None
        services = self._services
        services.metrics.continued(self._model, continuing.failure.reason).inc()
        services.metrics.pause(self._model).observe(seconds)
        services.router.count_continued(self._model, seconds)

    async def complete(self) -> None:
        """End an answer whose engine failed after the last token."""
        continuing = self._continuing
        assert continuing is not None
        events = continuing.last_events()
        self._counts.continued(b"", Usage(continuing.prompt_tokens, continuing.tokens, None))
        self.ended = True
        await self._reply.finish(events)
        self._exchange.take(Step.FINISH)
