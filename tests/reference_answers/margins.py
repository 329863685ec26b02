"""Margins within which tests trust two greedy answers to be the same; spillway_engine.near_ties compares them."""

from __future__ import annotations

from spillway_engine.near_ties import (
    REQUEST,
    ROUNDING,
    TOP,
    Scored,
    compared_tokens,
    difference,
    differences,
    scored,
)

__all__ = [
    "DECIDED",
    "MARGIN_LEAST",
    "REQUEST",
    "ROUNDING",
    "ROUNDING_OF_EQUALS",
    "TOP",
    "Scored",
    "compared_tokens",
    "difference",
    "differences",
    "scored",
]

# Natural logarithms. A greedy token that leads by less in float32 is a near tie, and nothing may rest on it.
MARGIN_LEAST = 0.5
# Where equal engines computed both in the same shapes, so that nothing but wrong KV should move anything. Narrow: one
# foreign block of four often moves an answer by no more than 0.3.
ROUNDING_OF_EQUALS = 0.1
# A lead that was measured in the engine's dtype, and is at least MARGIN_LEAST in float32.
DECIDED = MARGIN_LEAST + 2 * ROUNDING
