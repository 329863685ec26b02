from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.engine import SLOW_START_SHARE, Engine, EngineState
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.hot_prefixes import HotPrefix, HotPrefixes
from spillway_gateway.routing.prefix import PromptTokens, chain_blocks, namespace_key, token_bytes
from spillway_gateway.scaling.warm_starts import BUSY_SECONDS, PREFIXES_MAX, WarmStarts

WARM, SLOW = 5.0, 10.0
BLOCK_BYTES = 16


class Scene:
    """A fleet of one model with a stepped clock, and engines that answer hints as a test says."""

    def __init__(self, warm_start_seconds: float = WARM) -> None:
        self.now = 100.0
        self.answer: Callable[[], str] = lambda: "accepted"
        self.sent: list[tuple[str, int]] = []
        self.in_store = True
        routing = RoutingConfig(warm_start_seconds=warm_start_seconds, slow_start_seconds=SLOW)
        index = PrefixIndex("m", bytes_max=1 << 20, orphans_max=1, default_block_tokens=4, clock=lambda: self.now)
        engines = (EngineConfig("old", "http://old:1"),)
        self.fleet = ModelFleet(ModelConfig("m", engines=engines), routing, index, lambda: self.now)
        self.hot = HotPrefixes()
        self.starts = WarmStarts(
            [self.fleet],
            lambda fleet: self.hot,
            self,
            lies_in_store=lambda fleet, prefix: self.in_store,
            clock=lambda: self.now,
            pause=self.pause,
        )
        self.pauses: list[float] = []

    async def send(self, engine: Engine, tokens: PromptTokens, first: int) -> str:
        assert len(tokens.ids) == 4 * first
        self.sent.append((engine.name, first))
        return self.answer()

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def heat(self, families: int = 1) -> None:
        for family in range(families):
            for number in range(5):
                data = token_bytes([family] * 8 + [100 + number] * 4)
                keys = chain_blocks(namespace_key("m"), data, BLOCK_BYTES)
                self.hot.requested(keys, data, BLOCK_BYTES, None, self.now)

    def new_engine(self) -> Engine:
        engine = self.fleet.add_engine(EngineConfig("new", "http://new:1"), newcomer=True)
        engine.set_state(EngineState.READY, "ready")
        return engine


def share(engine: Engine, now: float) -> float:
    return engine.current_rates(now).prefill_tokens_per_second / engine.rates.prefill_tokens_per_second


async def test_a_new_engine_is_sent_what_is_hot_while_it_counts_as_slow() -> None:
    scene = Scene()
    scene.heat()
    engine = scene.new_engine()
    assert engine.take_warm_start()
    assert await scene.starts.warm(scene.fleet, engine) == "warmed"

    assert scene.sent == [("new", 8)]
    for later in (0.0, 0.9 * WARM, WARM):
        assert share(engine, scene.now + later) == pytest.approx(SLOW_START_SHARE)
    assert share(engine, scene.now + WARM + 0.5 * SLOW) == pytest.approx(0.5)
    assert share(engine, scene.now + WARM + SLOW) == 1.0


@pytest.mark.parametrize("in_store", [True, False])
async def test_without_anything_hot_in_a_store_only_the_slow_start_counts(in_store: bool) -> None:
    scene = Scene()
    scene.in_store = in_store
    if not in_store:
        scene.heat()
    engine = scene.new_engine()
    assert await scene.starts.warm(scene.fleet, engine) == "nothing"

    assert not scene.sent
    assert share(engine, scene.now + SLOW) == 1.0


async def test_a_busy_engine_is_asked_again_until_the_time_is_over() -> None:
    scene = Scene()
    scene.heat()
    scene.answer = lambda: "busy"
    engine, began = scene.new_engine(), scene.now
    assert await scene.starts.warm(scene.fleet, engine) == "late"

    assert scene.now - began == pytest.approx(WARM, abs=BUSY_SECONDS + 1e-6)
    assert set(scene.pauses) == {BUSY_SECONDS}


async def test_an_engine_that_takes_no_hints_is_sent_one_and_starts_without() -> None:
    scene = Scene()
    scene.heat(3)
    for answer in ("off", "failed"):
        scene.sent.clear()
        scene.answer = lambda answer=answer: answer  # type: ignore[misc]
        engine = scene.new_engine()
        assert await scene.starts.warm(scene.fleet, engine) == "refused"
        assert len(scene.sent) == 1
        assert share(engine, scene.now + SLOW) == 1.0


async def test_an_engine_that_goes_away_is_sent_no_more() -> None:
    scene = Scene()
    scene.heat(3)
    engine = scene.new_engine()

    def leave() -> str:
        engine.withhold("its pod is terminating", terminating=True)
        return "accepted"

    scene.answer = leave
    assert await scene.starts.warm(scene.fleet, engine) == "late"
    assert len(scene.sent) == 1


async def test_an_engine_is_sent_a_bounded_number() -> None:
    scene = Scene()
    scene.heat(2 * PREFIXES_MAX)
    await scene.starts.warm(scene.fleet, scene.new_engine())
    assert len(scene.sent) == PREFIXES_MAX


@pytest.mark.parametrize("seconds", [WARM, 0.0])
async def test_each_start_is_followed_once_and_none_where_it_is_off(seconds: float) -> None:
    scene = Scene(seconds)
    scene.heat()
    scene.fleet.engines["old"].set_state(EngineState.READY, "ready")  # was ready before this gateway looked
    engine = scene.new_engine()
    task = asyncio.create_task(scene.starts.run())
    for _ in range(50):
        await asyncio.sleep(0)
    engine.set_state(EngineState.DOWN, "refused")
    engine.set_state(EngineState.READY, "ready")
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    starts = 2 if seconds else 0
    assert scene.sent == [("new", 8)] * starts
    assert scene.starts.outcomes["m", "warmed"] == starts
    (family,) = scene.starts.families()
    assert sum(sample.value for sample in family.samples) == starts


def test_a_hot_prefix_of_another_shape_is_no_surprise() -> None:
    prefix = HotPrefix(1, 2, 8, PromptTokens(b"\0" * 32), 3.0)
    assert Scene().fleet.index.in_a_store((prefix.key,)) == 0
