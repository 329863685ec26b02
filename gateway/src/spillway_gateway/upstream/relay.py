"""One client request: admission, a routing decision and an attempt for each engine tried, and its accounting.

The reply itself passes in reply.py. exchange.py has the request's states, their deadlines, and what ends a wait from
outside; continuation/ says whether and how an answer goes on from another engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from time import perf_counter
from typing import Any

from spillway_gateway.errors import (
    AdapterNotServed,
    EngineBadReply,
    EngineConnectTimeout,
    EngineDisconnected,
    EngineEnding,
    EngineRefused,
    GatewayError,
    NoEngineInTime,
    NoEngineReady,
    UpstreamError,
    engine_failure,
)
from spillway_gateway.fleet.engine import Engine, may_return_for
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.routing.fleet_view import Leg
from spillway_gateway.routing.legs import LegsReason
from spillway_gateway.upstream.answers import plain_failure, says_it_ends
from spillway_gateway.upstream.connections import Connection, Connections
from spillway_gateway.upstream.continuation.continuing import Continuing, NotJoined
from spillway_gateway.upstream.exchange import ClientDisconnected, ClientStalled, Exchange, State, Step
from spillway_gateway.upstream.first_leg import (
    PLACE_SECONDS_MAX,
    REPLY_BYTES_MAX,
    RequestLegs,
    first_leg,
    place_of,
    second_leg,
)
from spillway_gateway.upstream.forward import request_head
from spillway_gateway.upstream.outbound import AttemptTrace, Client, OutboundRequest, Send, UpstreamServices
from spillway_gateway.upstream.reading import collect
from spillway_gateway.upstream.reply import EngineAnsweredError, EngineErrorTooLong, Reply
from spillway_gateway.upstream.retry import is_attempt, may_retry
from spillway_gateway.upstream.router import Attempt, Place
from spillway_gateway.upstream.suspects import EndedEngines
from spillway_gateway.write_coalescing import WriteCoalescer
from spillway_settings.roles import EngineRole

logger = logging.getLogger(__name__)

TEXT_BYTES_MAX = 1024 * 1024  # of an engine's reply that a continuation asks for


class Relay:
    """One request, created and run in the task that serves it. `run` answers the client in every case and releases
    every count, timer and connection. attempt: of the last engine tried."""

    __slots__ = (
        "_attempt_status",
        "_attempt_trace",
        "_chosen_at",
        "_client",
        "_coalescer",
        "_connection",
        "_connections",
        "_continuing",
        "_dispatched",
        "_ended",
        "_exchange",
        "_fleet",
        "_kv_place",
        "_kv_place_at",
        "_kv_place_until",
        "_legs",
        "_request",
        "_services",
        "attempt",
        "reply",
    )

    def __init__(
        self, request: OutboundRequest, fleet: ModelFleet, services: UpstreamServices, client: Client, send: Send
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._services = services
        self._client = client
        self._coalescer = WriteCoalescer.of_running_loop()
        self._dispatched = False
        self._legs = RequestLegs(request, fleet, services.metrics)
        self._kv_place: Mapping[str, Any] | None = None  # of the prompt, for the next attempt
        self._kv_place_until = 0.0
        self._kv_place_at = ""  # the engine that keeps the blocks
        self._ended = EndedEngines(request, fleet.name, services)
        self._chosen_at = 0.0  # the last engine
        self._connections: Connections = client.engine_connections or services.pool
        self._connection: Connection | None = None  # of those, during an attempt
        self._attempt_trace: AttemptTrace | None = None
        self._attempt_status = 0  # of the engine's reply
        self.attempt: Attempt | None = None
        self._continuing: Continuing | None = None
        if request.asks_ids:
            self._continuing = Continuing(request, fleet, services.live.continuation, services.kept)
        self._exchange = Exchange(fleet, services, send, stream=request.stream, continuation=self._continuing)
        self.reply = Reply(request, services, self._exchange, client, model=fleet.name, continuing=self._continuing)

    @property
    def model(self) -> str:
        return self._fleet.name

    async def run(self) -> None:
        """Raises nothing but what cancels the task from outside."""
        services, exchange, reply = self._services, self._exchange, self.reply
        self._client.set_disconnect_callback(exchange.client_disconnected)
        services.running.add(exchange)
        self._coalescer.begin_request()
        services.budget.earn()
        try:
            await self._ended.require_unsuspected()
            await self._places()
        except ClientDisconnected as error:
            if reply.stream.ended and not isinstance(error, ClientStalled):
                return  # SDKs disconnect at [DONE], before the reply's own end
            phase = "after_first_byte" if exchange.committed else "before_first_byte"
            services.metrics.disconnect(self._fleet.name, phase).inc()
            reply.abandon(self.attempt, perf_counter() - self._chosen_at)
            if isinstance(error, ClientStalled):
                logger.warning("request %s: the client stopped reading; its request was ended", self._request.shown_id)
        except GatewayError as error:
            if isinstance(error, (NoEngineReady, EngineRefused, EngineConnectTimeout)):
                self._client.end_with_reply()  # the next connection may be to a gateway that reaches an engine
            await reply.answer_error(error, self.attempt)
            error.__traceback__ = None  # as for each failure of an attempt
        finally:
            services.running.discard(exchange)
            self._coalescer.end_request()
            self._client.clear_disconnect_callback(exchange.client_disconnected)
            exchange.take(Step.FINISH)
            reply.close()
            if self._continuing is not None:
                self._continuing.close()
            self._record_metrics()

    async def _places(self) -> None:
        """Take a place, and another one if no engine took the connection, or the last one was lost meanwhile: that
        waits for one to return, if one was lost a moment ago. Raises the last failure."""
        until, refusal = 0.0, None
        while True:
            place: Place | None = None
            try:
                place = await self._enter()
                await self._attempts(place)
                return
            except (EngineRefused, NoEngineReady) as error:
                none_returned = refusal is not None and isinstance(error, NoEngineReady)
                if not none_returned:
                    seconds = self._services.live.health.return_seconds
                    until = until or time.monotonic() + seconds
                    over = isinstance(error, NoEngineInTime) or time.monotonic() >= until
                    if over or not self._waits_again(error, seconds):
                        raise
                    refusal = error.with_traceback(None)
            finally:
                if place is not None:
                    place.leave()
            if none_returned and refusal is not None:
                raise refusal  # above, its context would be the other error, whose frames hold it

    def _waits_again(self, error: EngineRefused | NoEngineReady, seconds: float) -> bool:
        if self._dispatched or not self._request.retryable or not self._reaches_others:
            return False
        return isinstance(error, EngineRefused) or may_return_for(self._fleet.engines.values(), seconds) > 0.0

    @property
    def _reaches_others(self) -> bool:
        """Whether more than one engine could get the request."""
        return self._request.only_engine is None and self._connections.reach_another

    async def _enter(self) -> Place:
        """Wait until the engines have room."""
        self._exchange.take(Step.ENTER)
        trace = self._request.trace
        asked_ns = time.time_ns() if trace is not None else 0
        try:
            with self._exchange:
                return await self._services.router.enter(self._fleet, self._request)
        finally:
            if trace is not None:
                trace.admitted(asked_ns)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def _attempts(self, place: Place) -> None:
        """Try one engine after another until one answers; if it fails within a stream, try others that continue it.
        Raises the last failure if no retry is allowed."""
        services, request, exchange, continuing = self._services, self._request, self._exchange, self._continuing
        tried = self._connections.unreachable(self._fleet.engines)
        attempts = 0
        failure: UpstreamError | None = None
        while True:
            attempt: Attempt | None = None
            try:
                attempt = await self._choose(place, tried)
            except NoEngineReady:
                if failure is None:
                    raise
            if attempt is None:
                assert failure is not None
                if exchange.state is State.BRIDGING:
                    services.metrics.not_continued(self._fleet.name, "no_engine").inc()
                raise failure
            if self._legs.leg is Leg.SECOND:
                tried = await self._first_leg(attempt, tried)
                continue
            try:
                await self._attempt(attempt)
                attempt.close(time.monotonic())
                self._end_attempt(None)
                return
            except UpstreamError as error:
                failure = error.with_traceback(None)  # this frame is in it: they would keep each other
                if type(error) in (EngineDisconnected, EngineBadReply):  # raised by a connection, without a name
                    failure = type(error)(f"Engine {attempt.engine.name} failed: {error.message}")
                    failure.__cause__ = error
                self._engine_failed(attempt, error)
                self._end_attempt(error.reason)
                if not await self._ended.allow_another(error, place, attempt.engine, begun=exchange.committed):
                    raise failure from None
            except NotJoined:
                assert failure is not None
                services.metrics.not_continued(self._fleet.name, "text").inc()
                raise failure from None
            finally:
                attempt.close()
                self._end_attempt("cancelled")  # no effect on an attempt that has ended
            if continuing is not None and exchange.committed:
                tried = self._left_out(continuing, failure, attempt.engine, tried)
                if continuing.complete:
                    await self.reply.stream.complete()
                    return
                continue
            tried |= attempt.engine.same_process
            attempts += is_attempt(failure)
            # An engine that lacks the adapter has done nothing that must not be done twice.
            movable = request.retryable or isinstance(failure, AdapterNotServed)
            engines_left = any(engine.routable and name not in tried for name, engine in self._fleet.engines.items())
            again = may_retry(
                bytes_sent=exchange.committed,
                attempts=attempts,
                attempts_max=services.live.limits.attempts_max,
                engines_left=movable and self._reaches_others and engines_left,
            )
            if not again:
                raise failure
            if not services.budget.spend(failure):
                logger.warning("request %s: %s; the retry budget is used up", self._request.shown_id, failure.message)
                raise failure
            services.metrics.retry(attempt.engine.name, failure.reason).inc()
            logger.warning("request %s: %s; trying another engine", self._request.shown_id, failure.message)

    async def _first_leg(self, attempt: Attempt, tried: frozenset[str]) -> frozenset[str]:
        """Have an engine compute the prompt, and return the engines that do not get the rest. If that fails, another
        one gets the whole request."""
        engine, now = attempt.engine, time.monotonic
        try:
            why = await self._compute_prompt(attempt)
            if why is None:
                attempt.accepted(now())
                attempt.first_byte(now(), measures_prefill=True)
                attempt.succeeded()
            elif why is LegsReason.PREFILL_LATE or self._attempt_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                attempt.failed(now())
                self._services.router.engine_failed(engine)
            self._end_attempt(None if why is None else why.value)
        except UpstreamError as error:
            why = LegsReason.PREFILL_FAILED
            self._engine_failed(attempt, error)
            self._end_attempt(error.reason)
            logger.warning("request %s: its first leg failed on engine %s", self._request.shown_id, engine.name)
            await self._ended.first_leg_failed(error, engine)
        finally:
            attempt.close()
            self._end_attempt("cancelled")  # no effect on an attempt that has ended
        self._legs.prefilled(why)
        return tried if why is None else tried | engine.same_process

    async def _compute_prompt(self, attempt: Attempt) -> LegsReason | None:
        """Run the first leg. Returns why it was of no use; None: the prompt is computed. Raises UpstreamError."""
        engine, exchange = attempt.engine, self._exchange
        by_connector = self._fleet.disaggregation.by_connector
        request = await first_leg(self._request, by_connector=by_connector)
        exchange.ask(engine)
        engine.requests.add(exchange)
        try:
            with exchange:
                async with asyncio.timeout(self._fleet.disaggregation.prefill_seconds_max):
                    connection = await self._ask(engine, request)
                    self._attempt_status = status = connection.status
                    body = await collect(connection, REPLY_BYTES_MAX)
                    if (failure := plain_failure(status, body, request.dialect)) is not None:
                        raise engine_failure(engine.name, failure)
        except TimeoutError:
            return LegsReason.PREFILL_LATE
        finally:
            engine.requests.discard(exchange)
            if self._connection is not None:
                self._connections.release(engine, self._connection)
                self._connection = None
        if status != HTTPStatus.OK:
            return LegsReason.PREFILL_REFUSED
        if by_connector:
            self._kv_place, self._kv_place_until = place_of(body), time.monotonic() + PLACE_SECONDS_MAX
            self._kv_place_at = engine.name
            return LegsReason.NO_TRANSFER if self._kv_place is None else None
        return None

    def _left_out(
        self, continuing: Continuing, failure: UpstreamError, engine: Engine, tried: frozenset[str]
    ) -> frozenset[str]:
        """A stream broke: the engines that do not get the rest of its answer. Raises the failure if it ends here."""
        exchange = self._exchange
        first = exchange.state is not State.BRIDGING
        exchange.take(Step.BREAK)
        budget, overdue = self._services.budget, exchange.overdue
        left_out = continuing.after(failure, engine, tried, budget, first=first, overdue=overdue)
        if left_out is None:
            self._services.metrics.not_continued(self._fleet.name, continuing.why_not).inc()
            logger.debug("request %s: its answer is not continued: %s", self._request.shown_id, continuing.why_not)
            raise failure
        logger.warning("request %s: %s; another engine continues", self._request.shown_id, failure.message)
        return left_out

    async def _choose(self, place: Place, tried: frozenset[str]) -> Attempt:
        """Route the request to an engine that was not tried yet. Raises NoEngineReady."""
        request, exchange = self._request, self._exchange
        exchange.take(Step.ROUTE)
        continuing = self._continuing if exchange.state is State.BRIDGING else None
        trace = request.trace
        asked_ns = time.time_ns() if trace is not None else 0
        began = perf_counter()
        with exchange:
            prompt = continuing.prompt() if continuing is not None else request.prompt
            attempt = await place.choose(prompt, tried, self._legs.leg)
        self.attempt = attempt
        self._chosen_at = perf_counter()
        leg = self._legs.chosen(attempt, self._chosen_at - began)
        if attempt.decision.session is not None:
            self._services.metrics.session(self._fleet.name, attempt.decision.session.value).inc()
        if trace is not None:
            trace.routed(asked_ns, attempt.decision)
            self._attempt_status = 0
            self._attempt_trace = trace.attempt(
                self._fleet.name,
                attempt.engine,
                request.headers,
                again=bool(tried),
                continues_after=continuing.tokens if continuing is not None else None,
                leg=leg,
            )
        return attempt

    def _end_attempt(self, error: str | None) -> None:
        if self._attempt_trace is not None:
            self._attempt_trace.end(self._attempt_status, error)
            self._attempt_trace = None

    def _engine_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        engine = attempt.engine
        if isinstance(error, AdapterNotServed):  # the engine works, and this is a proper answer
            assert self._request.adapter is not None
            self._services.router.engine_lacks_adapter(engine, self._request.adapter)
            attempt.succeeded()
            return
        now = time.monotonic()
        if not (isinstance(error, EngineEnding) and engine.says_it_ends(now)):  # which is no fault of the engine
            attempt.failed(now)
        if isinstance(error, EngineRefused):
            self._services.router.engine_refused(engine, error.message)
        elif not isinstance(error, (EngineAnsweredError, EngineErrorTooLong)):
            self._services.router.engine_failed(engine)
        if self._exchange.committed and self._exchange.state is not State.BRIDGING:
            self._services.metrics.broken(engine.name, error.reason).inc()

    async def _attempt(self, attempt: Attempt) -> None:
        engine, exchange, continuing = attempt.engine, self._exchange, self._continuing
        exchange.ask(engine)
        engine.requests.add(exchange)
        assumed: asyncio.TimerHandle | None = None
        if not self._request.stream:
            loop = asyncio.get_running_loop()
            assumed = loop.call_later(attempt.expected_prefill_seconds, attempt.prefill_assumed)
        try:
            with exchange:
                if continuing is not None and exchange.state is State.BRIDGING:
                    request, events = await continuing.join(engine, self._ask_whole)
                    connection = await self._ask(engine, request)
                    self._attempt_status = connection.status
                    await self.reply.stream.relay_continued(attempt, connection, self._attempt_trace, events)
                    return
                request, place, self._kv_place = self._request, self._kv_place, None  # a connector gives it away once
                if place is not None and self._may_read_place(engine):
                    request = await second_leg(request, place)
                connection = await self._ask(engine, request, again=self._request)
                self._attempt_status = connection.status
                await self.reply.relay(attempt, connection, self._attempt_trace)
        finally:
            if assumed is not None:
                assumed.cancel()
            engine.requests.discard(exchange)
            if self._connection is not None:
                self._connections.release(engine, self._connection)
                self._connection = None

    def _may_read_place(self, engine: Engine) -> bool:
        """Whether an engine that answers is sent the place of the prompt's KV. None reads from itself, and a prefill
        engine, which answers if nothing else can, may have a connector that only gives."""
        reads = engine.config.role is not EngineRole.PREFILL and engine.name != self._kv_place_at
        return reads and time.monotonic() < self._kv_place_until

    async def _ask_whole(self, request: OutboundRequest) -> tuple[int, bytes]:
        """The status and the short reply of the engine that is to continue the answer."""
        engine = self._exchange.engine
        assert engine is not None
        connection = await self._ask(engine, request)
        reply = await collect(connection, TEXT_BYTES_MAX)
        status, self._connection = connection.status, None
        self._connections.release(engine, connection)
        if says_it_ends(status, reply):
            raise EngineEnding.of(engine.name)
        return status, reply

    async def _ask(
        self, engine: Engine, request: OutboundRequest, *, again: OutboundRequest | None = None
    ) -> Connection:
        """Send the request and wait for the reply's head. A reused connection that turns out closed is no failure of
        the engine: a fresh connection decides. again: what that one sends, if it is not the same."""
        pool = self._connections
        connection: Connection | None = pool.take_idle(engine)
        if connection is not None:
            self._connection = connection
            self._dispatch(connection, engine, request)
            try:
                await connection.head()
                return connection
            except EngineDisconnected as broken:
                if connection.got_bytes:
                    raise
                self._connection = None
                pool.release(engine, connection)
                try:
                    connection = await pool.open(engine)
                except EngineRefused:  # it may have got the request, and ended
                    raise broken from None
                request = again or request
        else:
            connection = await pool.open(engine)
        self._connection = connection
        self._dispatch(connection, engine, request)
        await connection.head()
        return connection

    def _dispatch(self, connection: Connection, engine: Engine, request: OutboundRequest) -> None:
        head = request_head(
            engine.base_path.encode() + request.path,
            engine.host_header,
            request.headers if self._attempt_trace is None else self._attempt_trace.headers,
            len(request.body),
            request.request_id,
            method=request.method,
            rank=engine.rank,
        )
        connection.send((head, request.body))
        if not self._dispatched:
            self._dispatched = True
            self.reply.add_overhead(perf_counter() - self._request.received_at)

    # -- accounting --------------------------------------------------------------------------------------------------

    def _record_metrics(self) -> None:
        metrics, reply, attempt = self._services.metrics, self.reply, self.attempt
        engine, route = (attempt.engine.name, attempt.decision.reason) if attempt is not None else ("none", "none")
        status = f"{reply.status // 100}xx" if reply.status else "aborted"
        metrics.request(self._fleet.name, engine, route, status).inc()
        metrics.overhead(self._fleet.name).observe(reply.overhead_seconds)
        logger.debug(
            "request %s: model %s engine %s route %s status %d overhead %.3f ms",
            self._request.shown_id,
            self._fleet.name,
            engine,
            route,
            reply.status,
            reply.overhead_seconds * 1000,
        )
