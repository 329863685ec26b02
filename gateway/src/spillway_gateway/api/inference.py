"""An inference request in the gateway: authenticate, read, parse, match the prompt, relay.

Raw ASGI endpoints: the body is read once and goes to the engine as the bytes that arrived. It is parsed for routing and
quotas alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from spillway_gateway.access.audit import AuditLine, AuditLog, now_text
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Tenant
from spillway_gateway.access.limits import NOTHING_OWED, Settlement, give_back, settle
from spillway_gateway.api.body_errors import too_deep
from spillway_gateway.api.body_reading import read_body
from spillway_gateway.api.engine_fields import engine_members
from spillway_gateway.api.large_bodies import SHORT_BODY_BYTES_MAX, LargeBodies
from spillway_gateway.api.private_replies import PrivateReply
from spillway_gateway.api.retention import granted
from spillway_gateway.api.routes import ApiRoute, Salting
from spillway_gateway.api.session_hints import SessionSources, session_hint
from spillway_gateway.client.connection import EXTENSION, ClientRequest
from spillway_gateway.config.settings import RetentionConfig
from spillway_gateway.error_bodies import Dialect, body_of, headers_of
from spillway_gateway.errors import GatewayDraining, GatewayError, ResponseNotFound
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.stored_responses import Owner, response_id_in
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.roster.objectives import Objectives
from spillway_gateway.roster.served import ServedModel, named_model
from spillway_gateway.tokens.estimates import holds_media
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt
from spillway_gateway.upstream.exchange import ClientDisconnected
from spillway_gateway.upstream.first_leg import why_one_leg
from spillway_gateway.upstream.forward import Headers, first_values, header
from spillway_gateway.upstream.outbound import OutboundRequest, UpstreamServices
from spillway_gateway.upstream.relay import Relay
from spillway_gateway.upstream.router import Admitted, Router
from spillway_gateway.upstream.splice import MemberValue, insert_member
from spillway_gateway.upstream.trace_context import new_request_id, trace_id
from spillway_gateway.upstream.usage import Usage
from spillway_settings.wire import RETENTION_MEMBER, SESSION_MEMBER

if TYPE_CHECKING:  # OpenTelemetry is imported only if traces are exported
    from spillway_gateway.tracing.exporting import Tracing
    from spillway_gateway.tracing.request_trace import RequestTrace

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")  # the second is the older name
# Visible ASCII: the id goes into logs, where a NEL or another control character would break the line.
_REQUEST_ID = re.compile(rb"[!-~]{1,256}")


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """The objects that the endpoints of all inference routes share. models: by name and by alias; a new configuration
    replaces the mapping's contents."""

    models: Mapping[str, ServedModel]
    upstream: UpstreamServices
    lifecycle: Lifecycle
    gatekeeper: Gatekeeper
    audit: AuditLog | None
    session_sources: SessionSources
    retention: RetentionConfig
    objectives: Objectives
    tracing: Tracing | None = None
    large_bodies: LargeBodies = field(default_factory=LargeBodies)


