"""Builds the application; its lifespan owns every client, task and thread, and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from spillway_gateway import logs
from spillway_gateway.access.audit import AuditLog
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.api.dispatch import InferenceDispatch
from spillway_gateway.api.inference import InferenceContext, InferenceEndpoint, StoredResponseEndpoint
from spillway_gateway.api.models import ModelList
from spillway_gateway.api.openapi import openapi_document
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.api.stored_responses import ResponseOwners
from spillway_gateway.client import descriptors
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.follower import ConfigFollower
from spillway_gateway.config.settings import GatewayConfig
from spillway_gateway.config.tracing import TracingConfig
from spillway_gateway.error_bodies import body_of, error_body
from spillway_gateway.errors import GatewayError
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.ops.discovery_report import discovered, discovery_families
from spillway_gateway.ops.live_families import access_families, config_families, connection_families, live_families
from spillway_gateway.ops.operations import Operations
from spillway_gateway.ops.ui.page_routes import PageRoutes
from spillway_gateway.roster.engine_tasks import Clients, guarded
from spillway_gateway.roster.roster import Roster
from spillway_gateway.roster.served import model_not_found
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.upstream.outbound import UpstreamServices
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.retry import RetryBudget

if TYPE_CHECKING:
    from spillway_gateway.tracing.exporting import Tracing

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
POOL_TRIM_SECONDS = 1.0


class Gateway:
    """The assembled gateway of one process. `app` is what a server runs, `ops_app` what the operations listener runs;
    the rest is for the server and for tests. config_path: the file to follow, if any."""

    def __init__(self, config: GatewayConfig, config_path: Path | None = None) -> None:
        self.config = config
        self.lifecycle = Lifecycle()
        self.metrics = GatewayMetrics()
        self.gatekeeper = Gatekeeper(config.auth)
        self.audit = AuditLog(config.audit) if config.audit.enabled else None
        self.tracing = _tracing(config.tracing)
        self._tokenizing = FairThreads(TOKENIZER_THREADS, "tokenizer")
        self.roster = Roster(config, self.metrics, self._tokenizing)
        self.models = self.roster.models
        self.fleets = self.roster.fleets
        self.admissions = self.roster.admissions
        shares = self._shares(config)
        self.open_connections = OpenConnections(config.connections, shares.clients)
        self.services = UpstreamServices(
            pool=ConnectionPool(shares.upstream, config.timeouts.connect_seconds, time.monotonic),
            budget=RetryBudget(config.limits.retry_ratio, config.limits.retry_burst),
            metrics=self.metrics,
            timeouts=config.timeouts,
            limits=config.limits,
            running=self.lifecycle.running,
            admissions=self.admissions,
            recent=Recent(),
        )
        self.follower = ConfigFollower(config_path, config, self.apply) if config_path is not None else None
        self.metrics.watch(lambda: live_families(self.fleets))
        self.metrics.watch(lambda: discovery_families(self.roster.sources, self.fleets))
        self.metrics.watch(lambda: connection_families(self.open_connections))
        self.metrics.watch(lambda: access_families(self.admissions, self.gatekeeper, self.audit))
        if self.follower is not None:
            follower = self.follower
            self.metrics.watch(
                lambda: config_families(
                    follower.applied_total,
                    follower.refused_total,
                    refused_now=follower.refused_now,
                    restart_pending=bool(follower.restart_pending),
                )
            )
        self.operations = operations = Operations(
            self.fleets,
            self.lifecycle,
            self.metrics,
            self.gatekeeper,
            lambda: self.config,
            discovered=lambda: discovered(self.roster.sources, self.fleets),
        )
        page = PageRoutes(self.fleets, self.admissions, self.services.recent, self.lifecycle, self.gatekeeper)
        self.app = self._build_app(operations, page)
        self.ops_app = Starlette(
            routes=[
                *operations.probe_routes(),
                *operations.operator_routes(asks_for_key=False),
                *page.routes(asks_for_key=False),
            ],
            exception_handlers={HTTPException: _http_error},
        )
        self.ops_app.router.redirect_slashes = False

    def _shares(self, config: GatewayConfig) -> descriptors.DescriptorShares:
        wanted = config.connections.open_max, config.limits.upstream_connections_max
        engines = sum(len(fleet.engines) for fleet in self.fleets)
        given = descriptors.shares(descriptors.limit(), *wanted, engines)
        if (given.clients, given.upstream) != wanted:
            logger.warning(
                "ulimit -n is %d: connections.openMax counts as %d, limits.upstreamConnectionsMax as %d; raise it, or "
                "set them lower",
                descriptors.limit(),
                given.clients,
                given.upstream,
            )
        return given

    async def apply(self, config: GatewayConfig) -> None:
        """Put a changed configuration into effect, as far as config_follower.LIVE_SECTIONS goes."""
        before = self.config
        await self.roster.apply(config)
        services, limits = self.services, config.limits
        services.timeouts, services.limits = config.timeouts, limits
        services.pool.connections_max = self._shares(config).upstream
        services.pool.connect_timeout_seconds = config.timeouts.connect_seconds
        if (limits.retry_ratio, limits.retry_burst) != (before.limits.retry_ratio, before.limits.retry_burst):
            services.budget = RetryBudget(limits.retry_ratio, limits.retry_burst)
        if config.log != before.log:
            logs.apply(config.log)
        self.config = config

    def _build_app(self, operations: Operations, page: PageRoutes) -> InferenceDispatch:
        app = FastAPI(
            title="Spillway gateway", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan
        )
        app.router.redirect_slashes = False  # it would send clients to whatever host they name
        context = InferenceContext(
            models=self.models,
            upstream=self.services,
            lifecycle=self.lifecycle,
            gatekeeper=self.gatekeeper,
            response_owners=ResponseOwners(),
            audit=self.audit,
            tracing=self.tracing,
        )
        # Raw ASGI endpoints, first in the list: no model of FastAPI's touches an inference body.
        endpoints = {route.path: InferenceEndpoint(route, context) for route in ROUTES}
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        stored = "/v1/responses/{response_id}"
        routes.append(Route(stored, StoredResponseEndpoint("GET", "", context), methods=["GET"]))
        routes.append(Route(stored + "/cancel", StoredResponseEndpoint("POST", "/cancel", context), methods=["POST"]))
        routes.append(Route("/openapi.json", self._openapi))
        routes += operations.probe_routes()
        if self.config.listen.ops_port is None:
            routes += [*operations.operator_routes(asks_for_key=True), *page.routes(asks_for_key=True)]
        app.router.routes[:0] = routes

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            try:
                cards = await self.model_list.read(self.gatekeeper.tenant_of(request.headers.raw))
            except GatewayError as error:
                return Response(body_of(error), error.status, media_type="application/json")
            return JSONResponse({"object": "list", "data": list(cards.values())})

        @app.get("/v1/models/{model:path}")
        async def model(request: Request, model: str) -> Response:
            try:
                cards = await self.model_list.read(self.gatekeeper.tenant_of(request.headers.raw))
                if model not in cards:
                    raise model_not_found(model, cards)
            except GatewayError as error:
                return Response(body_of(error), error.status, media_type="application/json")
            return JSONResponse(cards[model])

        app.add_exception_handler(HTTPException, _http_error)

        @app.exception_handler(Exception)
        async def own_fault(request: Request, error: Exception) -> Response:
            body = error_body("The gateway failed on this request", "server_error", None, "internal_error")
            return Response(body, 500, media_type="application/json")

        return InferenceDispatch(endpoints, app)

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_document(keys=self.gatekeeper.enabled))

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.audit is not None:
                stack.push_async_callback(asyncio.to_thread, self.audit.close)
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.callback(self._tokenizing.close)
            stack.callback(self.services.pool.close)
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
            )
            self.model_list = ModelList(self.fleets, session)
            self.roster.start(Clients(session, context))
            stack.push_async_callback(self.roster.stop)
            if self.gatekeeper.shared is not None:
                stack.push_async_callback(self.gatekeeper.shared.close)
            tasks = await stack.enter_async_context(_cancelled_at_exit())
            tasks.append(asyncio.create_task(self._trim_pool()))
            tasks.append(asyncio.create_task(guarded(self.gatekeeper.follow(), "keys file")))
            if self.gatekeeper.shared is not None:
                tasks.append(asyncio.create_task(guarded(self.gatekeeper.shared.run(), "shared limits")))
            if self.follower is not None:
                tasks.append(asyncio.create_task(guarded(self.follower.run(), "configuration file")))
            yield

    async def _trim_pool(self) -> None:
        while True:
            await asyncio.sleep(POOL_TRIM_SECONDS)
            self.services.pool.trim()


def _tracing(config: TracingConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    from spillway_gateway.tracing.exporting import Tracing  # noqa: PLC0415 - 20 MB that nobody else needs

    return Tracing(config)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"Unknown route: {request.method} {request.url.path}", "unknown_route"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    body = error_body(message, "invalid_request_error", None, code)
    return Response(body, error.status_code, error.headers, media_type="application/json")


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
