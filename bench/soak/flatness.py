"""Growth of a series: a slope that outliers cannot move, and a test that chance cannot pass. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

POINTS_LEAST = 12
SECONDS_LEAST = 120.0  # a process that lived for less allows no verdict
POINTS_MOST = 200  # of a series; pairs are counted, so longer ones are thinned
SURE = 2.33  # one-sided 1 %

Series = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Trend:
    """rise: Theil-Sen slope times duration, in the series' unit. z: of the Mann-Kendall test, corrected for ties."""

    points: int
    seconds: float
    median: float
    rise: float
    z: float

    def grows(self, allowance: float) -> bool:
        """Whether the series rises by more than `allowance` over the time looked at, and not by chance."""
        return self.rise > allowance and self.z > SURE


def second_half(series: Series) -> list[tuple[float, float]]:
    """Return the points after start-up, first use and the filling of caches."""
    if not series:
        return []
    middle = (series[0][0] + series[-1][0]) / 2
    return [point for point in series if point[0] >= middle]


def trend(series: Series) -> Trend | None:
    """series: (seconds, value) in order. None if it is too short to say anything."""
    points = list(series)[:: max(1, math.ceil(len(series) / POINTS_MOST))]
    if len(points) < POINTS_LEAST or points[-1][0] - points[0][0] < SECONDS_LEAST:
        return None
    slopes: list[float] = []
    balance = 0
    for (early, low), (late, high) in itertools.combinations(points, 2):
        slopes.append((high - low) / (late - early))
        balance += (high > low) - (high < low)
    seconds = points[-1][0] - points[0][0]
    values = [value for _, value in points]
    return Trend(
        len(points), seconds, statistics.median(values), statistics.median(slopes) * seconds, _z(balance, values)
    )


def _z(balance: int, values: Sequence[float]) -> float:
    count = len(values)
    ties = [len(list(group)) for _, group in itertools.groupby(sorted(values))]
    variance = (count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)) / 18
    if variance <= 0:
        return 0.0
    return (balance - math.copysign(1, balance)) / math.sqrt(variance) if balance else 0.0