class InferenceEndpoint:
    """ASGI endpoint for POST of one route of the table."""

    def __init__(self, route: ApiRoute, context: InferenceContext) -> None:
        self._route = route
        self._path = route.path.encode()
        self._context = context

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        route = self._route
        await serve(self._context, scope, receive, send, route=route.path, dialect=route.dialect, prepare=self._prepare)

    async def _prepare(
        self, tenant: Tenant, headers: Headers, receive: Receive, client: ClientRequest, request_id: bytes
    ) -> tuple[OutboundRequest, ServedModel]:
        try:
            return await self._read(tenant, headers, receive, client, request_id)
        except RecursionError:  # from parsing, rendering or matching by text
            raise too_deep() from None

    async def _read(
        self, tenant: Tenant, headers: Headers, receive: Receive, client: ClientRequest, request_id: bytes
    ) -> tuple[OutboundRequest, ServedModel]:
        route, context = self._route, self._context
        upstream, config = context.upstream, context.upstream.live.current
        limits = config.limits
        first = first_values(headers)
        body = await read_body(headers, first, receive, client, limits=limits, timeouts=config.timeouts)
        received_at = perf_counter()
        large = len(body) > SHORT_BODY_BYTES_MAX
        if large:
            parsed = await context.large_bodies.parse(route, body, limits.text_chars_max, tenant.name)
        else:
            parsed = route.parse(body)
        served, adapter = named_model(context.models, parsed.model, tenant)
        model = served.fleet.name
        gatekeeper = context.gatekeeper
        gatekeeper.allow_model(tenant, parsed.model or model, model)
        source = parsed.prompt
        replaced: dict[str, MemberValue] = {}
        inserted: dict[str, MemberValue] = {}
        if parsed.model is not None and parsed.model != (adapter or model):
            replaced["model"] = adapter or model
        if tenant.counts_prompts:
            media = not parsed.reports_usage and isinstance(source, ChatPrompt) and holds_media(source.messages)
            gatekeeper.allow_uncounted(
                tenant,
                route.path,
                prompt_counts=parsed.counts_prompt and not media,
                reply_counts=parsed.counts_reply,
            )
        if parsed.background:
            gatekeeper.allow_background(tenant)
        salting = route.salting_of(parsed, served.fleet.oldest_vllm, served.fleet.prompt_tokens_max)
        if salting is Salting.UNKNOWN:
            gatekeeper.allow_unsalted(route.path)
        if route.takes_salt:
            salt = gatekeeper.salt(tenant, source.cache_salt)
            if salt is not None:
                (replaced if parsed.names_salt else inserted)["cache_salt"] = salt
            if salting is Salting.FIELD:
                # The engine hashes the salt into the first block, and so does routing.
                source = structs.replace(source, cache_salt=salt)
        prompt = await served.reader.read(source, tenant.name, adapter=adapter)
        if (tokens := parsed.tokens_of(prompt.prompt_tokens)) != prompt.prompt_tokens:
            prompt = structs.replace(prompt, prompt_tokens=tokens, text_tokens=0)
        continuation = upstream.live.current.continuation
        asks_ids = parsed.plain_stream and continuation.enabled and prompt.prompt_tokens < continuation.tokens_max
        asks_ids = asks_ids and client.engine_connections is None  # a proxy sends a request once
        if asks_ids:
            inserted["return_token_ids"] = True
        session = session_hint(tenant.name, first, context.session_sources.name(first, parsed.session_names))
        own: dict[str, Any] = {} if session is None else {SESSION_MEMBER: session.member}
        retained = None
        if parsed.retention and route.takes_transfer_params:
            retained = granted(parsed.retention, prompt.prompt_tokens, tenant, context.retention)
            outcome = "refused" if retained is None else "shortened" if retained.shortened else "granted"
            metrics = upstream.metrics
            metrics.retentions(model, outcome).inc()
            if retained is not None:
                own[RETENTION_MEMBER] = retained.member
                metrics.retained_token_hours(model).inc(retained.token_hours)
        given = parsed.engine_fields
        members = engine_members(
            given,
            body,
            own,
            steers=gatekeeper.may_steer(tenant, by_connector=served.fleet.disaggregation.by_connector),
            takes_transfer_params=route.takes_transfer_params,
        )
        for name, value in members.items():
            (inserted if getattr(given, name) is msgspec.UNSET else replaced)[name] = value
        if replaced or inserted:
            client.forget_given_body()  # one of the two stands in memory while the request waits
        if large and (replaced or inserted):
            body = await context.large_bodies.set_texts(route, body, replaced, inserted)
        else:
            for name, text in replaced.items():
                body = route.set_text(body, name, text)
            for name, value in inserted.items():
                body = insert_member(body, name, value)
        only_engine = None
        charged_tokens = parsed.charged_tokens
        if parsed.previous_response is not None:
            owner = await upstream.router.owner_of(parsed.previous_response, tenant.name)
            if owner is not None and owner.model == model:
                only_engine = owner.engine
                charged_tokens += owner.tokens
            elif gatekeeper.enabled:
                raise _no_response(parsed.previous_response)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s of tenant %r for model %s: %d prompt tokens in %d blocks; salted: %s, session: %s, "
                "adapter: %s, may be continued: %s, only engine: %s",
                request_id.decode("latin-1"),
                tenant.name,
                model,
                prompt.prompt_tokens,
                len(prompt.keys),
                source.cache_salt is not None,
                session is not None,
                adapter,
                asks_ids,
                only_engine,
            )
        stored = _StoredResponse(upstream.router, tenant.name, model) if route.keeps_responses else None
        outbound = OutboundRequest(
            self._path,
            gatekeeper.engine_headers(headers),
            body,
            request_id,
            parsed.stream,
            prompt,
            received_at,
            tenant.name,
            gatekeeper.priority(tenant, self._objective(served.fleet, first)),
            dialect=route.dialect,
            retryable=route.retryable,
            only_engine=only_engine,
            on_reply=stored.on_reply if stored is not None else None,
            charged_tokens=charged_tokens,
            on_end=stored.on_end if stored is not None else None,
            asks_ids=asks_ids,
            session=session.key if session is not None else None,
            adapter=adapter,
            choices=parsed.choices,
            reply_tokens_max=parsed.reply_tokens_max,
            retained_token_hours=None if retained is None else retained.token_hours,
            one_leg=await why_one_leg(
                served.fleet,
                prompt,
                body,
                known=route.two_legs,
                single=not parsed.other_tokens and given.kv_transfer_params is msgspec.UNSET,
                choices=parsed.choices,
                proxied=client.engine_connections is not None,
            ),
        )
        return outbound, served

    def _objective(self, fleet: ModelFleet, headers: Mapping[bytes, bytes]) -> int | None:
        """Return the priority of the InferenceObjective that the request names; None if it names no known one."""
        for each in _OBJECTIVE_HEADERS:
            name = headers.get(each)
            if name is not None:
                return self._context.objectives.priority(fleet, name.decode("latin-1"))
        return None


