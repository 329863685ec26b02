"""The figures of prefill and decode apart: of each run, of all runs of a system, and of systems beside each other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from system.device_run import counters
from system.legs_load import Timed
from system.legs_scale import Scale
from system.report import percentile

COMPARED = (
    "first_token_p50_seconds",
    "first_token_geometric_mean_seconds",  # of all requests alike, so that runs differ less by chance
    "between_tokens_p99_seconds",
    "goodput_requests_per_second",
)


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of two or more ratios, and its standard error."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = math.exp(statistics.fmean(logs))
    return mean, mean * statistics.stdev(logs) / len(logs) ** 0.5


def median_of_buckets(page: str, name: str) -> float:
    """The median of a histogram, interpolated within its bucket; 0 if nothing was observed."""
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    below, counted = 0.0, 0.0
    half = max(buckets.values(), default=0.0) / 2
    for bound, count in sorted(buckets.items()):
        if count >= half > 0:
            return bound if bound == float("inf") else below + (bound - below) * (half - counted) / (count - counted)
        below, counted = bound, count
    return 0.0


def legs_counted(page: str, decision: str) -> float:
    """Requests that took one leg, or two."""
    return sum(
        value
        for key, value in counters(page).items()
        if key.startswith("spillway_gateway_legs_total") and f'decision="{decision}"' in key
    )


def figures(timed: Sequence[Timed], seconds: float, scale: Scale) -> dict[str, float]:
    """The figures of one mix."""
    answered = [one for one in timed if one.error is None]
    gaps = [gap for one in answered for gap in one.gaps]
    firsts = [one.first_token_seconds for one in answered]
    if not gaps:
        raise SystemExit(f"none of {len(timed)} requests was answered: {timed[0].error if timed else 'none was sent'}")
    good = [
        one
        for one in answered
        if one.first_token_seconds <= scale.first_token_bound_seconds and one.token_seconds <= scale.token_bound_seconds
    ]
    return {
        "requests": len(timed),
        "failed_requests": len(timed) - len(answered),
        "first_token_p50_seconds": percentile(firsts, 0.5),
        "first_token_p99_seconds": percentile(firsts, 0.99),
        "first_token_geometric_mean_seconds": statistics.geometric_mean(firsts),
        "between_tokens_p50_seconds": percentile(gaps, 0.5),
        "between_tokens_p99_seconds": percentile(gaps, 0.99),
        "goodput_requests_per_second": len(good) / seconds,
    }


@dataclass(slots=True)
class Run:
    """One run of a system. timed: by mix."""

    values: dict[str, float]
    timed: dict[str, list[Timed]]


class Runs:
    """All runs of each system. Systems take turns; the n-th run of each has the same arrivals.

    seconds: of arrivals in each mix.
    """

    def __init__(self, seconds: float, scale: Scale) -> None:
        self._seconds = seconds
        self._scale = scale
        self._runs: dict[str, list[Run]] = {}

    def of(self, name: str) -> list[Run]:
        return self._runs.get(name, [])

    def add(self, name: str, run: Run) -> None:
        self._runs.setdefault(name, []).append(run)

    def figures(self, name: str) -> dict[str, float]:
        """Return those of all requests of its runs; counts of legs are added up, of all else it is the mean."""
        runs, found = self.of(name), dict[str, float]()
        for key in dict.fromkeys(key for run in runs for key in run.values):
            given = [run.values[key] for run in runs if key in run.values]
            found[key] = sum(given) if key.startswith("requests_") else statistics.fmean(given)
        for mix in dict.fromkeys(mix for run in runs for mix in run.timed):
            timed = [run.timed[mix] for run in runs if mix in run.timed]
            all_runs = figures(list(itertools.chain(*timed)), self._seconds * len(timed), self._scale)
            found |= {f"{mix}_{key}": value for key, value in all_runs.items()}
        if len(runs) > 1:
            for number, run in enumerate(runs, 1):
                found |= {f"run_{number}_{key}": value for key, value in self._compared(run).items()}
        return found

    def paired(self, base: str = "plain") -> dict[str, float]:
        """Compare each system that ran as often as the base did with the base's run of the same number: the median, the
        lowest and the highest ratio, their geometric mean with its standard error, and the base's own lowest over its
        highest. More is better for all."""
        found: dict[str, float] = {}
        bases = [self._compared(run) for run in self.of(base)]
        if len(bases) < 2:
            return found
        keys = dict.fromkeys(key for each in bases for key in each)
        for key in keys:
            own = [self._speed(key, each[key]) for each in bases if key in each]
            if max(own):
                found[f"{base}_{key}_lowest_over_highest"] = min(own) / max(own)
        for name, runs in self._runs.items():
            if name == base or len(runs) < 2:
                continue
            pairs = list(zip(map(self._compared, runs), bases, strict=False))
            for key in keys:
                both = [
                    (self._speed(key, own[key]), self._speed(key, other[key])) for own, other in pairs if key in own
                ]
                ratios = [own / other for own, other in both if other]
                if ratios:
                    shown = f"{name}_{key}_speed" if key.endswith("_seconds") else f"{name}_{key}"
                    found[f"{shown}_over_{base}_by_run_median"] = statistics.median(ratios)
                    found[f"{shown}_over_{base}_by_run_lowest"] = min(ratios)
                    found[f"{shown}_over_{base}_by_run_highest"] = max(ratios)
                if len(ratios) > 1 and min(ratios) > 0:
                    mean, error = mean_ratio(ratios)
                    found[f"{shown}_over_{base}_by_run_mean"] = mean
                    found[f"{shown}_over_{base}_by_run_standard_error"] = error
        return found

    def _compared(self, run: Run) -> dict[str, float]:
        found = {}
        for mix, requests in run.timed.items():
            values = figures(requests, self._seconds, self._scale)
            for key in COMPARED:
                found[f"{mix}_{key}"] = values[key]
        return found

    @staticmethod
    def _speed(key: str, value: float) -> float:
        return 1.0 / value if key.endswith("_seconds") else value


def compared(written: Mapping[str, float], systems: Sequence[str], mixes: Sequence[str]) -> dict[str, float]:
    """`auto` over the better of `plain` and `always`, by mix: more is better for both figures."""
    found = {}
    for name, mix in itertools.product([name for name in systems if name.startswith("auto")], mixes):
        rivals = [rival for rival in ("plain", "always") if rival in systems]
        if not rivals:
            continue
        best = max(written[f"{rival}_{mix}_goodput_requests_per_second"] for rival in rivals)
        soonest = min(written[f"{rival}_{mix}_first_token_p50_seconds"] for rival in rivals)
        if best:
            found[f"{name}_{mix}_goodput_over_better"] = written[f"{name}_{mix}_goodput_requests_per_second"] / best
        found[f"{name}_{mix}_first_token_speed_over_better"] = (
            soonest / written[f"{name}_{mix}_first_token_p50_seconds"]
        )
    if {"plain", "always"} <= set(systems):
        for mix in mixes:
            key = f"{mix}_between_tokens_p99_seconds"
            found[f"always_{mix}_between_tokens_p99_over_plain"] = written[f"always_{key}"] / written[f"plain_{key}"]
    return found


def table(written: Mapping[str, float], systems: Sequence[str]) -> str:
    """A row for each figure, a column for each system."""
    names = dict.fromkeys(key.removeprefix(f"{systems[0]}_") for key in written if key.startswith(f"{systems[0]}_"))
    names |= dict.fromkeys(
        key.removeprefix("always_") for key in written if key.startswith("always_") and not key.endswith("_over_plain")
    )
    names = {name: None for name in names if not name.startswith("run_")}
    width = max(len(name) for name in names)
    lines = [" " * width + "".join(f"{name:>12}" for name in systems)]
    for name in names:
        cells = (written.get(f"{system}_{name}") for system in systems)
        lines.append(f"{name:{width}}" + "".join(f"{'-' if cell is None else f'{cell:.4g}':>12}" for cell in cells))
    return "\n".join(lines)
