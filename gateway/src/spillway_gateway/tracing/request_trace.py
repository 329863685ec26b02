"""The spans of one request:

    POST /v1/chat/completions       from the client's head to the last byte (server)
      admission                     waiting for room
      route                         the decision, with what each engine would have cost as events
      chat MODEL                    one per engine tried and per leg (client); parent of the engine's span
        first byte                  from the request's departure to the reply's first body byte

Contexts are passed explicitly: a task may serve many requests, and a request may move between tasks.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.routing.route import Decision
from spillway_gateway.tracing import attributes as names
from spillway_gateway.tracing.attributes import Attributes, candidate_events, operation_of, route_attributes
from spillway_gateway.upstream.forward import Headers
from spillway_gateway.upstream.usage import NO_USAGE, Usage

CANDIDATES_MAX = 64  # events of one decision; a larger fleet is cut
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_propagator = TraceContextTextMapPropagator()


class RequestTrace:
    """The spans of one request. On the event loop. Each method may be called in any state and never raises. A request
    that is not sampled has only the outer span's ids, which the engine receives as "not sampled"."""

    __slots__ = ("_context", "_hinted", "_name", "_span", "_tracer", "headers", "sampled")

    def __init__(self, tracer: Tracer, method: str, route: str, headers: Headers) -> None:
        self._tracer = tracer
        self._hinted: str | None = None
        parent = _propagator.extract(_carrier(headers), Context())
        self._span = tracer.start_span(
            f"{method} {route}",
            parent,
            SpanKind.SERVER,
            {names.HTTP_METHOD: method, names.HTTP_ROUTE: route},
        )
        self._context = set_span_in_context(self._span, Context())
        self._name = operation_of(route)
        self.sampled = self._span.is_recording()
        self.headers = _with_context(headers, self._span.get_span_context())

    def prepared(self, model: str, request_id: bytes, *, stream: bool) -> None:
        """The request has been parsed."""
        if self.sampled:
            self._span.set_attributes(
                {
                    names.OPERATION: self._name,
                    names.MODEL: model,
                    names.STREAM: stream,
                    names.REQUEST_ID: request_id.decode("latin-1"),
                }
            )

    def hinted(self, engine: str) -> None:
        """The engine is sent the request's prefix, while the request waits."""
        self._hinted = engine

    def admitted(self, asked_ns: int) -> None:
        """asked_ns: time_ns() at which the request asked for admission."""
        if self.sampled:
            attributes = {names.PROMOTION_ENGINE: self._hinted} if self._hinted is not None else None
            self._tracer.start_span("admission", self._context, attributes=attributes, start_time=asked_ns).end()

    def routed(self, asked_ns: int, decision: Decision) -> None:
        """A decision was taken. asked_ns: time_ns() at which it began."""
        if not self.sampled:
            return
        span = self._tracer.start_span(
            "route", self._context, attributes=route_attributes(decision), start_time=asked_ns
        )
        for candidate in candidate_events(decision)[:CANDIDATES_MAX]:
            span.add_event("candidate", candidate)
        span.end()

    def attempt(
        self,
        model: str,
        engine: Engine,
        headers: Headers,
        *,
        again: bool,
        continues_after: int | None = None,
        leg: str | None = None,
    ) -> AttemptTrace | None:
        """The request is sent to an engine. None when it is not sampled. headers: the caller's. again: a retry.
        continues_after: the answer goes on from another engine's, after so many tokens. leg: of two, prefill or
        decode."""
        if not self.sampled:
            return None
        span = self._tracer.start_span(
            f"{self._name} {model}",
            self._context,
            SpanKind.CLIENT,
            {
                names.OPERATION: self._name,
                names.MODEL: model,
                names.ENGINE: engine.name,
                names.SERVER_ADDRESS: engine.host,
                names.SERVER_PORT: engine.port,
                names.RETRY: again,
            },
        )
        if continues_after is not None:
            span.set_attribute(names.CONTINUED_TOKENS, continues_after)
        if leg is not None:
            span.set_attribute(names.LEG, leg)
        return AttemptTrace(self._tracer, span, _with_context(headers, span.get_span_context()))

    def end(self, status: int, error: str | None, usage: Usage = NO_USAGE) -> None:
        """status: as the client received it, 499 after a disconnect, 0 for none. error: code of the gateway's error."""
        if self.sampled:
            counts = zip((names.INPUT_TOKENS, names.CACHED_TOKENS, names.OUTPUT_TOKENS), _in_order(usage), strict=True)
            known: Attributes = {name: tokens for name, tokens in counts if tokens is not None}
            if status:
                known[names.HTTP_STATUS] = status
            if error is not None or status >= 500:
                known[names.ERROR_TYPE] = error or str(status)
                self._span.set_status(Status(StatusCode.ERROR))
            self._span.set_attributes(known)
        self._span.end()


class AttemptTrace:
    """One attempt on one engine. headers: for the engine, with this attempt's context in place of the caller's."""

    __slots__ = ("_context", "_sent_ns", "_span", "_tracer", "headers")

    def __init__(self, tracer: Tracer, span: Span, headers: Headers) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._sent_ns = time.time_ns()
        self.headers = headers

    def first_byte(self) -> None:
        """The first body byte of the engine's reply has arrived."""
        now = time.time_ns()
        self._tracer.start_span("first byte", self._context, start_time=self._sent_ns).end(now)
        self._span.set_attribute(names.FIRST_CHUNK_SECONDS, (now - self._sent_ns) / 1e9)

    def end(self, status: int, error: str | None) -> None:
        """status: The status of the engine's reply, 0 without one. error: Why the attempt failed."""
        if status:
            self._span.set_attribute(names.HTTP_STATUS, status)
        if error is not None:
            self._span.set_attribute(names.ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _in_order(usage: Usage) -> tuple[int | None, int | None, int | None]:
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def _carrier(headers: Headers) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE_HEADERS}


def _with_context(headers: Headers, context: SpanContext) -> Headers:
    """The headers with this span as the parent; the caller's tracestate is passed on."""
    flags = int(context.trace_flags)
    kept = [pair for pair in headers if pair[0] not in _TRACE_HEADERS]
    kept.append((b"traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}".encode()))
    if context.trace_state:
        kept.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
    return kept
