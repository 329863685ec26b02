"""Builds the application; its lifespan owns every client, task and thread, and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.api import chat, completions
from spillway_gateway.api.inference import InferenceEndpoint, Lifecycle, ServedModel
from spillway_gateway.api.models import ModelList
from spillway_gateway.api.state import access_families, live_families, state_router
from spillway_gateway.config import GatewayConfig
from spillway_gateway.error_bodies import body_of, error_body
from spillway_gateway.errors import GatewayError
from spillway_gateway.fleet.engines import Engine, EngineState, ModelFleet
from spillway_gateway.fleet.health import HealthPoller
from spillway_gateway.fleet.kv_events import EventFollower
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.tokens.prompt import PromptReader, load_tokenizer
from spillway_gateway.tokens.verification import Disagreement, verify_tokenizer
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.retry import RetryBudget
from spillway_gateway.upstream.stream import Relay, UpstreamServices, shutdown_cause

logger = logging.getLogger(__name__)

TOKENIZER_THREADS = 2
POOL_TRIM_SECONDS = 1.0


class Gateway:
    """The assembled gateway of one process. `app` is what a server runs; the rest is for the server and for tests."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.lifecycle = Lifecycle()
        self.metrics = GatewayMetrics()
        self.running: set[Relay] = set()
        self.gatekeeper = Gatekeeper(config.auth)
        self._executor = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self.models: dict[str, ServedModel] = {}
        self.fleets: list[ModelFleet] = []
        for model in config.models:
            index = PrefixIndex(
                model.name,
                bytes_max=max(1, config.index.bytes_max // len(config.models)),
                orphans_max=config.index.orphans_max,
                default_block_tokens=config.routing.default_block_tokens,
                clock=time.monotonic,
            )
            fleet = ModelFleet(model, config.routing, index, breaker=config.breaker)
            tokenizer = load_tokenizer(model.name, model.tokenizer)
            if model.tokenizer is not None:
                self.metrics.tokenizer_usable.labels(model.name).set(tokenizer is not None)
            served = ServedModel(fleet, PromptReader(model.name, index, tokenizer, self._executor, config.limits))
            self.fleets.append(fleet)
            for name in (model.name, *model.aliases):
                self.models[name] = served
        self.admissions = {fleet.name: self._admission(fleet) for fleet in self.fleets}
        self.metrics.watch(lambda: live_families(self.fleets))
        self.metrics.watch(lambda: access_families(self.admissions, self.gatekeeper))
        self.services = UpstreamServices(
            pool=ConnectionPool(
                config.limits.upstream_connections_max, config.timeouts.connect_seconds, time.monotonic
            ),
            budget=RetryBudget(config.limits.retry_ratio, config.limits.retry_burst),
            metrics=self.metrics,
            timeouts=config.timeouts,
            limits=config.limits,
            running=self.running,
            admissions=self.admissions,
        )
        self.app = self._build_app()

    def _admission(self, fleet: ModelFleet) -> Admission:
        """Room in proportion to the ready engines; without any, requests pass and are told so by routing."""
        each = self.config.admission.requests_per_engine_max
        engines = fleet.engines.values()
        admission = Admission(
            self.config.admission, lambda: each * (sum(engine.routable for engine in engines) or len(engines))
        )
        for engine in engines:
            engine.on_state.append(lambda _: admission.wake())
        return admission

    def _build_app(self) -> FastAPI:
        app = FastAPI(
            title="Spillway gateway", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan
        )
        # Raw ASGI endpoints, first in the list: no model of FastAPI's touches an inference body.
        routes = [
            Route(
                module_path,
                InferenceEndpoint(
                    module_path,
                    parse,
                    self.models,
                    services=self.services,
                    lifecycle=self.lifecycle,
                    gatekeeper=self.gatekeeper,
                ),
                methods=["POST"],
            )
            for module_path, parse in (
                (chat.PATH, chat.parse_chat),
                (completions.PATH, completions.parse_completion),
            )
        ]
        app.router.routes[:0] = routes
        app.include_router(state_router(self.fleets, self.lifecycle, self.metrics))

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            try:
                tenant = self.gatekeeper.tenant_of(request.headers.raw)
            except GatewayError as error:
                return Response(body_of(error), error.status, media_type="application/json")
            listed = await self.model_list.read()
            listed["data"] = [
                card for card in listed["data"] if tenant.may_use(card["id"]) or tenant.may_use(str(card.get("parent")))
            ]
            return JSONResponse(listed)

        @app.exception_handler(HTTPException)
        async def http_error(request: Request, error: HTTPException) -> Response:
            if error.status_code == 404:
                message, code = f"Unknown route: {request.method} {request.url.path}", "unknown_route"
            elif error.status_code == 405:
                message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
            else:
                message, code = str(error.detail), "http_error"
            body = error_body(message, "invalid_request_error", None, code)
            return Response(body, error.status_code, error.headers, media_type="application/json")

        @app.exception_handler(Exception)
        async def own_fault(request: Request, error: Exception) -> Response:
            body = error_body("The gateway failed on this request", "server_error", None, "internal_error")
            return Response(body, 500, media_type="application/json")

        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(self._executor.shutdown, wait=False, cancel_futures=True)
            stack.callback(self.services.pool.close)
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
            )
            self.model_list = ModelList(self.fleets, session)
            tasks = await stack.enter_async_context(_cancelled_at_exit())
            tasks.append(asyncio.create_task(self._trim_pool()))
            tasks.append(asyncio.create_task(_guarded(self.gatekeeper.follow(), "keys file")))
            for served in {id(served): served for served in self.models.values()}.values():
                for engine in served.fleet.engines.values():
                    poller = HealthPoller(engine, session, self.config.health)
                    tasks.append(asyncio.create_task(_guarded(poller.run(), f"health of {engine.name}")))
                    if engine.config.kv_events is not None:
                        follower = EventFollower(engine, served.fleet.index, self.metrics, context)
                        tasks.append(asyncio.create_task(_guarded(follower.run(), f"events of {engine.name}")))
                if served.reader.tokenizer is not None:
                    tasks.append(asyncio.create_task(self._verify(served, session)))
            yield

    async def _trim_pool(self) -> None:
        while True:
            await asyncio.sleep(POOL_TRIM_SECONDS)
            self.services.pool.trim()

    async def _verify(self, served: ServedModel, session: aiohttp.ClientSession) -> None:
        """Compare tokens with the first engine that is ready and can be asked."""
        ready: asyncio.Queue[Engine] = asyncio.Queue()
        for engine in served.fleet.engines.values():
            engine.on_state.append(ready.put_nowait)
        for engine in served.fleet.engines.values():
            ready.put_nowait(engine)
        while True:
            engine = await ready.get()
            tokenizer = served.reader.tokenizer
            if engine.state is not EngineState.READY or tokenizer is None:
                continue
            name = served.fleet.name
            try:
                if await verify_tokenizer(tokenizer, engine, session):
                    logger.info("model %s: tokenizer agrees with engine %s", name, engine.name)
                else:
                    logger.warning("model %s: engine %s has no /tokenize to compare with", name, engine.name)
            except Disagreement as error:
                served.reader.tokenizer = None
                self.metrics.tokenizer_usable.labels(name).set(0)
                logger.error(
                    "model %s: the tokenizer disagrees with engine %s (%s); prompts are matched by text blocks. "
                    "Point models.tokenizer at the folder that the engines serve.",
                    name,
                    engine.name,
                    error,
                )

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """True once no request runs, False when the time is over first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while self.running:
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await asyncio.sleep(min(0.05, remaining))
        return True

    def end_running(self) -> None:
        """The drain is over: streams get an error event, waiting requests a 503."""
        self.lifecycle.closed = True
        for relay in list(self.running):
            relay.abort(shutdown_cause())


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _guarded(work: Coroutine[object, object, None], name: str) -> None:
    """A background task that dies of a defect is started over by nobody; at least it says so."""
    try:
        await work
    except Exception:
        logger.exception("background task stopped: %s", name)
        raise
