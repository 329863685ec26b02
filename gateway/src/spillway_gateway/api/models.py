"""GET /v1/models and /v1/models/{model}: the engines' models and adapters, merged, and the gateway's aliases.

From the lists that the health polls read, so that a client's request asks no engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from spillway_gateway.access.keys import Tenant
from spillway_gateway.fleet.model_fleet import ModelFleet


class ModelList:
    """On the event loop. fleets: live, a new configuration changes it."""

    def __init__(self, fleets: Sequence[ModelFleet]) -> None:
        self._fleets = fleets
        self._started_at = int(time.time())

    def read(self, tenant: Tenant) -> dict[str, dict[str, Any]]:
        """The merged cards in OpenAI's shape, by name, of what the tenant may use."""
        return {
            name: card
            for name, card in merge_models(self._fleets, self._started_at).items()
            if tenant.may_use(name) or tenant.may_use(str(card.get("parent")))
        }


def merge_models(fleets: Iterable[ModelFleet], started_at: int) -> dict[str, dict[str, Any]]:
    """One card per model, adapter and alias, by name. Where engines disagree on max_model_len, the smallest holds.

    Of one name that several models serve the first holds, names in the configuration before adapters that are loaded:
    it is what a request gets.
    """
    fleets = list(fleets)
    configured = {name for fleet in fleets for name in fleet.config.names}
    cards: dict[str, dict[str, Any]] = {}
    for fleet in fleets:
        listed = _listed_cards(fleet)
        base = cards[fleet.name] = listed.get(fleet.name) or _own_card(fleet.name, started_at)
        for alias in fleet.config.aliases:
            cards[alias] = {**base, "id": alias, "parent": fleet.name}
        loaded = [name for name in sorted(fleet.loaded_adapters()) if name not in configured and name not in cards]
        named = {name: name for name in (*fleet.config.adapters, *loaded)} | fleet.config.adapter_aliases
        for name, adapter in named.items():
            if fleet.offers_adapter(adapter):
                card = listed.get(adapter) or _own_card(adapter, started_at)
                cards[name] = {**card, "id": name, "parent": fleet.name}
    return cards


def _listed_cards(fleet: ModelFleet) -> dict[str, dict[str, Any]]:
    """What the engines list, by name."""
    cards: dict[str, dict[str, Any]] = {}
    for engine in fleet.engines.values():
        for card in engine.listed.documents if engine.listed is not None else ():
            name = card.get("id")
            if isinstance(name, str):
                cards[name] = _merged(cards.get(name), card)
    return cards


def _merged(merged: dict[str, Any] | None, card: dict[str, Any]) -> dict[str, Any]:
    if merged is None:
        return dict(card)
    lengths = [length for length in (merged.get("max_model_len"), card.get("max_model_len")) if isinstance(length, int)]
    return {**merged, "max_model_len": min(lengths)} if lengths else merged


def _own_card(name: str, started_at: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started_at, "owned_by": "spillway"}
