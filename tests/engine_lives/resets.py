"""Resets of the prefix cache while copies are under way, in one order of events each: what a tier's threads may do
between a step's schedule and the workers' part of it is done there, all of it."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.device.copier import Direction

BLOCKS = 4


def store_that_began_before(engine: Engine, number: int) -> None:
    """The workers hold an old store back until their next step. In that step's schedule the rows of its chunks are
    wanted for others, which the tier's threads read before the workers hear of the step."""
    wanted, old = _prompt(f"wanted {number}"), _prompt(f"old {number}")
    engine.submit(f"writer-{number}", wanted, 1)
    engine.drain()
    assert engine.reset_prefix_cache(), "of an engine at rest"
    engine.submit(f"old-{number}", old, 1)
    while engine.unfinished():  # its keys are looked for first; then one step computes it
        engine.step()
    assert engine.reset_prefix_cache(), "no block of the device is in use"
    loaded = len(engine.copiers[Direction.LOAD].submitted_ids)
    engine.submit(f"reader-{number}", wanted, 1)
    engine.step(meanwhile=engine.settle_nvme)
    engine.drain()  # every byte that the reader's attention reads is checked on the way
    assert len(engine.copiers[Direction.LOAD].submitted_ids) > loaded, "the reader was to load its prefix"
    engine.require_nothing_left()


def load_under_way(engine: Engine, number: int) -> None:
    """The device cannot be reset while a load writes to it, so the CPU tier is not reset either, and the load ends."""
    prompt = _prompt(f"loaded {number}")
    engine.submit(f"writer-{number}", prompt, 1)
    engine.drain()
    engine.forget_device_cache()
    engine.submit(f"reader-{number}", prompt, 1)
    engine.step()
    assert not engine.copiers[Direction.LOAD].idle, "the load was to be under way"
    assert not engine.reset_prefix_cache()
    engine.drain()
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


RACES = {"store-that-began-before": store_that_began_before, "load-under-way": load_under_way}


def _prompt(name: str) -> list[int]:
    dice = random.Random(name)
    return [dice.randrange(500) for _ in range(BLOCKS * BLOCK_TOKENS + 1)]
