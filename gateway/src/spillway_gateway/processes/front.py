"""A front process: serves clients on the shared port, and asks the router process for all that counts for several."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spillway_gateway import logs
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Tenant
from spillway_gateway.access.limits import Settlement, TenantUsage
from spillway_gateway.api.stored_responses import Owner, ResponseOwners
from spillway_gateway.app import Gateway
from spillway_gateway.background import supervised
from spillway_gateway.config.settings import GatewayConfig
from spillway_gateway.error_bodies import body_of
from spillway_gateway.errors import ConfigError, GatewayError
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.listeners.server import GatewayServer, PortInUse, bind_shared
from spillway_gateway.ops.live_families import audit_families, connection_families
from spillway_gateway.ops.operations import Operations
from spillway_gateway.ops.ui.page_routes import PageRoutes
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.counts import counts_of
from spillway_gateway.processes.front_fleet import FrontRoster
from spillway_gateway.processes.messages import Message, from_router
from spillway_gateway.processes.router_client import RouterClient
from spillway_gateway.roster.roster import Roster
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.outbound import Dispatch
from spillway_gateway.upstream.suspects import Fingerprint

logger = logging.getLogger(__name__)

COUNTS_SECONDS = 5.0  # between two tellings, which also show that it lives; a kill loses what was counted since
ROUTER_LOST = 70  # exit status


class FrontUsage(TenantUsage):
    """A request of a tenant with limits, which the router counts."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__(0.0)
        self.number = number


class FrontGatekeeper(Gatekeeper):
    """Checks keys here; limits are counted by the router. Raises ConfigError."""

    _router: RouterClient

    async def begin(self, tenant: Tenant, prompt_tokens: int) -> TenantUsage:
        if not tenant.limited:
            return FrontUsage(0)
        number = self._router.number()
        await self._router.ask(messages.Begin(number, tenant, prompt_tokens), messages.Begun)
        return FrontUsage(number)

    def end(self, tenant: Tenant, usage: TenantUsage, settlement: Settlement) -> None:
        assert isinstance(usage, FrontUsage)
        if usage.number:
            self._router.send(messages.Settle(usage.number, *settlement))


class FrontOwners(ResponseOwners):
    """The router keeps them."""

    def __init__(self, router: RouterClient) -> None:
        super().__init__(0)
        self._router = router

    def record(self, response_id: str, owner: Owner) -> bool:
        self._router.send(messages.OwnResponse(response_id, owner.tenant, owner.model, owner.engine))
        return True  # if another tenant owns it the router records nothing

    def set_tokens(self, response_id: str, tenant: str, tokens: int) -> None:
        self._router.send(messages.ResponseTokens(response_id, tenant, tokens))

    async def find(self, response_id: str, tenant: str) -> Owner | None:
        asked = messages.FindOwner(self._router.number(), response_id, tenant)
        found = await self._router.ask(asked, messages.OwnerIs)
        return Owner(tenant, found.model, found.engine, found.tokens) if found.model is not None else None


class FrontRecent(Recent):
    """The router has the live page, and knows the decisions."""

    def __init__(self, router: RouterClient) -> None:
        super().__init__()
        self._router = router

    def decided(self, model: str, request_id: bytes, decision: Decision) -> None:
        """Nothing."""

    def reported(self, model: str, held: HeldPrefix, cached_tokens: int) -> None:
        self._router.send(messages.Cached(model, held, cached_tokens))

    def first_byte(self, model: str, engine: str, seconds: float) -> None:
        self._router.send(messages.Noted(model, engine, seconds))

    def continued(self, model: str, seconds: float) -> None:
        self._router.send(messages.Noted(model, None, seconds))


class FrontGateway(Gateway):
    """The gateway of a front. Raises ConfigError."""

    def __init__(self, config: GatewayConfig, router: RouterClient) -> None:
        self._router = router
        super().__init__(config)

    def _gatekeeper(self) -> Gatekeeper:
        gatekeeper = FrontGatekeeper(structs.replace(self.config.auth, shared_limits=None))
        gatekeeper._router = self._router
        return gatekeeper

    def _roster(self) -> Roster:
        return FrontRoster(self.config, self.metrics, self._tokenizing, self._router.send)

    def _response_owners(self) -> ResponseOwners:
        return FrontOwners(self._router)

    def _recent(self) -> Recent:
        return FrontRecent(self._router)

    def _dispatch(self) -> Dispatch:
        return self._router

    def _collect_families(self) -> None:
        """What the router cannot count itself."""
        self.metrics.collect_from(lambda: connection_families(self.open_connections))
        self.metrics.collect_from(lambda: audit_families(self.audit))

    def _operator_routes(self, operations: Operations, page: PageRoutes) -> list[Route]:
        """The router answers, and asks for their keys."""
        return [
            Route(route.path, self._ask_router, methods=["GET"]) for route in super()._operator_routes(operations, page)
        ]

    async def _ask_router(self, request: Request) -> Response:
        asked = messages.Operator(self._router.number(), request.url.path, request.headers.raw)
        try:
            answer = await self._router.ask(asked, messages.OperatorAnswer)
        except GatewayError as error:
            return Response(body_of(error), error.status, media_type="application/json")
        response = Response(answer.body, answer.status)
        response.raw_headers = list(answer.headers)
        return response


