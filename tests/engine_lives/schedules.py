"""One random schedule on an engine: submits, steps, aborts, preemptions and failing copies, then silence."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, Engine

_PROMPTS = 24  # few enough that many requests find something, too many for the device and the CPU tier


def run(engine: Engine, seed: int) -> None:
    """Raises AssertionError when a byte is wrong, something is left, or the engine does not come to rest."""
    dice = random.Random(seed)
    failing = dice.choice([0.0, 0.0, 0.15, 0.5]) if engine.may_fail else 0.0
    for copier in engine.copiers.values():
        copier.dice = dice
        copier.failing_share = failing
        copier.refused_share = failing / 3
    tier = engine.tier
    if tier is not None:
        tier.dice, tier.losing_share = dice, dice.choice([0.0, 0.0, 0.1])
    started = 0
    for _ in range(dice.randint(5, 40)):
        action = dice.random()
        if action < 0.3:
            started += 1
            prompt = prompt_of(dice)
            engine.submit(f"{seed}-{started}", prompt, dice.randint(1, 2 * BLOCK_TOKENS))
            engine.trace.append(f"submit {seed}-{started}: {len(prompt)} tokens")
        elif action < 0.36 and (alive := engine.unfinished()):
            name = dice.choice(alive).request_id
            engine.trace.append(f"abort {name}")
            engine.abort(name)
        elif action < 0.4:
            if engine.may_reset:
                engine.trace.append("preempt all")
                engine.preempt_all()
        elif action < 0.42:
            engine.forget_device_cache()
        elif action < 0.46:
            if engine.may_reset:
                engine.trace.append(f"reset: {engine.reset_prefix_cache()}")
        elif action < 0.48:
            if engine.may_reset:
                engine.trace.append("weights change")
                engine.change_weights()
        else:
            move_bytes(engine, dice)
            engine.step(meanwhile=lambda: move_bytes(engine, dice), steps_ahead=dice.choice([0, 0, 1]))
    for copier in engine.copiers.values():
        copier.failing_share = copier.refused_share = 0.0
    if tier is not None:
        tier.losing_share = 0.0
    engine.drain()
    engine.require_nothing_left()


def move_bytes(engine: Engine, dice: random.Random) -> None:
    """Copies and tiers have threads of their own, which no step waits for."""
    for copier in engine.copiers.values():
        copier.advance(dice.choice([0, 0, 1, 2, 100]))
    if engine.tier is not None:
        engine.tier.advance(dice.choice([0, 1, 2, 3, 100]), dice.choice([0, 0, 1, 100]))


def prompt_of(dice: random.Random) -> list[int]:
    """A beginning that others share, and often an end of its own; now and then exactly whole blocks."""
    shared = random.Random(dice.randrange(_PROMPTS))
    blocks = dice.randint(1, 7)
    tokens = [shared.randrange(500) for _ in range(blocks * BLOCK_TOKENS + dice.choice([0, 0, 1, 7]))]
    if dice.random() < 0.4:
        tokens += [dice.randrange(500) for _ in range(dice.randint(1, BLOCK_TOKENS))]
    return tokens
