"""Resets of the prefix cache, hits and reuse of blocks during copies, each in one fixed order of events: a tier's
threads do all of their work between a step's schedule and the workers' part of it."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.device.copier import Direction

BLOCKS = 4


def store_that_began_before(engine: Engine, number: int) -> None:
    """The workers defer an old store until their next step. That step's schedule reuses the rows of its chunks for
    other loads, which the tier's threads read before the workers receive the step."""
    wanted, old = _prompt(f"wanted {number}"), _prompt(f"old {number}")
    engine.submit(f"writer-{number}", wanted, 1)
    engine.drain()
    assert engine.reset_prefix_cache(), "of an engine at rest"
    engine.submit(f"old-{number}", old, 1)
    while engine.unfinished():  # its keys are looked up first; then one step computes it
        engine.step()
    assert engine.reset_prefix_cache(), "no block of the device is in use"
    loaded = len(engine.copiers[Direction.LOAD].submitted_ids)
    engine.submit(f"reader-{number}", wanted, 1)
    engine.step(meanwhile=engine.settle_nvme)
    engine.drain()  # every byte that the reader's attention reads is checked on the way
    assert len(engine.copiers[Direction.LOAD].submitted_ids) > loaded, "the reader should load its prefix"
    engine.require_nothing_left()


def load_under_way(engine: Engine, number: int) -> None:
    """The device cannot be reset while a load writes to it, so the CPU tier is not reset either, and the load ends."""
    prompt = _prompt(f"loaded {number}")
    engine.submit(f"writer-{number}", prompt, 1)
    engine.drain()
    engine.reset_device_cache()
    engine.submit(f"reader-{number}", prompt, 1)
    engine.step()
    assert not engine.copiers[Direction.LOAD].idle, "the load should be running"
    assert not engine.reset_prefix_cache()
    engine.drain()
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def hit_of_blocks_being_stored(engine: Engine, number: int) -> None:
    """The hit and the store read the same blocks: no step waits for the store."""
    prompt = _prompt(f"hit {number}")
    _compute(engine, f"writer-{number}", prompt)
    store = engine.copiers[Direction.STORE]
    engine.submit(f"reader-{number}", prompt, 1)
    while engine.unfinished():
        engine.step()
        assert not store.idle, "the reader should not wait for the store"
    engine.drain()
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def blocks_reused_while_stored(engine: Engine, number: int) -> None:
    """The store ends before a step writes to its blocks, or what it stores would be another request's."""
    prompt = _prompt(f"reused {number}")
    _compute(engine, f"writer-{number}", prompt)
    for other in range(4):  # more than the device holds
        _compute(engine, f"other-{number}-{other}", _prompt(f"other {number} {other}", 2 * BLOCKS))
    engine.drain()
    engine.reset_device_cache()
    loaded = len(engine.copiers[Direction.LOAD].submitted_ids)
    engine.submit(f"reader-{number}", prompt, 1)
    engine.drain()  # every byte that the reader's attention reads is checked on the way
    assert len(engine.copiers[Direction.LOAD].submitted_ids) > loaded, "the reader should load its prefix"
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def _compute(engine: Engine, name: str, prompt: list[int]) -> None:
    """To its end, while no byte moves that no step waits for; its store begins with the next step."""
    engine.submit(name, prompt, 1)
    while engine.unfinished():
        engine.step()


RACES = {
    "store-that-began-before": store_that_began_before,
    "load-under-way": load_under_way,
    "hit-of-blocks-being-stored": hit_of_blocks_being_stored,
    "blocks-reused-while-stored": blocks_reused_while_stored,
}


def _prompt(name: str, blocks: int = BLOCKS) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(500) for _ in range(blocks * BLOCK_TOKENS + 1)]
