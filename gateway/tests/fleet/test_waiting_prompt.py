from __future__ import annotations

from spillway_gateway.config.settings import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.event_decoder import BlockRemoved, BlockStored, Tier
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.waiting_prompt import CURRENT_SECONDS, WaitingPrompt
from spillway_gateway.routing.prefix import PromptBlocks, token_block_keys

TOKENS = list(range(16))


def fleet_of(names: list[str]) -> ModelFleet:
    index = PrefixIndex("m", bytes_max=10_000_000, orphans_max=10, default_block_tokens=4, clock=lambda: 0.0)
    engines = tuple(EngineConfig(name, "http://127.0.0.1:1") for name in names)
    fleet = ModelFleet(ModelConfig("m", engines), RoutingConfig(), index, clock=lambda: 0.0)
    for engine in fleet.engines.values():
        engine.set_state(EngineState.READY, "ready")
    return fleet


def prompt_of(fleet: ModelFleet) -> PromptBlocks:
    return PromptBlocks(token_block_keys(fleet.index.namespace(), TOKENS, 4), 4, 17, 1)


def store(fleet: ModelFleet, engine: str, blocks: int, tier: Tier = Tier.DEVICE) -> None:
    hashes = [1, 2, 3, 4][:blocks]
    tokens, block_tokens = (TOKENS[: 4 * blocks], 4) if tier is Tier.DEVICE else ([], 0)
    fleet.index.apply(engine, BlockStored(hashes, None, tokens, block_tokens, tier, None, [], 0, None))


def test_only_engines_with_room_count() -> None:
    fleet = fleet_of(["a", "b"])
    store(fleet, "a", 4)
    store(fleet, "b", 1)
    waiting = WaitingPrompt(fleet, prompt_of(fleet), None, 1, clock=lambda: 0.0)
    assert waiting.tokens_at_hand() == 16

    fleet.engines["a"].running_requests = 1
    assert waiting.tokens_at_hand() == 4
    fleet.engines["a"].running_requests = 0
    fleet.engines["a"].set_state(EngineState.DOWN, "gone")
    assert waiting.tokens_at_hand() == 4
    fleet.remove_engine("b")
    assert waiting.tokens_at_hand() == 0


def test_device_and_cpu_tier_count_and_another_engine_than_the_only_one_does_not() -> None:
    fleet = fleet_of(["a", "b"])
    store(fleet, "a", 4)
    store(fleet, "a", 4, Tier.CPU)
    fleet.index.apply("a", BlockRemoved([2, 3, 4], Tier.DEVICE, 0))

    assert WaitingPrompt(fleet, prompt_of(fleet), "a", 1, clock=lambda: 0.0).tokens_at_hand() == 16
    assert WaitingPrompt(fleet, prompt_of(fleet), "b", 1, clock=lambda: 0.0).tokens_at_hand() == 0


def test_the_index_is_asked_again_when_the_answer_is_old() -> None:
    now = 0.0
    fleet = fleet_of(["a"])
    waiting = WaitingPrompt(fleet, prompt_of(fleet), None, 1, clock=lambda: now)
    assert waiting.tokens_at_hand() == 0
    store(fleet, "a", 4)

    assert waiting.tokens_at_hand() == 0
    now = 2 * CURRENT_SECONDS
    assert waiting.tokens_at_hand() == 16
