"""GET /v1/models and /v1/models/{model}: the engines' models, merged, and the gateway's aliases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from spillway_gateway.access.keys import Tenant
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet

logger = logging.getLogger(__name__)

ASK_SECONDS_MAX = 2.0
FRESH_SECONDS = 10.0


class ModelList:
    """Asks each routable engine at most every FRESH_SECONDS, and keeps its last good answer. On the event loop."""

    def __init__(self, fleets: Sequence[ModelFleet], session: aiohttp.ClientSession) -> None:
        self._fleets = fleets  # live: a new configuration changes it
        self._session = session
        self._answers: dict[str, list[dict[str, Any]]] = {}  # by engine, of engines in service
        self._asked_at: dict[str, float] = {}
        self._started_at = int(time.time())

    async def read(self, tenant: Tenant) -> dict[str, dict[str, Any]]:
        """The merged cards in OpenAI's shape, by name, of what the tenant may use."""
        now = time.monotonic()
        due = [
            engine
            for fleet in self._fleets
            for engine in fleet.engines.values()
            if engine.routable and now - self._asked_at.get(engine.name, -FRESH_SECONDS) >= FRESH_SECONDS
        ]
        await asyncio.gather(*(self._ask(engine, now) for engine in due))
        in_service = {name for fleet in self._fleets for name in fleet.engines}
        for name in self._answers.keys() - in_service:
            del self._answers[name], self._asked_at[name]
        cards = merge_models(self._fleets, self._answers, self._started_at)
        return {
            name: card
            for name, card in cards.items()
            if tenant.may_use(name) or tenant.may_use(str(card.get("parent")))
        }

    async def _ask(self, engine: Engine, now: float) -> None:
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS_MAX)
        try:
            async with self._session.get(engine.config.url.rstrip("/") + "/v1/models", timeout=timeout) as reply:
                if reply.status != 200:
                    return
                document = msgspec.json.decode(await reply.read())
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("engine %s: /v1/models failed (%s)", engine.name, error.__class__.__name__)
            return
        data = document.get("data") if isinstance(document, dict) else None
        if isinstance(data, list):
            self._asked_at[engine.name] = now
            self._answers[engine.name] = [card for card in data if isinstance(card, dict)]


def merge_models(
    fleets: Iterable[ModelFleet], answers: Mapping[str, list[dict[str, Any]]], started_at: int
) -> dict[str, dict[str, Any]]:
    """One card per model and alias, by name. Where engines disagree on max_model_len the smallest holds on all."""
    cards: dict[str, dict[str, Any]] = {}
    for fleet in fleets:
        for engine_name in fleet.engines:
            for card in answers.get(engine_name, []):
                name = card.get("id")
                if isinstance(name, str):
                    cards[name] = _merged(cards.get(name), card)
        base = cards.setdefault(fleet.name, _own_card(fleet.name, started_at))
        for adapter in fleet.config.adapters:
            cards.setdefault(adapter, {**_own_card(adapter, started_at), "parent": fleet.name})
        for alias in fleet.config.aliases:
            cards[alias] = {**base, "id": alias, "parent": fleet.name}
    return cards


def _merged(merged: dict[str, Any] | None, card: dict[str, Any]) -> dict[str, Any]:
    if merged is None:
        return dict(card)
    lengths = [length for length in (merged.get("max_model_len"), card.get("max_model_len")) if isinstance(length, int)]
    return {**merged, "max_model_len": min(lengths)} if lengths else merged


def _own_card(name: str, started_at: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started_at, "owned_by": "spillway"}
