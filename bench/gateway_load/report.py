"""Results of all rounds: printed tables, flat figures with units, and the goals."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass, field

from gateway_load.cells import CONCURRENT, Cell, Memory, Probed

LIMIT = "engines alone"
Figures = dict[str, float | int | str]


@dataclass(slots=True)
class Results:
    """cells: by router, streamed or not, and requests at once; one per round."""

    cells: dict[tuple[str, bool, int], list[Cell]] = field(default_factory=dict)
    probed: dict[str, Probed] = field(default_factory=dict)
    memory: Memory | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self.cells))

    def median(self, name: str, stream: bool, concurrent: int, field_name: str) -> float | None:
        values = [getattr(cell, field_name) for cell in self.cells.get((name, stream, concurrent), [])]
        known = [value for value in values if value is not None and not math.isnan(value)]
        return statistics.median(known) if known else None

    def added(self, name: str, stream: bool, concurrent: int, field_name: str) -> float | None:
        own, limit = (self.median(each, stream, concurrent, field_name) for each in (name, LIMIT))
        return own - limit if own is not None and limit is not None else None


def render(results: Results) -> str:
    parts = []
    for concurrent in CONCURRENT:
        for stream in (False, True):
            if any(key[1:] == (stream, concurrent) for key in results.cells):
                parts.append(_table(results, stream, concurrent))
    if results.probed:
        parts.append(_probes(results))
    memory = results.memory
    if memory is not None:
        tenths = "  ".join(f"{value:.0f}" for value in memory.rss_mb)
        parts.append(
            f"{memory.prompts:,} prompts that share nothing, {memory.failures} failures: resident MB after each tenth\n"
            f"  {tenths}   (second half {100 * memory.growth:+.1f} %)"
        )
    parts += [f"left out: {name}: {why}" for name, why in results.left_out.items()]
    return "\n\n".join(parts)


def _table(results: Results, stream: bool, concurrent: int) -> str:
    kind = "streamed" if stream else "plain"
    p50, p99 = ("first_event_p50_ms", "first_event_p99_ms") if stream else ("p50_ms", "p99_ms")
    timed = "first event" if stream else "whole reply"
    lines = [
        f"{kind}, {concurrent} at once ({timed}; CPU s per 1,000 requests"
        + (" and per 100,000 events)" if stream else ")"),
        f"  {'':<28}{'requests/s':>11}{'events/s' if stream else '':>10}{'p50 ms':>9}{'p99 ms':>9}"
        f"{'+p50 ms':>9}{'+p99 ms':>9}{'CPU/1k':>8}{'CPU/100k' if stream else '':>9}{'MB':>6}{'failed':>7}",
    ]
    for name in results.names:
        own = name != LIMIT
        cells = results.cells.get((name, stream, concurrent), [])

        def shown(field_name: str, width: int, digits: int, name: str = name) -> str:
            return _number(results.median(name, stream, concurrent, field_name), width, digits)

        def more(field_name: str, name: str = name, own: bool = own) -> str:
            return _number(results.added(name, stream, concurrent, field_name) if own else None, 9, 2)

        lines.append(
            f"  {name:<28}{shown('requests_per_second', 11, 0)}"
            f"{shown('events_per_second', 10, 0) if stream else ' ' * 10}{shown(p50, 9, 2)}{shown(p99, 9, 2)}"
            f"{more(p50)}{more(p99)}{shown('cpu_seconds_per_1000_requests', 8, 2)}"
            f"{shown('cpu_seconds_per_100000_events', 9, 2) if stream else ' ' * 9}{shown('rss_mb', 6, 0)}"
            f"{sum(cell.failures for cell in cells):>7}"
        )
    return "\n".join(lines)


def _probes(results: Results) -> str:
    streams = next(iter(results.probed.values())).streams
    lines = [f"{streams:,} streams at once, a probe each 100 ms with 1 s to answer"]
    for name, probed in results.probed.items():
        lines.append(
            f"  {name:<28}{probed.failed_probes:>4} of {probed.probes} probes failed, slowest "
            f"{probed.slowest_probe_ms:.0f} ms (prober's own timer late by up to {probed.timer_late_ms:.0f} ms); "
            f"{probed.failures} streams failed"
        )
    return "\n".join(lines)


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else format(value, f',.{digits}f'):>{width}}"


def goals(results: Results) -> dict[str, str]:
    """Goal -> met, missed, or not measured."""

    def rate(name: str) -> float | None:
        return results.median(name, False, 64, "requests_per_second")

    def outcome(value: float | None, limit: float | None, *, at_least: bool) -> str:
        if value is None or limit is None:
            return "unmeasured"
        return "met" if (value >= limit if at_least else value <= limit) else "missed"

    own, stack, cache_aware, sglang = (
        rate(name)
        for name in (
            "spillway",
            "production-stack prefixaware",
            "vllm-router cache_aware",
            "sglang-router cache_aware",
        )
    )
    p50, p99 = (results.added("spillway", False, 1, each) for each in ("p50_ms", "p99_ms"))
    probed, memory = results.probed.get("spillway"), results.memory
    failed = probed.failed_probes + probed.failures if probed is not None else None
    return {
        "at least 3x production-stack prefixaware's requests/s at 64": outcome(
            own, 3 * stack if stack is not None else None, at_least=True
        ),
        "no fewer requests/s at 64 than vllm-router cache_aware": outcome(own, cache_aware, at_least=True),
        "at least half of sglang-router cache_aware's requests/s at 64": outcome(
            own, sglang / 2 if sglang is not None else None, at_least=True
        ),
        "added p50 at most 0.5 ms at 1": outcome(p50, 0.5, at_least=False),
        "added p99 at most 5 ms at 1": outcome(p99, 5.0, at_least=False),
        "1,000 streams at once without a failed probe or stream": outcome(failed, 0, at_least=False),
        "memory within 5 % over the second half of the distinct prompts": outcome(
            memory.growth if memory is not None else None, 0.05, at_least=False
        ),
    }


def flat(results: Results) -> Figures:
    """One object, units in the keys: `<router>_<plain|streamed>_<at once>_<figure>`."""
    figures: Figures = {}
    for name, stream, concurrent in results.cells:
        prefix = f"{_key(name)}_{'streamed' if stream else 'plain'}_{concurrent}_"
        for item in dataclasses.fields(Cell):
            if item.name in ("first_failure", "failures"):
                continue
            value = results.median(name, stream, concurrent, item.name)
            if value is not None:
                figures[prefix + item.name] = round(value, 4)
        figures[prefix + "failures_count"] = sum(cell.failures for cell in results.cells[name, stream, concurrent])
        if name != LIMIT:
            timed = ("first_event_p50_ms", "first_event_p99_ms") if stream else ("p50_ms", "p99_ms")
            for each in timed:
                more = results.added(name, stream, concurrent, each)
                if more is not None:
                    figures[f"{prefix}added_{each}"] = round(more, 4)
    for name, probed in results.probed.items():
        prefix = f"{_key(name)}_streams_{probed.streams}_"
        figures[prefix + "probes_count"] = probed.probes
        figures[prefix + "failed_probes_count"] = probed.failed_probes
        figures[prefix + "slowest_probe_ms"] = round(probed.slowest_probe_ms, 2)
        figures[prefix + "prober_timer_late_ms"] = round(probed.timer_late_ms, 2)
        figures[prefix + "failures_count"] = probed.failures
    if results.memory is not None:
        figures["spillway_distinct_prompts_count"] = results.memory.prompts
        figures["spillway_distinct_failures_count"] = results.memory.failures
        for at, value in enumerate(results.memory.rss_mb, 1):
            figures[f"spillway_distinct_rss_after_{at * 10}_percent_mb"] = round(value, 1)
        figures["spillway_distinct_second_half_growth_ratio"] = round(results.memory.growth, 4)
    for name, why in results.left_out.items():
        figures[f"{_key(name)}_left_out"] = why
    for goal, outcome in goals(results).items():
        figures["goal: " + goal] = outcome
    return figures


def _key(name: str) -> str:
    return name.replace("-", "_").replace(", ", "_").replace(" ", "_")
