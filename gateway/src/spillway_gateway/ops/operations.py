"""GET /health, /ready, /metrics and /spillway/config: the gateway's own state, never forwarded to an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.config.settings import GatewayConfig, shown_config
from spillway_gateway.error_bodies import response_of
from spillway_gateway.errors import GatewayError
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.ops.serving import Serving
from spillway_settings.wire import CONFIG_PATH

VERSION = version("spillway-gateway")  # of the process that runs, whatever is installed later
Endpoint = Callable[[Request], Awaitable[Response]]


class Answer(NamedTuple):
    """A JSON document with its HTTP status."""

    status: int
    document: dict[str, Any]


class Operations:
    """Routes for probes on every listener, and for operators on the operations listener if there is one.

    fleets: live. serving: the processes that accept clients. config: returns the configuration in use. discovered:
    returns the discovered engines by model.
    """

    def __init__(
        self,
        fleets: list[ModelFleet],
        lifecycle: Lifecycle,
        serving: Serving,
        gatekeeper: Gatekeeper,
        config: Callable[[], GatewayConfig],
        *,
        discovered: Callable[[], dict[str, Any]],
    ) -> None:
        self._fleets = fleets
        self._lifecycle = lifecycle
        self._serving = serving
        self._gatekeeper = gatekeeper
        self._config = config
        self._discovered = discovered
        self._started = False

    def probe_routes(self) -> list[Route]:
        return [Route("/health", self._health), Route("/ready", self._ready)]

    def operator_routes(self, *, require_key: bool) -> list[Route]:
        """require_key: the listener is open to clients too, so both routes need an operator's key: metrics name engines
        and tenants."""
        routes = {"/metrics": self._exposition, CONFIG_PATH: self._show_config}
        return [
            Route(path, self._operators_only(answer) if require_key else answer, methods=["GET"])
            for path, answer in routes.items()
        ]

    def health(self) -> Answer:
        """200 while the process is alive, whatever its engines' state. May be called in any thread."""
        return Answer(200, {"status": "ok"})

    def readiness(self) -> Answer:
        """200 while the gateway can serve at least one model and does not drain. May be called in any thread.

        If a model has no engine, only its own requests get 503: an unready gateway would refuse the clients of all
        other models too. Requests of a model that is scaled to zero wait. At its start a gateway also waits until every
        engine has answered a poll or failed it, so that in a rolling restart it takes no request that the old replica
        could have served.
        """
        fleets = [(fleet.name, list(fleet.engines.values())) for fleet in list(self._fleets)]
        engines = {name: {engine.name: engine.reason for engine in each} for name, each in fleets}
        if self._lifecycle.draining:
            return Answer(503, {"ready": False, "reason": "draining", "models": engines})
        not_serving = self._serving.not_serving()
        if not_serving is not None:
            return Answer(503, {"ready": False, "reason": not_serving, "models": engines})
        waking = {fleet.name for fleet in list(self._fleets) if fleet.config.wake_seconds is not None}
        missing = [name for name, each in fleets if not any(engine.routable for engine in each)]
        if len(missing) == len(fleets) and not waking:
            reason = f"no routable engine for: {', '.join(missing)}"
            return Answer(503, {"ready": False, "reason": reason, "models": engines})
        unasked = [engine.name for _, each in fleets for engine in each if engine.state is EngineState.UNKNOWN]
        if unasked and not self._started:
            reason = f"not asked yet since the start: {', '.join(unasked)}"
            return Answer(503, {"ready": False, "reason": reason, "models": engines})
        self._started = True
        return Answer(200, {"ready": True, "unavailable": missing, "models": engines})

    def was_ready(self) -> bool:
        """Whether the gateway has been ready since its start. May be called in any thread."""
        return self._started or self.readiness().status == 200

    async def _health(self, request: Request) -> Response:
        return _response(self.health())

    async def _ready(self, request: Request) -> Response:
        return _response(self.readiness())

    async def _exposition(self, request: Request) -> Response:
        return Response(await self._serving.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_config(self, request: Request) -> Response:
        """`{"settings": ..., "discovered": ..., "version": ...}`: the file's keys with every default filled in, the
        discovered engines, and the version of this process."""
        document = {"settings": shown_config(self._config()), "discovered": self._discovered(), "version": VERSION}
        return Response(msgspec.json.encode(document), media_type="application/json")

    def _operators_only(self, answer: Endpoint) -> Endpoint:
        async def asked(request: Request) -> Response:
            try:
                self._gatekeeper.allow_operator(request.headers.raw)
            except GatewayError as error:
                return response_of(error)
            return await answer(request)

        return asked


def _response(answer: Answer) -> Response:
    return JSONResponse(answer.document, answer.status)
