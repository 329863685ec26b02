"""A prompt whose end is loaded while it is computed, from a tier that keeps its rate and from one that stalls, in
simulated seconds: a step takes as long as its tokens take to be computed."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, Engine
from spillway_connector.plan.meeting import HOLD_SECONDS_MAX, MARGIN, MeetingOutcome

BLOCKS = 10
COMPUTED_PER_SECOND, LOADED_PER_SECOND = 31.25, 25.0  # blocks; the pace that Engine.pace gives a tier
EMPTY_STEP_SECONDS = 0.001


def a_load_that_is_met(engine: Engine, number: int) -> None:
    alone, seconds = _read(engine, f"met {number}", LOADED_PER_SECOND)
    assert engine.meetings == {MeetingOutcome.PLANNED: 1, MeetingOutcome.MET: 1}, engine.meetings
    assert seconds <= MARGIN * alone, f"{seconds:.3f} s, and {alone:.3f} s without loading"


def a_tier_that_stalls(engine: Engine, number: int) -> None:
    alone, seconds = _read(engine, f"stalled {number}", 0.0)
    assert engine.meetings == {MeetingOutcome.PLANNED: 1, MeetingOutcome.ABANDONED: 1}, engine.meetings
    assert seconds > alone + HOLD_SECONDS_MAX / 2, "the request should wait for what seems to be near"
    steps = 2 * EMPTY_STEP_SECONDS  # before the first, for the look-up; and the wait may end within one
    assert seconds <= alone + HOLD_SECONDS_MAX + steps, f"{seconds:.3f} s, and {alone:.3f} s without loading"


def _read(engine: Engine, name: str, loaded_per_second: float) -> tuple[float, float]:
    """Seconds to compute the whole prompt, and until it was answered; every byte that is read is checked."""
    rng = random.Random(name)
    prompt = [rng.randrange(500) for _ in range(BLOCKS * BLOCK_TOKENS + 1)]
    tokens_per_second = COMPUTED_PER_SECOND * BLOCK_TOKENS
    engine.pace(tokens_per_second)
    engine.submit(f"writer-{name}", prompt, 1)
    engine.drain()
    assert engine.reset_prefix_cache(), "of an engine at rest"
    engine.meetings.clear()
    now, loaded = 0.0, 0
    engine.set_clock(lambda: now)
    engine.submit(f"reader-{name}", prompt, 1)
    assert engine.tier is not None
    while engine.unfinished():
        engine.step()
        tokens = sum(engine.last_step.values())
        now += tokens / tokens_per_second if tokens else EMPTY_STEP_SECONDS
        for copier in engine.copiers.values():
            copier.advance(1_000)
        due = int(now * loaded_per_second)
        engine.tier.advance(due - loaded, 0)
        loaded = due
        assert now < 60.0, "the prompt is never answered"
    engine.drain()
    engine.require_nothing_left()
    return len(prompt) / tokens_per_second, now


STALLS = {"load-that-is-met": a_load_that_is_met, "tier-that-stalls": a_tier_that_stalls}