class _StoredResponse:
    """A response that its engine may store: records its owner, and the tokens that continuing it will take."""

    def __init__(self, router: Router, tenant: str, model: str) -> None:
        self._router = router
        self._tenant = tenant
        self._model = model
        self._id: str | None = None

    def on_reply(self, engine: str, reply_start: bytes) -> None:
        response_id = response_id_in(reply_start)
        if response_id is not None and self._router.record_response(
            response_id, Owner(self._tenant, self._model, engine)
        ):
            self._id = response_id

    def on_end(self, usage: Usage) -> None:
        if self._id is not None:
            tokens = (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)
            self._router.set_response_tokens(self._id, self._tenant, tokens)


class StoredResponseEndpoint:
    """ASGI endpoint for GET /v1/responses/{response_id} and POST .../cancel: forwards to the engine that made the
    response."""

    def __init__(self, method: str, suffix: str, context: InferenceContext) -> None:
        self._method = method.encode()
        self._suffix = suffix
        self._context = context

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        response_id: str = scope["path_params"]["response_id"]
        query: bytes = scope["query_string"]

        async def prepare(
            tenant: Tenant, headers: Headers, receive: Receive, client: ClientRequest, request_id: bytes
        ) -> tuple[OutboundRequest, ServedModel]:
            context = self._context
            live, first = context.upstream.live, first_values(headers)
            body = await read_body(headers, first, receive, client, limits=live.limits, timeouts=live.timeouts)
            received_at = perf_counter()
            owner = await context.upstream.router.owner_of(response_id, tenant.name)
            served = context.models.get(owner.model) if owner is not None else None
            if owner is None or served is None or owner.engine not in served.fleet.engines:
                raise _no_response(response_id)
            path = f"/v1/responses/{response_id}{self._suffix}".encode()
            outbound = OutboundRequest(
                path + b"?" + query if query else path,
                context.gatekeeper.engine_headers(headers),
                body,
                request_id,
                b"stream=true" in query.lower(),
                await served.reader.read(CompletionPrompt("")),
                received_at,
                tenant.name,
                tenant.priority,
                method=self._method,
                dialect=Dialect.RESPONSES,
                only_engine=owner.engine,
                computes=False,
            )
            return outbound, served

        route = f"/v1/responses/{{response_id}}{self._suffix}"
        await serve(self._context, scope, receive, send, route=route, dialect=Dialect.RESPONSES, prepare=prepare)


Prepare = Callable[[Tenant, Headers, Receive, ClientRequest, bytes], Awaitable[tuple[OutboundRequest, ServedModel]]]


