"""Tells an engine which prefix is coming, while its request waits here for room or the engine is new.

An engine that holds a request in its own queue loads the prefix from the shared tier meanwhile. A request that waits in
front of full engines is in no engine's queue, so the gateway sends the engine that would get it now its first tokens:
those that the engine would load from the shared tier, and those before them. The engine may refuse, and the request may
go elsewhere in the end; both cost only time. On the event loop; nothing waits for an answer.
"""

from __future__ import annotations

import asyncio
import logging
from array import array

import aiohttp
import msgspec

from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.prefix import PromptTokens
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_settings.wire import PROMOTE_PATH, RANK_HEADER

logger = logging.getLogger(__name__)

HINTS_MAX = 8  # on their way at once; further ones are dropped
ANSWER_SECONDS = 10.0
_OUTCOMES = {202: "accepted", 429: "busy", 503: "busy", 404: "off"}


class PromotionHints:
    """The hints of one gateway process. Nothing is sent before start()."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._engine_key: str | None = None
        self._metrics = metrics
        self._under_way: set[asyncio.Task[str]] = set()

    def start(self, session: aiohttp.ClientSession, engine_key: str | None) -> None:
        """session, engine_key: as health polls use them."""
        self._session, self._engine_key = session, engine_key

    def expect(self, fleet: ModelFleet, request: OutboundRequest) -> str | None:
        """Hint at a request's prefix; the name of the engine that is sent it, None: none is."""
        tokens = request.prompt.tokens
        if tokens is None or self._session is None or request.adapter is not None:
            return None
        decision = fleet.expected_choice(request.prompt, request.only_engine, request.session, request.tenant)
        if decision is None or not decision.held.shared_tokens:
            return None
        engine = fleet.engines[decision.engine_name]
        return engine.name if self.tell(engine, tokens, decision.held.total_tokens) else None

    def tell(self, engine: Engine, tokens: PromptTokens, first: int) -> bool:
        """Send an engine the first tokens of a prompt, as many as are given. False if too many are under way."""
        if self._session is None:
            return False
        if len(self._under_way) >= HINTS_MAX:
            self._metrics.promotion_hint(engine.model, "dropped").inc()
            return False
        task = asyncio.create_task(self.send(engine, tokens, first))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return True

    async def send(self, engine: Engine, tokens: PromptTokens, first: int) -> str:
        """Send an engine the first tokens of a prompt, as many as are given, and return the outcome as it is
        counted."""
        session, model, body = self._session, engine.model, hint_body(tokens, first)
        if session is None:
            return "dropped"
        headers = {"content-type": "application/json"}
        if self._engine_key is not None:
            headers["authorization"] = f"Bearer {self._engine_key}"
        if engine.rank is not None:
            headers[RANK_HEADER] = str(engine.rank)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        try:
            async with session.post(
                engine.config.url + PROMOTE_PATH, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                outcome = _OUTCOMES.get(reply.status, "failed")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.debug("engine %s: a promotion hint failed: %s", engine.name, error)
            outcome = "failed"
        self._metrics.promotion_hint(model, outcome).inc()
        return outcome

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def hint_body(tokens: PromptTokens, first: int) -> bytes:
    """The body of a hint of the first tokens of a prompt, as many as are given. Pure."""
    ids = array("I", tokens.ids[: first * array("I").itemsize])
    return msgspec.json.encode({"token_ids": ids.tolist(), "cache_salt": tokens.cache_salt})
