"""Shapes that no one has thought of: windows of one token and longer than any prompt, blocks of several sizes, states
beside both, chunks of several blocks, tiers too small for a prompt."""

from __future__ import annotations

import random

from engine_lives.engine import BLOCK_TOKENS, MAX_TOKENS, SINCE_0_30, STATES, Shape

_WINDOWS = (1, 2, 3, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3)
_WINDOWS += (MAX_TOKENS - 1, MAX_TOKENS + BLOCK_TOKENS)


def drawn_shape(seed: int) -> Shape:
    """A shape of two or three KV groups, at least one of full attention."""
    rng = random.Random(f"shape {seed}")
    others = [rng.choice(("full", "window", "window", "states")) for _ in range(rng.choice((1, 2, 2)))]
    windows: list[int | None] = [None]
    for kind in others:
        size = rng.choice((*_WINDOWS, rng.randint(1, MAX_TOKENS)))
        windows.append({"full": None, "states": STATES, "window": size}[kind])
    if all(window is None for window in windows):
        windows[-1] = rng.choice(_WINDOWS)
    rng.shuffle(windows)
    parts = rng.choice((1, 1, 2, 4)) if any(windows) else 1
    if SINCE_0_30 and STATES in windows:
        parts = 1  # vLLM would copy states of the device to continue within a block, which no worker here does
    # Just enough for a prompt of the greatest length, and up to another half of one.
    blocks = sum(MAX_TOKENS // BLOCK_TOKENS + 1 if not window else parts * 13 for window in windows)
    shared = rng.random() < 0.35
    return Shape(
        tuple(windows),
        device_blocks=rng.randint(blocks + 2, blocks * 3 // 2 + 2),
        cpu_rows=len(windows) * rng.randint(6, 40),
        blocks_per_chunk=rng.choice((1, 1, 2, 3)),
        shared_tier=shared,
        generated_tokens=rng.choice(("on", "on", "off")),
        drafts=0 if STATES in windows else rng.choice((0, 0, 1, 3)),
        asynchronous=rng.random() < 0.4,
        refuses_recompute=rng.random() < 0.2,
        window_parts=parts,
    )
