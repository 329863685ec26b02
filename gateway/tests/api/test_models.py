from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import pytest

from spillway_gateway.access.keys import NOBODY, Tenant
from spillway_gateway.api import models
from spillway_gateway.api.models import STEP_CARDS, ModelList, merge_in_steps
from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.listed_models import read_listed_models
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex


def fleet_of(*adapters: int, **settings: Any) -> ModelFleet:
    """An engine for each number of adapters that one lists."""
    index = PrefixIndex("m", bytes_max=1, orphans_max=1, default_block_tokens=4, clock=lambda: 0.0)
    engines = tuple(EngineConfig(f"e{at}", "http://127.0.0.1:1") for at in range(len(adapters)))
    fleet = ModelFleet(ModelConfig("m", engines, **settings), RoutingConfig(), index)
    for at, (engine, count) in enumerate(zip(fleet.engines.values(), adapters, strict=True)):
        cards = [{"id": "m", "object": "model", "max_model_len": 1000 - at}]
        cards += [{"id": f"lora-{number}", "parent": "m"} for number in range(count)]
        engine.models_listed(read_listed_models(msgspec.json.encode({"data": cards})))
    return fleet


def test_the_smallest_length_holds_and_each_name_has_one_card() -> None:
    cards: dict[str, Any] = {}
    deque(merge_in_steps([fleet_of(2, 1, aliases=("nick",))], 7, cards), maxlen=0)

    assert list(cards) == ["m", "nick", "lora-0", "lora-1"]
    documents = {name: msgspec.json.decode(card.body) for name, card in cards.items()}
    assert {name: document["id"] for name, document in documents.items()} == {name: name for name in cards}
    assert (documents["m"]["max_model_len"], documents["nick"]["parent"], documents["lora-0"]["parent"]) == (
        999,
        "m",
        "m",
    )


def test_many_adapters_are_merged_in_short_steps() -> None:
    cards: dict[str, Any] = {}
    steps = 0
    before = 0
    for _ in merge_in_steps([fleet_of(3000)], 7, cards):
        steps += 1
        assert len(cards) - before <= STEP_CARDS + 1
        before = len(cards)

    assert len(cards) == 3001
    assert steps >= 2 * 3000 // STEP_CARDS


async def test_lists_are_merged_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of(3, 3)
    merged = 0

    def counted(*arguments: Any) -> Any:
        nonlocal merged
        merged += 1
        return merge_in_steps(*arguments)

    monkeypatch.setattr(models, "merge_in_steps", counted)
    listing = ModelList([fleet])
    first, *others = await asyncio.gather(*[listing.read_list(NOBODY) for _ in range(8)])
    assert (merged, set(others)) == (1, {first})
    assert len(msgspec.json.decode(first)["data"]) == 4

    engine = fleet.engines["e0"]
    assert engine.listed is not None
    engine.models_listed(engine.listed)  # the same page again
    assert await listing.read_list(NOBODY) == first
    assert merged == 1

    engine.lacks_adapter("lora-0")
    fleet.engines["e1"].models_listed(read_listed_models(b'{"data":[{"id":"m"}]}'))
    assert set(await listing.read(NOBODY)) == {"m", "lora-1", "lora-2"}
    assert merged == 2


async def test_a_tenant_sees_the_models_that_it_may_use() -> None:
    listing = ModelList([fleet_of(2)])

    assert set(await listing.read(Tenant("t", frozenset({"lora-1"})))) == {"lora-1"}
    assert set(await listing.read(Tenant("t", frozenset({"m"})))) == {"m", "lora-0", "lora-1"}
    assert msgspec.json.decode(await listing.read_list(Tenant("t", frozenset({"x"}))))["data"] == []
