"""Builds the gateway. Its lifespan owns every client, task and thread, and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import zmq.asyncio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spillway_gateway import logs
from spillway_gateway.access.audit import AuditLog
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.api.application import client_application, http_error
from spillway_gateway.api.dispatch import InferenceDispatch
from spillway_gateway.api.inference import InferenceContext
from spillway_gateway.api.models import ModelList
from spillway_gateway.api.session_hints import SessionSources
from spillway_gateway.background import supervised
from spillway_gateway.client import descriptors
from spillway_gateway.client.cors import Cors
from spillway_gateway.client.open_connections import OpenConnections
from spillway_gateway.config.follower import ConfigFollower
from spillway_gateway.config.live import LiveConfig
from spillway_gateway.config.settings import GatewayConfig
from spillway_gateway.config.tracing import TracingConfig
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.ops.discovery_report import discovered, discovery_families
from spillway_gateway.ops.live_families import (
    access_families,
    audit_families,
    config_families,
    connection_families,
    live_families,
    process_families,
)
from spillway_gateway.ops.operations import Operations
from spillway_gateway.ops.serving import Serving, ThisProcess
from spillway_gateway.ops.ui.page_routes import PageRoutes
from spillway_gateway.roster.engine_tasks import Clients
from spillway_gateway.roster.local_engines import LocalEngines
from spillway_gateway.roster.model_engines import ModelEngines
from spillway_gateway.roster.objectives import Objectives
from spillway_gateway.roster.roster import Roster
from spillway_gateway.routing.hot_prefixes import HotPrefix
from spillway_gateway.scaling.pod_costs import PodCosts
from spillway_gateway.scaling.warm_starts import WarmStarts
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.upstream.continuation.sent_answer import KeptBytes
from spillway_gateway.upstream.local_router import LocalRouter
from spillway_gateway.upstream.outbound import UpstreamServices
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.promotion_hints import PromotionHints
from spillway_gateway.upstream.retry import RetryBudget
from spillway_gateway.upstream.router import Router
from spillway_gateway.upstream.suspects import EngineLooks, Suspects
from spillway_settings.gateway_memory import TOKENIZER_THREADS

if TYPE_CHECKING:
    from spillway_gateway.tracing.exporting import Tracing

logger = logging.getLogger(__name__)

POOL_TRIM_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The process that routes and counts for a gateway which only serves clients.

    router, engines: ask that process. answer_operator: has it answer operators' routes.
    """

    router: Router
    engines: ModelEngines
    answer_operator: Callable[[Request], Awaitable[Response]]