async def serve(
    context: InferenceContext,
    scope: MutableMapping[str, Any],
    receive: Receive,
    send: Send,
    *,
    route: str,
    dialect: Dialect,
    prepare: Prepare,
) -> None:
    """Authenticate, prepare, check the tenant's limits, relay; then settle the limits and write the audit line.

    route: the path with names in place of ids. dialect: of error answers. prepare: reads and parses the request."""
    headers: Headers = scope["headers"]
    client: ClientRequest = scope["extensions"][EXTENSION]
    trace: RequestTrace | None = None
    if context.tracing is not None:
        trace = context.tracing.request(scope["method"], route, headers)
        headers = trace.headers
    request_id = _request_id(header(headers, b"x-request-id"))
    started = perf_counter()
    tenant: Tenant | None = None
    outbound: OutboundRequest | None = None
    try:
        tenant = context.gatekeeper.tenant_of(headers)
        if context.lifecycle.closed:
            raise GatewayDraining("This gateway is shutting down; send the request again.")
        outbound, served = await prepare(tenant, headers, receive, client, request_id)
        if trace is not None:
            trace.prepared(served.fleet.name, request_id, stream=outbound.stream)
            outbound = structs.replace(outbound, trace=trace)
        admitted = await context.upstream.router.begin(tenant, outbound.prompt.prompt_tokens + outbound.charged_tokens)
    except ClientDisconnected:
        if tenant is not None:
            await _count_failed(context.upstream.router, tenant)
        if trace is not None:
            trace.end(499, None)
        return
    except GatewayError as error:  # under no other name: its traceback holds the body, and would outlive the request
        if tenant is not None and outbound is None and error.status < 500:
            error = await _count_failed(context.upstream.router, tenant) or error
        await send_error(send, error, request_id, dialect)
        if trace is not None:
            trace.end(error.status, error.code)
        if context.audit is not None:
            context.audit.write(
                AuditLine(
                    time=now_text(),
                    request_id=request_id.decode("latin-1"),
                    trace_id=trace_id(headers),
                    tenant=(tenant.name or None) if tenant is not None else None,
                    model=None,
                    path=scope["path"],
                    status=error.status,
                    error=error.code,
                    milliseconds=_milliseconds(perf_counter() - started),
                )
            )
        return
    steers = context.gatekeeper.may_steer(tenant, by_connector=served.fleet.disaggregation.by_connector)
    private = None if steers else PrivateReply(client, send)
    place = _Place(admitted, outbound)
    ends: list[Callable[[], object]] = [place.leave]
    try:
        relay = place.relay = Relay(
            outbound,
            served.fleet,
            context.upstream,
            client if private is None else private,
            send if private is None else private.send,
        )
        if context.audit is not None:
            audit = context.audit
            ends.append(
                lambda: audit.write(_audit_line(relay, outbound, headers, scope["path"], perf_counter() - started))
            )
        if trace is not None:
            ended = trace
            ends.append(lambda: ended.end(relay.reply.status, relay.reply.error_code, relay.reply.counts.usage))
        ends.append(lambda: relay.reply.count_cached(relay.attempt))
        if outbound.on_end is not None:
            on_end = outbound.on_end
            ends.append(lambda: on_end(relay.reply.counts.usage))
        await relay.run()
    finally:
        _run_all(ends)


def _run_all(ends: list[Callable[[], object]]) -> None:
    """Run all, the last one first. Each runs even if another one raises."""
    if ends:
        try:
            ends.pop()()
        finally:
            _run_all(ends)


async def _count_failed(router: Router, tenant: Tenant) -> GatewayError | None:
    """Count a request that reached no engine through its own fault as one of the tenant's requests. Returns the refusal
    if the tenant's limits are reached."""
    try:
        admitted = await router.begin(tenant, 0)
    except GatewayError as refusal:
        return refusal
    admitted.end(NOTHING_OWED)
    return None


class _Place:
    """An admitted request among those of its tenant. relay: once there is one."""

    def __init__(self, admitted: Admitted, outbound: OutboundRequest) -> None:
        self._admitted = admitted
        self._outbound = outbound
        self.relay: Relay | None = None

    def leave(self) -> None:
        """Give the place back, even if the request's tokens are not known."""
        settlement = NOTHING_OWED
        try:
            settlement = self._settlement()
        finally:
            self._admitted.end(settlement)

    def _settlement(self) -> Settlement:
        outbound, relay = self._outbound, self.relay
        estimated = outbound.prompt.prompt_tokens + outbound.charged_tokens
        if relay is None or relay.attempt is None:  # no engine had room or was ready, and nothing was computed
            return give_back(estimated)
        counted = relay.reply.counts.usage
        return settle(estimated, counted.prompt_tokens, counted.completion_tokens or 0)


def _request_id(given: bytes | None) -> bytes:
    found = _REQUEST_ID.match(given) if given is not None else None
    return found[0] if found is not None else new_request_id()


def _audit_line(relay: Relay, outbound: OutboundRequest, headers: Headers, path: str, seconds: float) -> AuditLine:
    reply, usage, attempt = relay.reply, relay.reply.counts.usage, relay.attempt
    first_byte = reply.stream.first_byte_seconds
    return AuditLine(
        time=now_text(),
        request_id=outbound.request_id.decode("latin-1"),
        trace_id=trace_id(headers),
        tenant=outbound.tenant or None,
        model=outbound.adapter or relay.model,
        path=path,
        engine=attempt.engine.name if attempt is not None else None,
        route=attempt.decision.reason.value if attempt is not None else None,
        status=reply.status,
        error=reply.error_code,
        stream=outbound.stream,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else outbound.prompt.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        retained_token_hours=outbound.retained_token_hours,
        milliseconds=_milliseconds(seconds),
        first_byte_milliseconds=_milliseconds(first_byte) if first_byte is not None else None,
    )


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _no_response(response_id: str) -> ResponseNotFound:
    shown = response_id if len(response_id) <= 200 else response_id[:200] + "..."
    return ResponseNotFound(f"No response {shown!r} is known here; engines keep responses in memory, and only some do")


async def send_error(send: Send, error: GatewayError, request_id: bytes, dialect: Dialect) -> None:
    body = body_of(error, dialect)
    headers = [*headers_of(error), (b"content-length", str(len(body)).encode()), (b"x-request-id", request_id)]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
