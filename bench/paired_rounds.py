"""Throughputs of configurations that take turns on one machine: a disturbance affects a whole round, so ratios within
rounds are given, with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GOAL_RATIO = 0.98  # of the throughput without offload and without cache hits
RESAMPLES = 10_000
ROUNDS_LEAST = 6  # too few rounds give no interval; even, so that every order has its reverse


@dataclass(frozen=True, slots=True)
class Interval:
    median: float
    low: float
    high: float

    def figures(self, key: str, digits: int = 4) -> dict[str, float]:
        """Return the interval as a report has it: `KEY`, `KEY_low` and `KEY_high`."""
        ends = {"": self.median, "_low": self.low, "_high": self.high}
        return {f"{key}{end}": round(value, digits) for end, value in ends.items()}


def interval_text(report: Mapping[str, Any], key: str, digits: int = 3, of: str = "") -> str:
    """The interval of that key as a table has it; 1 if there is none, as for the base itself. of: the base's name."""
    if key not in report:
        return "1"
    median, low, high = (f"{float(report[f'{key}{end}']):.{digits}f}" for end in ("", "_low", "_high"))
    return f"{median}{of and f' of {of}'} ({low} to {high})"


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
