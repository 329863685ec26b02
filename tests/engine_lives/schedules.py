"""One random schedule on an engine: submits, steps, aborts, preemptions and failing copies, then idle steps."""

from __future__ import annotations

import random
from typing import Any

from engine_lives.engine import BLOCK_TOKENS, Engine

_PROMPTS = 24  # few enough for many hits, too many for the device and the CPU tier
_TRANSFER_PARAMS: tuple[Any, ...] = (  # of requests that are computed like any other
    "boom",
    7,
    1.5,
    True,
    [["do_remote_prefill"]],
    {"do_remote_prefill": True, "do_remote_decode": True, "remote_block_ids": [1], "remote_host": "203.0.113.1"},
    {"spillway_session": ["boom"], "max_offload_tokens": "boom", "max_load_tokens": {}, "kv_load_tiers": 7},
    {"spillway_session": {"id": {"id": 7}, "return_seconds": [], "ended": "boom"}, "kv_load_tiers": [["medium"]]},
    {"spillway_session": {"id": "one", "return_seconds": 2**63}, "max_offload_tokens": -1},
    {"spillway_session": {"id": "one", "ended": True}, "max_offload_tokens": BLOCK_TOKENS},
    {"spillway_retention": {"marks": [[None, 2**63], ["boom", 1]], "share": "boom"}},
    {"spillway_retention": {"marks": [[BLOCK_TOKENS, 60], [None, 1e-3]], "share": 0.2}},
)


def run(engine: Engine, seed: int) -> None:
    """Raises AssertionError when a byte is wrong, something is left, or the engine does not become idle."""
    rng = random.Random(seed)
    failing = rng.choice([0.0, 0.0, 0.15, 0.5]) if engine.may_fail else 0.0
    for copier in engine.copiers.values():
        copier.rng = rng
        copier.failing_share = failing
        copier.refused_share = failing / 3
    tier = engine.tier
    if tier is not None:
        tier.rng, tier.losing_share = rng, rng.choice([0.0, 0.0, 0.1])
    engine.rng = rng
    engine.pace(rng.choice([1.0] * 9 + [1e3]))
    started = 0
    for _ in range(rng.randint(5, 40)):
        action = rng.random()
        if action < 0.3:
            started += 1
            prompt = prompt_of(rng)
            params = rng.choice(_TRANSFER_PARAMS) if rng.random() < 0.2 else None
            engine.submit(f"{seed}-{started}", prompt, rng.randint(1, 2 * BLOCK_TOKENS), params)
            engine.trace.append(f"submit {seed}-{started}: {len(prompt)} tokens")
        elif action < 0.36 and (alive := engine.unfinished()):
            name = rng.choice(alive).request_id
            engine.trace.append(f"abort {name}")
            engine.abort(name)
        elif action < 0.4:
            if engine.may_reset:
                with_connector = rng.random() < 0.5
                engine.trace.append(f"reset of all, with the connector: {with_connector}")
                engine.force_reset(with_connector=with_connector)
        elif action < 0.42:
            engine.reset_device_cache()
        elif action < 0.46:
            if engine.may_reset:
                engine.trace.append(f"reset: {engine.reset_prefix_cache()}")
        elif action < 0.48:
            if engine.may_reset:
                engine.trace.append("weights change")
                engine.change_weights()
        elif action < 0.5:
            if engine.may_reset and engine.shape.storing == "late" and rng.random() < 0.5:
                engine.trace.append("settle")
                engine._scheduler_half.without_requests.settle(3600.0)
            elif engine.may_reset:
                sleeps = rng.random() < 0.5
                engine.trace.append("sleep" if sleeps else "pause")
                engine.pause(
                    keeps_running=rng.random() < 0.5, sleeps=sleeps, move_bytes=lambda: move_bytes(engine, rng)
                )
                if rng.random() < 0.5:
                    version = rng.randrange(3)
                    engine.trace.append(f"weights {version}")
                    assert (refused := engine.name_weights(version)) is None, refused
        else:
            move_bytes(engine, rng)
            engine.step(meanwhile=lambda: move_bytes(engine, rng), steps_ahead=rng.choice([0, 0, 1]))
    for copier in engine.copiers.values():
        copier.failing_share = copier.refused_share = 0.0
    if tier is not None:
        tier.losing_share = 0.0
    engine.drain()
    if engine.shape.storing == "late":
        engine.settle()
    engine.require_nothing_left()


def move_bytes(engine: Engine, rng: random.Random) -> None:
    """Copies and tiers progress independently of steps."""
    for copier in engine.copiers.values():
        copier.advance(rng.choice([0, 0, 1, 2, 100]))
    if engine.tier is not None:
        engine.tier.advance(rng.choice([0, 1, 2, 3, 100]), rng.choice([0, 0, 1, 100]))


def prompt_of(rng: random.Random) -> list[int]:
    """A shared prefix, and often a private suffix; sometimes exactly whole blocks."""
    shared = random.Random(rng.randrange(_PROMPTS))
    blocks = rng.randint(1, 7)
    tokens = [shared.randrange(500) for _ in range(blocks * BLOCK_TOKENS + rng.choice([0, 0, 1, 7]))]
    if rng.random() < 0.4:
        tokens += [rng.randrange(500) for _ in range(rng.randint(1, BLOCK_TOKENS))]
    return tokens
