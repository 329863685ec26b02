"""GET /v1/models and /v1/models/{model}: the engines' models and adapters, merged, and the gateway's aliases.

The lists come from the health polls, so a client's request asks no engine. Engines may list tens of thousands of
adapters: the lists are merged once per change, in steps, and their cards are kept as the bytes that clients get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from spillway_gateway.access.keys import Tenant
from spillway_gateway.fleet.model_fleet import ModelFleet

STEP_CARDS = 250  # between two yields, about a millisecond
_encode = msgspec.json.encode


class Card(NamedTuple):
    """One model in OpenAI's shape. body: its JSON."""

    body: bytes
    parent: str


class ModelList:
    """Merges the engines' lists, on the event loop. fleets: a live view, which a new configuration changes."""

    def __init__(self, fleets: Sequence[ModelFleet]) -> None:
        self._fleets = fleets
        self._started_at = int(time.time())
        self._merging = asyncio.Lock()
        self._cards: dict[str, Card] = {}
        self._whole = b""  # all of them, as a list
        self._merged_from: object = None

    async def read(self, tenant: Tenant) -> Mapping[str, Card]:
        """Return the merged cards, by name, of the models that the tenant may use."""
        await self._follow()
        if not tenant.models:
            return self._cards
        return {name: card for name, card in self._cards.items() if tenant.may_use(name) or tenant.may_use(card.parent)}

    async def read_list(self, tenant: Tenant) -> bytes:
        """The same as the document of the list."""
        cards = await self.read(tenant)
        return self._whole if cards is self._cards else list_of(cards)

    async def _follow(self) -> None:
        async with self._merging:
            sources = self._sources()
            if sources == self._merged_from:
                return
            cards: dict[str, Card] = {}
            for _ in merge_in_steps(list(self._fleets), self._started_at, cards):
                await asyncio.sleep(0)
            self._cards, self._whole, self._merged_from = cards, list_of(cards), sources

    def _sources(self) -> object:
        """Return the data that the cards are made of; equal while nothing has changed."""
        return [
            (fleet.config, [(name, engine.listed, engine.adapters) for name, engine in fleet.engines.items()])
            for fleet in self._fleets
        ]


def list_of(cards: Mapping[str, Card]) -> bytes:
    """The document of GET /v1/models."""
    return b'{"object":"list","data":[' + b",".join([card.body for card in cards.values()]) + b"]}"


def merge_in_steps(fleets: Sequence[ModelFleet], started_at: int, cards: dict[str, Card]) -> Iterator[None]:
    """Put one card per model, adapter and alias into `cards`, by name. If engines disagree on max_model_len, the
    smallest holds.

    If several models serve one name, the first one counts, as for requests: names in the configuration come before
    adapters that are loaded.
    """
    configured = {name for fleet in fleets for name in fleet.config.names}
    for fleet in fleets:
        listed: dict[str, dict[str, Any]] = {}
        yield from _listed_cards(fleet, listed)
        base = listed.get(fleet.name) or _own_card(fleet.name, started_at)
        cards[fleet.name] = _card(base, fleet.name, base.get("parent"))
        for alias in fleet.config.aliases:
            cards[alias] = _card(base, alias, fleet.name)
        loaded = [name for name in sorted(fleet.loaded_adapters()) if name not in configured and name not in cards]
        named = {name: name for name in (*fleet.config.adapters, *loaded)} | fleet.config.adapter_aliases
        for number, (name, adapter) in enumerate(named.items(), 1):
            if fleet.offers_adapter(adapter):
                cards[name] = _card(listed.get(adapter) or _own_card(adapter, started_at), name, fleet.name)
            if number % STEP_CARDS == 0:
                yield


def _card(document: dict[str, Any], name: str, parent: object) -> Card:
    if document.get("id") != name or document.get("parent") != parent:
        document = {**document, "id": name, "parent": parent}
    return Card(_encode(document), str(parent))


def _listed_cards(fleet: ModelFleet, cards: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Put what the engines list into `cards`, by name."""
    number = 0
    for engine in list(fleet.engines.values()):
        for card in engine.listed.documents() if engine.listed is not None else ():
            name = card.get("id")
            if isinstance(name, str):
                cards[name] = _merged(cards.get(name), card)
            number += 1
            if number % STEP_CARDS == 0:
                yield


def _merged(merged: dict[str, Any] | None, card: dict[str, Any]) -> dict[str, Any]:
    if merged is None:
        return dict(card)
    lengths = [length for length in (merged.get("max_model_len"), card.get("max_model_len")) if isinstance(length, int)]
    return {**merged, "max_model_len": min(lengths)} if lengths else merged


def _own_card(name: str, started_at: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started_at, "owned_by": "spillway"}