class Gateway:
    """The assembled gateway of one process. `app` is the ASGI application of the main listener, `ops_app` that of the
    operations listener; the rest is for the server and for tests.

    Args:
        config: the configuration at the start.
        config_path: the file to follow, if any.
        elsewhere: what routes and counts in its place; None: it does so itself.
        serving: the processes that accept clients, given this one's metrics.
    """

    def __init__(
        self,
        config: GatewayConfig,
        config_path: Path | None = None,
        *,
        elsewhere: Elsewhere | None = None,
        serving: Callable[[GatewayMetrics], Serving] = ThisProcess,
    ) -> None:
        self.live = live = LiveConfig(config)
        self.on_applied: list[Callable[[GatewayConfig], None]] = []
        self.lifecycle = Lifecycle()
        self.metrics = GatewayMetrics()
        self.serving = serving(self.metrics)
        self.cors = Cors(config.cors)
        self.gatekeeper = Gatekeeper(config.auth)
        self.audit = AuditLog(config.audit) if config.audit.enabled else None
        self.tracing = _tracing(config.tracing)
        self._tokenizing = FairThreads(TOKENIZER_THREADS, "tokenizer")
        local_engines = LocalEngines(config, self.metrics)
        self.admissions, self.sources = local_engines.admissions, local_engines.sources  # empty if they are elsewhere
        self.engines = local_engines if elsewhere is None else elsewhere.engines
        self.roster = Roster(config, self.metrics, self._tokenizing, self.engines)
        self.models = self.roster.models
        self.fleets = self.roster.fleets
        self._shares = shares = self._descriptor_shares(config)
        self.open_connections = OpenConnections(
            config.connections,
            shares.clients,
            bodies_bytes_max=lambda: live.limits.bodies_bytes_max,
            replies_bytes_max=lambda: live.limits.replies_bytes_max,
        )
        self.promotion_hints = PromotionHints(self.metrics)
        self.suspects = Suspects(lambda: live.limits.suspect_seconds)
        self.recent = Recent()
        self.router = (
            elsewhere.router
            if elsewhere is not None
            else LocalRouter(self.admissions, self.gatekeeper, self.suspects, self.promotion_hints, self.recent)
        )
        self.pod_costs = PodCosts(self.fleets)
        self.objectives = Objectives(self.fleets)

        def lies_in_store(fleet: ModelFleet, prefix: HotPrefix) -> bool:
            # Elsewhere the index is, too; an engine drops a hint of which it finds nothing.
            return elsewhere is not None or fleet.index.in_a_store((prefix.key,)) > 0

        self.warm_starts = WarmStarts(
            self.fleets, self.roster.hot_prefixes, self.promotion_hints, lies_in_store=lies_in_store
        )
        self._beside: dict[str, Callable[[], Coroutine[object, object, None]]] = {}  # the requests: tasks, by name
        if elsewhere is None:
            self._beside["deletion costs of pods"] = self.pod_costs.run
        if elsewhere is not None or config.processes == 1:  # others have no prompts
            self._beside["warm starts"] = self.warm_starts.run
            if config.listen.picker_port is not None:
                self._beside["InferenceObjectives"] = self.objectives.run
        pool = ConnectionPool(lambda: self._shares.upstream, lambda: live.timeouts.connect_seconds, time.monotonic)
        self.services = UpstreamServices(
            router=self.router,
            pool=pool,
            budget=RetryBudget(lambda: live.limits),
            metrics=self.metrics,
            live=live,
            running=self.lifecycle.running,
            kept=KeptBytes(lambda: live.continuation.bytes_max),
            suspects=self.suspects,
            looks=EngineLooks(pool),
        )
        self.follower = ConfigFollower(config_path, config, self.apply) if config_path is not None else None
        if elsewhere is None:
            self._collect_router_families()
        self.metrics.collect_from(self.warm_starts.families)
        self.metrics.collect_from(lambda: connection_families(self.open_connections))
        self.metrics.collect_from(lambda: audit_families(self.audit))
        self.operations = operations = Operations(
            self.fleets,
            self.lifecycle,
            self.serving,
            self.gatekeeper,
            lambda: self.config,
            discovered=lambda: discovered(self.sources, self.fleets),
        )
        self.page = page = PageRoutes(self.fleets, self.admissions, self.recent, self.lifecycle, self.gatekeeper)
        self.app = self._build_app(operations, page, elsewhere)
        self.ops_app = Starlette(
            routes=[
                *operations.probe_routes(),
                *operations.operator_routes(require_key=False),
                *page.routes(require_key=False),
            ],
            exception_handlers={HTTPException: http_error},
        )
        self.ops_app.router.redirect_slashes = False

    @property
    def config(self) -> GatewayConfig:
        """The configuration in effect."""
        return self.live.current

    def _collect_router_families(self) -> None:
        """Export what only the process that routes and counts knows."""
        self.metrics.collect_from(lambda: live_families(self.fleets))
        self.metrics.collect_from(self.pod_costs.families)
        self.metrics.collect_from(lambda: discovery_families(self.sources, self.fleets))
        self.metrics.collect_from(lambda: process_families(*self.serving.processes()))
        self.metrics.collect_from(lambda: access_families(self.admissions, self.gatekeeper))
        if self.follower is not None:
            follower = self.follower
            self.metrics.collect_from(
                lambda: config_families(
                    follower.applied_total,
                    follower.refused_total,
                    refused_now=follower.refused_now,
                    restart_pending=bool(follower.restart_pending),
                )
            )

    def _descriptor_shares(self, config: GatewayConfig) -> descriptors.DescriptorShares:
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
        """Put the sections config.follower.LIVE_SECTIONS of a changed configuration into effect."""
        before = self.config
        await self.roster.apply(config)
        self._shares = self._descriptor_shares(config)
        self.live.replace(config)
        if config.log != before.log:
            logs.apply(config.log)
        for applied in self.on_applied:
            applied(config)

    def _build_app(self, operations: Operations, page: PageRoutes, elsewhere: Elsewhere | None) -> InferenceDispatch:
        routing = self.config.routing
        context = InferenceContext(
            models=self.models,
            upstream=self.services,
            lifecycle=self.lifecycle,
            gatekeeper=self.gatekeeper,
            audit=self.audit,
            session_sources=SessionSources(routing.session_sources, routing.session_name_bytes_max),
            retention=self.config.retention,
            objectives=self.objectives,
            tracing=self.tracing,
        )
        routes = operations.probe_routes()
        if self.config.listen.ops_port is None:
            operators = [*operations.operator_routes(require_key=True), *page.routes(require_key=True)]
            if elsewhere is not None:  # which asks for their keys
                answer = elsewhere.answer_operator
                operators = [Route(route.path, answer, methods=["GET"]) for route in operators]
            routes += operators
        return client_application(context, ModelList(self.fleets), routes, lambda app: self.running(), self.cors)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run every client, task and thread."""
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
            self.promotion_hints.start(session, self.gatekeeper.engine_key)
            stack.push_async_callback(self.promotion_hints.close)
            self.engines.start(Clients(session, context, self.gatekeeper.engine_key))
            stack.push_async_callback(self.engines.stop)
            if self.gatekeeper.shared is not None:
                stack.push_async_callback(self.gatekeeper.shared.close)
            tasks = await stack.enter_async_context(_cancelled_at_exit())
            tasks.append(asyncio.create_task(supervised(self._trim_pool, "idle connections")))
            tasks.append(asyncio.create_task(supervised(self.gatekeeper.follow, "keys file")))
            tasks += [asyncio.create_task(supervised(work, name)) for name, work in self._beside.items()]
            if self.gatekeeper.shared is not None:
                tasks.append(asyncio.create_task(supervised(self.gatekeeper.shared.run, "shared limits")))
            if self.follower is not None:
                tasks.append(asyncio.create_task(supervised(self.follower.run, "configuration file")))
            yield

    async def _trim_pool(self) -> None:
        while True:
            await asyncio.sleep(POOL_TRIM_SECONDS)
            self.services.pool.trim()


def _tracing(config: TracingConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    from spillway_gateway.tracing.exporting import Tracing  # noqa: PLC0415 - 20 MB, needed only here

    return Tracing(config)


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