class FrontServer(GatewayServer):
    """Drains once, whoever says so first: the router, or a signal to all processes."""

    def __init__(self, gateway: Gateway, on_listening: Callable[[], None]) -> None:
        super().__init__(gateway)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    def begin_shutdown(self) -> None:
        if self._drain is None:
            super().begin_shutdown()

    def end_now(self) -> None:
        super().begin_shutdown()
        super().begin_shutdown()


class Front:
    """From the first message to the exit status. before_serving: called once all is built. end: ends the process."""

    def __init__(
        self, before_serving: Callable[[], None] = lambda: None, end: Callable[[int], None] = os._exit
    ) -> None:
        self._before_serving = before_serving
        self._end = end
        self._router = RouterClient(self._received, self._hint)
        self._started: asyncio.Future[messages.Start] = asyncio.get_running_loop().create_future()
        self._known = asyncio.Event()  # models and engines
        self._early: list[Message] = []  # before the gateway is built
        self._gateway: FrontGateway | None = None
        self._server: FrontServer | None = None
        self._configuring: asyncio.Task[None] | None = None

    async def run(self, router: socket.socket) -> int:
        channel = await Channel.over(router, from_router, self._router.received, self._router_lost)
        self._router.channel = channel
        start = await self._started
        config = msgspec.json.decode(start.config, type=GatewayConfig)
        logs.set_up(config.log, with_pid=True)
        try:
            gateway = self._gateway = FrontGateway(config, self._router)
            for message in self._early:
                self._received(message)
            await self._known.wait()
            self._before_serving()
            listener = self._listen(start)
            server = self._server = FrontServer(gateway, lambda: channel.send(messages.Listening()))
        except (ConfigError, PortInUse) as error:
            logger.error("%s", error)
            return 1
        counting = asyncio.create_task(supervised(self._count, "counts for the main process"))
        try:
            with listener:
                await server.serve(sockets=[listener])
        finally:
            counting.cancel()
            self._send_counts(0)
            channel.close()
        return 0 if server.started else 1

    def _listen(self, start: messages.Start) -> socket.socket:
        return bind_shared(start.host, start.port)

    def _received(self, message: Message) -> None:
        if isinstance(message, messages.Start):
            self._started.set_result(message)
            return
        gateway = self._gateway
        if gateway is None:
            self._early.append(message)
            return
        roster: Any = gateway.roster
        match message:
            case messages.State():
                roster.update(message)
                self._known.set()
            case messages.Listed():
                roster.listed(message)
            case messages.Progressed():
                roster.progressed(message)
            case messages.Notice():
                # After the requests whose engine came with it: they are woken first.
                asyncio.get_running_loop().call_soon(roster.notice, message)
            case messages.Suspected():
                gateway.suspects.put(Fingerprint(message.digest, message.body_bytes), message.until)
            case messages.Configure():
                self._configuring = asyncio.create_task(self._configure(message, self._configuring))
            case messages.Count():
                self._send_counts(message.number)
            case messages.Drain():
                self._drain(now=message.now)

    async def _configure(self, message: messages.Configure, before: asyncio.Task[None] | None) -> None:
        """One after another."""
        if before is not None:
            await asyncio.wait([before])
        assert self._gateway is not None
        try:
            await self._gateway.apply(msgspec.json.decode(message.config, type=GatewayConfig))
        except Exception:
            logger.exception("the new configuration was not applied in this process")

    def _drain(self, *, now: bool) -> None:
        if self._server is None:  # it does not serve yet
            self._end(0)
        elif now:
            self._server.end_now()
        else:
            self._server.begin_shutdown()

    def _hint(self, *hint: Any) -> None:
        if self._gateway is not None:
            self._gateway.promotion_hints.tell(*hint)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNTS_SECONDS)
            self._send_counts(0)

    def _send_counts(self, asked: int) -> None:
        assert self._gateway is not None
        self._router.send(messages.Counts(asked, counts_of(self._gateway.metrics.registry)))

    def _router_lost(self) -> None:
        """Nothing can be routed or counted any more: end as the death of a single process would."""
        if self._server is None or not self._server.should_exit:
            logger.error("the gateway's main process is gone; this one ends")
            self._end(ROUTER_LOST)
