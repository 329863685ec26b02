"""Throughputs of configurations that take turns on one machine: what disturbs a round disturbs all of it, and ratios
within rounds are told with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GOAL_RATIO = 0.98  # of the throughput without offload, where nothing is ever hit
RESAMPLES = 10_000
ROUNDS_LEAST = 6  # of fewer no interval can be told; of an even number, so that every order comes with its reverse


@dataclass(frozen=True, slots=True)
class Interval:
    median: float
    low: float
    high: float


def ordered(names: Sequence[str], number: int) -> list[str]:
    """Another one begins every two rounds, and each order is followed by its reverse."""
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
