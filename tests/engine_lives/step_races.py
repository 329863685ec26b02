"""Requests beside a load within a step that fails, in a fixed order of events."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.device.copier import Direction

BLOCKS = 4


def hits_of_a_load_that_fails(engine: Engine, number: int) -> None:
    """Two requests hit blocks that the step before them still loads, and load what follows by themselves. Neither may
    rely on the other to compute the blocks again."""
    rng = random.Random(number)
    shared, first, second = ([rng.randrange(500) for _ in range(BLOCKS * BLOCK_TOKENS)] for _ in range(3))
    prompts = {"first": [*shared, *first, 1], "second": [*shared, *second, 1]}
    for name, prompt in prompts.items():
        engine.submit(f"writer-{name}-{number}", prompt, 1)
        engine.drain()
    engine.reset_device_cache()
    if number % 2:  # then the first bad block is not the prompts' first one
        engine.submit(f"before-{number}", shared[: BLOCKS // 2 * BLOCK_TOKENS + 1], 1)
        engine.drain()
    half, load = engine.scheduler.connector.connector_scheduler, engine.copiers[Direction.LOAD]
    half.others_wait_ms_max = 0.0  # a load beside others is one of its own
    step_loads, loads = engine.figures.step_loads, len(load.submitted_ids)
    engine.submit(f"within-{number}", [*shared, 1, 2], 2)
    engine.schedule()
    for name, prompt in prompts.items():
        engine.submit(f"{name}-{number}", prompt, 2)
    engine.schedule()
    load.failing_share = 1.0
    engine.step(steps_ahead=1)
    load.failing_share = 0.0
    assert engine.figures.step_loads == step_loads + 1 and engine.figures.failures
    engine.drain()  # every byte that the requests' attention reads is checked on the way
    assert len(load.submitted_ids) > loads + 2, "both should have loaded"
    engine.require_nothing_left()
    assert engine.reset_prefix_cache()


STEP_RACES = {"hits-of-a-load-that-fails": hits_of_a_load_that_fails}
