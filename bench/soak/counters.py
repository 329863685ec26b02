"""Counters of engines that restart: what was added, across every process that ever had the name."""

from __future__ import annotations

from collections import defaultdict

import httpx
from stack_driver.engine_metrics import Reading

WANTED = (
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "spillway_cpu_tier_resets_total",
    "spillway_tier_lookups_total",
    "spillway_tier_read_bytes_total",
    "spillway_tier_written_bytes_total",
    "spillway_tier_failures_total",
    "spillway_tier_evicted_frames_total",
    "spillway_device_copy_bytes_total",
    "spillway_device_copy_failures_total",
)
_SKIPPED_LABELS = ("model_name", "engine", "tier")


class Counters:
    """A counter that is lower than before belongs to a new process. What a killed engine counted after the last sample
    is lost, so totals are lower bounds."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._last: dict[tuple[str, str], float] = {}

    def add(self, engine: str, reading: Reading) -> None:
        for sample in reading.samples:
            if sample.name not in WANTED:
                continue
            series = series_name(sample.name, sample.labels)
            before = self._last.get((engine, series), 0.0)
            self.totals[series] += sample.value - before if sample.value >= before else sample.value
            self._last[engine, series] = sample.value

    def total(self, name: str) -> float:
        """The sum of all series of one metric, whatever their labels."""
        return sum(total for series, total in self.totals.items() if series == name or series.startswith(f"{name}_"))


def series_name(name: str, labels: dict[str, str]) -> str:
    """`tier_failures_load_payload` for the failures of loads by their payload."""
    short = name.removeprefix("vllm:").removeprefix("spillway_").removesuffix("_total")
    return "_".join([short, *(value for label, value in sorted(labels.items()) if label not in _SKIPPED_LABELS)])


def read_metrics(client: httpx.Client, url: str) -> Reading | None:
    """Read the metrics of an engine, or return None if it is away."""
    try:
        response = client.get(f"{url}/metrics", timeout=10.0)
        response.raise_for_status()
    except httpx.HTTPError:
        return None
    return Reading.parse(response.text)


def tier_moves(reading: Reading) -> float:
    """Bytes that an engine's shared tiers have moved, in both directions."""
    return reading.total("spillway_tier_read_bytes_total") + reading.total("spillway_tier_written_bytes_total")


def breakers_open(reading: Reading) -> bool:
    return reading.total("spillway_tier_breaker_open") > 0
