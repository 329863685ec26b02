"""A front process: serves clients on the shared port, and asks the router process for all that counts for several."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from spillway_gateway import logs
from spillway_gateway.app import Elsewhere, Gateway
from spillway_gateway.background import supervised
from spillway_gateway.config.settings import GatewayConfig
from spillway_gateway.error_bodies import response_of
from spillway_gateway.errors import ConfigError, GatewayError
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.listeners.server import GatewayServer, PortInUse, bind_shared
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel_router import ChannelRouter
from spillway_gateway.processes.counts import counts_of
from spillway_gateway.processes.messages import Message
from spillway_gateway.processes.reported_engines import ReportedEngines
from spillway_gateway.processes.router_client import RouterClient
from spillway_gateway.routing.prefix import PromptTokens
from spillway_gateway.upstream.suspects import Fingerprint
from spillway_settings.typed import settings_of_json

logger = logging.getLogger(__name__)

COUNTS_SECONDS = 5.0  # between two tellings, which also show that it lives; a kill loses what was counted since
ROUTER_LOST = 70  # exit status


class Front:
    """A front, from the first message to the exit status.

    before_serving: called once all is built. end: ends the process.
    """

    def __init__(
        self, before_serving: Callable[[], None] = lambda: None, end: Callable[[int], None] = os._exit
    ) -> None:
        self._before_serving = before_serving
        self._end = end
        self._client = RouterClient(self._received, self._router_lost)
        self._router = ChannelRouter(self._client, self._hint)
        self._started: asyncio.Future[messages.Start] = asyncio.get_running_loop().create_future()
        self._known = asyncio.Event()  # models and engines
        self._early: list[Message] = []  # before the gateway is built
        self._engines: ReportedEngines | None = None
        self._gateway: Gateway | None = None
        self._server: GatewayServer | None = None
        self._configuring: asyncio.Task[None] | None = None

    async def run(self, router: socket.socket) -> int:
        await self._client.connect(router)
        start = await self._started
        config = settings_of_json(GatewayConfig, start.config)
        logs.set_up(config.log, with_pid=True)
        try:
            engines = self._engines = ReportedEngines(config, self._forget_metrics)
            gateway = self._gateway = Gateway(config, elsewhere=Elsewhere(self._router, engines, self._ask_router))
            for message in self._early:
                self._received(message)
            await self._known.wait()
            self._before_serving()
            listener = self._listen(start.host, start.port, "listen.port")
            picker_listener = None
            if start.picker_port is not None:
                picker_listener = self._listen(start.host, start.picker_port, "listen.pickerPort")
            server = self._server = GatewayServer(
                gateway,
                picker_listener=picker_listener,
                on_listening=lambda: self._client.send(messages.Listening()),
                on_signal=self._drain,  # once, whoever says so first: the router, or a signal to all processes
            )
        except (ConfigError, PortInUse) as error:
            logger.error("%s", error)
            return 1
        counting = asyncio.create_task(supervised(self._count, "counts for the main process"))
        try:
            with listener, picker_listener or contextlib.nullcontext():
                await server.serve(sockets=[listener])
        finally:
            counting.cancel()
            self._send_counts(0)
            self._client.close()
        return 0 if server.started else 1

    def _listen(self, host: str, port: int, setting: str) -> socket.socket:
        return bind_shared(host, port, setting)

    def _received(self, message: Message) -> None:
        if isinstance(message, messages.Start):
            self._started.set_result(message)
            return
        gateway, engines = self._gateway, self._engines
        if gateway is None or engines is None:
            self._early.append(message)
            return
        match message:
            case messages.State():
                engines.update(message)
                self._known.set()
            case messages.Listed():
                engines.listed(message)
            case messages.Progressed():
                engines.progressed(message)
            case messages.Notice():
                # After the requests whose engine came with it: they are woken first.
                asyncio.get_running_loop().call_soon(engines.notice, message)
            case messages.Suspected():
                gateway.suspects.put(Fingerprint(message.digest, message.body_bytes), message.until)
            case messages.Configure():
                self._configuring = asyncio.create_task(self._configure(message, self._configuring))
            case messages.Count():
                self._send_counts(message.number)
            case messages.Waiting():
                self._router.waiting(message)
            case messages.Drain():
                self._drain(now=message.now)

    async def _configure(self, message: messages.Configure, before: asyncio.Task[None] | None) -> None:
        """One after another."""
        if before is not None:
            await asyncio.wait([before])
        assert self._gateway is not None
        try:
            await self._gateway.apply(settings_of_json(GatewayConfig, message.config))
        except Exception:
            logger.exception("the new configuration was not applied in this process")

    def _drain(self, *, now: bool = False) -> None:
        if self._server is None:  # it does not serve yet
            self._end(0)
        elif now:
            self._server.end_now()
        else:
            self._server.drain()

    def _hint(self, engine: Engine, tokens: PromptTokens, first: int) -> None:
        if self._gateway is not None:
            self._gateway.promotion_hints.tell(engine, tokens, first)

    def _forget_metrics(self, engine: str) -> None:
        if self._gateway is not None:
            self._gateway.metrics.remove_engine(engine)

    async def _ask_router(self, request: Request) -> Response:
        """An operator's route, for which the router asks for a key."""
        asked = messages.Operator(self._client.number(), request.url.path, request.headers.raw)
        try:
            answer = await self._client.ask(asked, messages.OperatorAnswer)
        except GatewayError as error:
            return response_of(error)
        response = Response(answer.body, answer.status)
        response.raw_headers = list(answer.headers)
        return response

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNTS_SECONDS)
            self._send_counts(0)

    def _send_counts(self, asked: int) -> None:
        assert self._gateway is not None
        self._client.send(messages.Counts(asked, counts_of(self._gateway.metrics.registry)))

    def _router_lost(self) -> None:
        """End as the death of a single process would, because nothing can be routed or counted any more."""
        if self._server is None or not self._server.should_exit:
            logger.error("the gateway's main process is gone; this one ends")
            self._end(ROUTER_LOST)
