"""The gateway's reading of a simulated engine's bytes: its index must say what the engine's caches hold."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from spillway_gateway.fleet.event_decoder import decode_batch
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.prefix import token_block_keys
from spillway_simulator.fast_forward import FastForward
from spillway_simulator.model.blocks import block_keys
from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.request import EngineRequest
from spillway_simulator.model.tiers import SharedTier
from spillway_simulator.wire.kv_event_encoding import encode_batch

BLOCK = 4


@pytest.mark.parametrize("form", ["array", "map"])
def test_the_gateways_index_agrees_with_the_engines_caches(shape, rates, form):
    random_source = random.Random(11)
    index = PrefixIndex("m", bytes_max=1 << 24, orphans_max=64, default_block_tokens=BLOCK, clock=lambda: 0.0)
    engines = [
        SimulatedEngine(f"e{at}", replace(shape, announce_shared=False), rates, SharedTier(50)) for at in range(2)
    ]
    for engine in engines:
        index.add_engine(engine.name)

    def apply_events(position, events):
        batch = decode_batch(encode_batch(1.0, events, BLOCK, form))
        assert batch.undecodable == 0
        for event in batch.events:
            index.apply(engines[position].name, event)

    prompts = []
    time = FastForward(engines, lambda position, progress: None, apply_events)
    for number in range(60):
        start = [random_source.randrange(3)] * 8
        prompt = array("I", start + [random_source.randrange(2) for _ in range(random_source.randrange(1, 24))])
        salt = random_source.choice([None, "tenant"])
        prompts.append((prompt, salt))
        request = EngineRequest(str(number), prompt, array("I", [1, 2]), salt)
        time.at(number * 0.7, lambda at=number % 2, request=request: time.submit(at, request))
    time.run()

    found = 0
    for prompt, salt in prompts:
        held = index.match(token_block_keys(index.namespace(salt), prompt, BLOCK), BLOCK)
        own = block_keys(prompt, BLOCK, salt)
        for engine in engines:
            on_device = engine.device.longest_prefix(own, len(own))
            below = next(
                (at for at, key in enumerate(own[on_device:]) if key not in engine.tiers.cpu), len(own) - on_device
            )
            match = held.get(engine.name)
            assert (match.device_tokens if match else 0) == on_device * BLOCK
            # No block reaches the CPU tier before the gateway has received its tokens, so the index holds them all.
            assert (match.cpu_tokens if match else 0) == below * BLOCK
            found += on_device + below
    assert found > 50
