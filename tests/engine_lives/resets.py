"""Resets of the prefix cache, hits and reuse of blocks during copies, each in one fixed order of events: a tier's
threads do all of their work between a step's schedule and the workers' part of it."""

from __future__ import annotations

import itertools
import random

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.device.copier import Direction
from spillway_connector.engine.scheduler.resets import blocks_in_use

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


def weights_that_changed(engine: Engine, number: int) -> None:
    """KV that the device computed with former weights is hit until its reset, vLLM's own way, and enters no tier:
    whether it was asked for before the change, between the change and the reset, or across both."""
    before, between, across = (_prompt(f"weights {number} {when}") for when in ("before", "between", "across"))
    _compute(engine, f"before-{number}", before)
    engine.drain()
    engine.submit(f"across-{number}", across, BLOCK_TOKENS + 2)
    engine.step()
    engine.change_weights()
    engine.drain()
    for name, prompt in (("again", before), ("between", between)):
        engine.submit(f"{name}-{number}", prompt, 2)
        engine.drain()
    cached = engine.figures.cached_tokens
    assert cached[f"again-{number}"], "vLLM's own cache should still hit"
    assert not _chunks(engine), "KV of before the reset is in the CPU tier"
    engine.reset_device_cache()
    for name, prompt in (("before", before), ("between", between), ("across", across)):
        engine.submit(f"{name}-new-{number}", prompt, 1)
        engine.drain()
        assert not cached[f"{name}-new-{number}"], "KV of before the reset was used"
    assert _chunks(engine), "what is computed after the reset should be stored"
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def weights_that_are_named(engine: Engine, number: int) -> None:
    """KV that was stored under a name is found under it alone, and at once when the name returns."""
    first, second = 2 * number + 1, 2 * number + 2
    prompt = _prompt(f"named {number}")
    assert engine.name_weights(first) is None
    _compute(engine, f"first-{number}", prompt)
    engine.drain()
    cached = engine.figures.cached_tokens
    for turn, (version, found) in enumerate([(second, False), (first, True), (second, True)]):
        assert engine.name_weights(version) is None
        name = f"named-{number}-{turn}"
        engine.submit(name, prompt, 3)
        if not turn:
            while not blocks_in_use(engine.scheduler.kv_cache_manager.block_pool):
                engine.step()
            refused = engine.name_weights(first)
            assert refused is not None and "in use" in refused, refused
        engine.drain()  # every byte that its attention reads is checked on the way
        assert bool(cached[name]) is found, f"{cached[name]} tokens under version {version}"
    engine.require_nothing_left()


def weights_that_change_under_a_load(engine: Engine, number: int) -> None:
    """The load brings KV of the former weights into blocks that the device then hits until its reset."""
    prompt = _prompt(f"weights under a load {number}")
    _compute(engine, f"writer-{number}", prompt)
    engine.drain()
    engine.reset_device_cache()
    engine.submit(f"loading-{number}", prompt, 2)
    engine.step()
    assert not engine.copiers[Direction.LOAD].idle, "the load should be running"
    engine.change_weights()
    engine.submit(f"waiting-{number}", prompt, 2)
    engine.drain()
    assert not _chunks(engine), "KV of before the reset is in the CPU tier"
    engine.submit(f"running-{number}", prompt, 2 * BLOCK_TOKENS)
    engine.step()
    engine.force_reset(with_connector=False)
    engine.drain()
    engine.submit(f"reader-{number}", prompt, 1)
    engine.drain()
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def reset_of_all_under_a_load(engine: Engine, number: int) -> None:
    """The request that loads is computed from its first token, and its blocks are kept until the copy has ended."""
    prompt = _prompt(f"reset of all {number}")
    _compute(engine, f"writer-{number}", prompt)
    engine.drain()
    engine.reset_device_cache()
    engine.submit(f"reader-{number}", prompt, 1)
    engine.step()
    assert not engine.copiers[Direction.LOAD].idle, "the load should be running"
    engine.force_reset(with_connector=True)
    engine.drain()
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


def pause_under_a_load(engine: Engine, number: int) -> None:
    for keeps_running, sleeps in itertools.product((False, True), repeat=2):
        prompt = _prompt(f"pause {number} {keeps_running} {sleeps}")
        _compute(engine, f"writer-{number}-{keeps_running}-{sleeps}", prompt)
        engine.drain()
        engine.reset_device_cache()
        engine.submit(f"reader-{number}-{keeps_running}-{sleeps}", prompt, 1)
        engine.step()
        assert not engine.copiers[Direction.LOAD].idle, "the load should be running"
        engine.pause(
            keeps_running=keeps_running,
            sleeps=sleeps,
            move_bytes=lambda: [copier.advance(1_000) for copier in engine.copiers.values()] and None,
        )
        engine.drain()
        engine.require_nothing_left()
        assert engine.reset_prefix_cache()


def _chunks(engine: Engine) -> int:
    """Count the chunks in the CPU tier."""
    return len(engine.scheduler.connector.connector_scheduler.manager.primary_tier.resident)


def _compute(engine: Engine, name: str, prompt: list[int]) -> None:
    """Compute a prompt to its end, while no byte moves that no step waits for; its store begins with the next step."""
    engine.submit(name, prompt, 1)
    while engine.unfinished():
        engine.step()


RACES = {
    "store-that-began-before": store_that_began_before,
    "load-under-way": load_under_way,
    "hit-of-blocks-being-stored": hit_of_blocks_being_stored,
    "blocks-reused-while-stored": blocks_reused_while_stored,
    "reset-of-all-under-a-load": reset_of_all_under_a_load,
    "pause-under-a-load": pause_under_a_load,
    "weights-that-are-named": weights_that_are_named,
    "weights-that-change-under-a-load": weights_that_change_under_a_load,
    "weights-that-changed": weights_that_changed,  # the last: its engine's shared tier rests from then on
}


def _prompt(name: str, blocks: int = BLOCKS) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(500) for _ in range(blocks * BLOCK_TOKENS + 1)]
