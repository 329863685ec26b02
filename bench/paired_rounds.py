"""Throughputs of configurations that take turns on one machine: a disturbance affects a whole round, so ratios within
rounds are given, with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GOAL_RATIO = 0.98  # of the throughput without offload and without cache hits
RESAMPLES = 10_000
ROUNDS_LEAST = 6  # too few rounds give no interval; even, so that every order has its reverse


@dataclass(frozen=True, slots=True)
class Interval:
    median: float
    low: float
    high: float


def ordered(names: Sequence[str], number: int) -> list[str]:
    """Another configuration is first every two rounds; each order is followed by its reverse."""
    place = number // 2 % len(names)
    turned = [*names[place:], *names[:place]]
    return turned[::-1] if number % 2 else turned


def paired_ratio(values: Sequence[float], base: Sequence[float], chance: random.Random) -> Interval:
    """Median over rounds of value / base of the same round, and the middle 95 % of it over resampled rounds."""
    ratios = [value / reference for value, reference in zip(values, base, strict=True)]
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Interval(statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


def promise_of(ratio: Interval) -> str:
    if ratio.low >= GOAL_RATIO:
        return "kept"
    return "missed" if ratio.high < GOAL_RATIO else "undecided"
