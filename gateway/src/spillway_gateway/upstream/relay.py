"""One client request: admission, a routing decision and an attempt for each engine tried, and its accounting.

The reply itself passes in reply.py; what ends a wait from outside is in waits.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from time import perf_counter

from spillway_gateway.access.admission import Admission
from spillway_gateway.errors import (
    EngineBadReply,
    EngineDisconnected,
    EngineEnding,
    EngineRefused,
    GatewayError,
    ModelNotFound,
    NoEngineReady,
    UpstreamError,
)
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import Lease, ModelFleet
from spillway_gateway.upstream.connection import EngineConnection
from spillway_gateway.upstream.forward import request_head
from spillway_gateway.upstream.outbound import AttemptTrace, Client, OutboundRequest, Send, UpstreamServices
from spillway_gateway.upstream.reply import EngineAnsweredError, EngineErrorTooLong, Reply
from spillway_gateway.upstream.retry import is_attempt, may_retry
from spillway_gateway.upstream.waits import ClientDisconnected, ClientStalled, RequestWaits
from spillway_gateway.write_coalescing import WriteCoalescer

logger = logging.getLogger(__name__)


class Relay:
    """One request, created and run in the task that serves it. `run` answers the client in every case and releases
    every count, timer and connection. lease: of the last engine tried."""

    __slots__ = (
        "_attempt_status",
        "_attempt_trace",
        "_client",
        "_coalescer",
        "_connection",
        "_dispatched",
        "_fleet",
        "_request",
        "_services",
        "_waits",
        "lease",
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
        self._waits = RequestWaits(fleet, services, stream=request.stream)
        self._dispatched = False
        self._connection: EngineConnection | None = None  # from the pool, during an attempt
        self._attempt_trace: AttemptTrace | None = None
        self._attempt_status = 0  # of the engine's reply
        self.lease: Lease | None = None
        self.reply = Reply(request, services, self._waits, client, send, model=fleet.name)

    @property
    def model(self) -> str:
        return self._fleet.name

    async def run(self) -> None:
        """Raises nothing but what cancels the task from outside."""
        services, waits, reply = self._services, self._waits, self.reply
        self._client.set_disconnect_callback(waits.client_disconnected)
        services.running.add(waits)
        self._coalescer.requests += 1
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
        except ClientDisconnected as error:
            if reply.ended and not isinstance(error, ClientStalled):
                return  # SDKs disconnect at [DONE], before the reply's own end
            phase = "after_first_byte" if waits.bytes_sent else "before_first_byte"
            services.metrics.disconnect(self._fleet.name, phase).inc()
            reply.status = 499
            if isinstance(error, ClientStalled):
                logger.warning("request %s: the client stopped reading; its request was ended", self._id())
        except GatewayError as error:
            await reply.answer_error(error, self.lease)
        finally:
            services.running.discard(waits)
            self._coalescer.requests -= 1
            self._client.clear_disconnect_callback(waits.client_disconnected)
            waits.close()
            self._record_metrics()

    async def _enter(self, admission: Admission) -> None:
        """Wait until the engines have room."""
        waits = self._waits
        if waits.disconnected:
            raise ClientDisconnected
        waits.abortable = True
        trace = self._request.trace
        asked_ns = time.time_ns() if trace is not None else 0
        try:
            await admission.enter(self._request.tenant, self._request.priority)
        except asyncio.CancelledError:
            cause = waits.take_cause()
            if cause is None:
                raise
            raise cause from None
        finally:
            waits.abortable = False
            if trace is not None:
                trace.admitted(asked_ns)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def _attempts(self) -> None:
        """Try one engine after another until one answers. Raises the last failure where no retry is allowed."""
        services, request = self._services, self._request
        tried: frozenset[str] = frozenset()
        attempts = 0
        failure: UpstreamError | None = None
        while True:
            if self._waits.disconnected:
                raise ClientDisconnected
            try:
                lease = self._choose(tried)
            except NoEngineReady:
                if failure is not None:
                    raise failure from None
                raise
            try:
                await self._attempt(lease)
                lease.close(time.monotonic())
                self._end_attempt(None)
                return
            except UpstreamError as error:
                failure = error
                if type(error) in (EngineDisconnected, EngineBadReply):  # raised by a connection, without a name
                    failure = type(error)(f"Engine {lease.engine.name} failed: {error.message}")
                    failure.__cause__ = error
                self._engine_failed(lease, error)
                self._end_attempt(error.reason)
            finally:
                lease.close()
                self._end_attempt("cancelled")  # no effect on an attempt that has ended
            tried |= {lease.engine.name}
            attempts += is_attempt(failure)
            movable = request.retryable and request.only_engine is None
            engines_left = any(engine.routable and name not in tried for name, engine in self._fleet.engines.items())
            again = may_retry(
                bytes_sent=self._waits.bytes_sent,
                attempts=attempts,
                attempts_max=services.limits.attempts_max,
                engines_left=movable and engines_left,
            )
            if not again:
                raise failure
            if not services.budget.spend(failure):
                logger.warning("request %s: %s; the retry budget is used up", self._id(), failure.message)
                raise failure
            services.metrics.retry(lease.engine.name, failure.reason).inc()
            logger.warning("request %s: %s; trying another engine", self._id(), failure.message)

    def _choose(self, tried: frozenset[str]) -> Lease:
        """Route the request to an engine that was not tried yet. Raises NoEngineReady."""
        request = self._request
        trace = request.trace
        asked_ns = time.time_ns() if trace is not None else 0
        lease = self._fleet.choose(request.prompt, tried, request.only_engine)
        self.lease = lease
        self._services.recent.decided(self._fleet.name, request.request_id, lease.decision)
        if trace is not None:
            trace.routed(asked_ns, lease.decision)
            self._attempt_status = 0
            self._attempt_trace = trace.attempt(self._fleet.name, lease.engine, request.headers, again=bool(tried))
        return lease

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
        if self._waits.bytes_sent:
            self._services.metrics.broken(engine.name, error.reason).inc()

    async def _attempt(self, lease: Lease) -> None:
        engine, waits = lease.engine, self._waits
        waits.engine = engine
        waits.abortable = True
        waits.sending = False
        engine.waiting.add(waits)
        engine.requests.add(waits)
        assumed: asyncio.TimerHandle | None = None
        if not self._request.stream:
            loop = asyncio.get_running_loop()
            assumed = loop.call_later(lease.expected_prefill_seconds, lease.prefill_assumed)
        try:
            connection = await self._exchange(engine)
            self._attempt_status = connection.status
            await self.reply.relay(lease, connection, self._attempt_trace)
        except asyncio.CancelledError:
            cause = waits.take_cause()
            if cause is None:
                raise
            raise cause from None
        finally:
            waits.abortable = False
            if assumed is not None:
                assumed.cancel()
            engine.waiting.discard(waits)
            engine.requests.discard(waits)
            if self._connection is not None:
                self._services.pool.release(engine, self._connection)
                self._connection = None

    async def _exchange(self, engine: Engine) -> EngineConnection:
        """Send the request and wait for the reply's head. A reused connection that turns out closed is no failure of
        the engine: a fresh connection decides."""
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
        self._waits.expect_within(timeouts.first_byte_seconds if request.stream else timeouts.plain_seconds)
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
                pool.release(engine, connection)
        connection = await pool.open(engine)
        self._connection = connection
        self._dispatch(connection, head)
        await connection.head()
        return connection

    def _dispatch(self, connection: EngineConnection, head: bytes) -> None:
        connection.send((head, self._request.body))
        if not self._dispatched:
            self._dispatched = True
            self.reply.overhead_seconds += perf_counter() - self._request.received_at

    # -- accounting --------------------------------------------------------------------------------------------------

    def _record_metrics(self) -> None:
        metrics, reply, lease = self._services.metrics, self.reply, self.lease
        engine = lease.engine.name if lease is not None else "none"
        route = lease.decision.reason.value if lease is not None else "none"
        status = f"{reply.status // 100}xx" if reply.status else "aborted"
        metrics.request(self._fleet.name, engine, route, status).inc()
        metrics.overhead(self._fleet.name).observe(reply.overhead_seconds)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: model %s engine %s route %s status %d overhead %.3f ms",
                self._id(),
                self._fleet.name,
                engine,
                route,
                reply.status,
                reply.overhead_seconds * 1000,
            )

    def _id(self) -> str:
        return self._request.request_id.decode("latin-1")
