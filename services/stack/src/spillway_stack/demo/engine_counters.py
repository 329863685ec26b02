"""The counters of an engine's /metrics that show where a prompt's KV came from."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from spillway_stack.local_http import READ_SECONDS, exchange

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)")
# Once per prompt, at its prefill. The prefix-cache hit counters beside it count a request again each time the scheduler
# looks it up again while a tier is still answering or loading.
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_DIVIDING = ("tier", "direction", "source")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the engine's start; subtract two readings for a counter delta."""

    prompt_tokens: int = 0
    device_hit_tokens: int = 0  # found in the device's own prefix cache
    external_hit_tokens: int = 0  # loaded by the connector: CPU tier and shared tiers
    device_load_bytes: int = 0  # CPU tier -> device
    device_store_bytes: int = 0  # device -> CPU tier
    tier_read_bytes: dict[str, int] = field(default_factory=dict)  # shared tier -> CPU tier
    tier_written_bytes: dict[str, int] = field(default_factory=dict)

    def since(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(
            self.prompt_tokens - before.prompt_tokens,
            self.device_hit_tokens - before.device_hit_tokens,
            self.external_hit_tokens - before.external_hit_tokens,
            self.device_load_bytes - before.device_load_bytes,
            self.device_store_bytes - before.device_store_bytes,
            {tier: total - before.tier_read_bytes.get(tier, 0) for tier, total in self.tier_read_bytes.items()},
            {tier: total - before.tier_written_bytes.get(tier, 0) for tier, total in self.tier_written_bytes.items()},
        )


def parse_counters(text: str) -> EngineCounters:
    """Read the counters from Prometheus text format. A counter that is absent has counted nothing yet."""
    totals: dict[tuple[str, str], float] = defaultdict(float)  # name and the label that divides it, if any
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            found: dict[str, str] = dict(_LABEL.findall(match[2] or ""))
            totals[match[1], next((found[label] for label in _DIVIDING if label in found), "")] += float(match[3])

    def per_tier(name: str) -> dict[str, int]:
        return {tier: int(total) for (metric, tier), total in totals.items() if metric == name}

    return EngineCounters(
        prompt_tokens=int(totals["vllm:prompt_tokens_total", ""]),
        device_hit_tokens=int(totals[_BY_SOURCE, "local_cache_hit"]),
        external_hit_tokens=int(totals[_BY_SOURCE, "external_kv_transfer"]),
        device_load_bytes=int(totals["spillway_device_copy_bytes_total", "load"]),
        device_store_bytes=int(totals["spillway_device_copy_bytes_total", "store"]),
        tier_read_bytes=per_tier("spillway_tier_read_bytes_total"),
        tier_written_bytes=per_tier("spillway_tier_written_bytes_total"),
    )


def read_counters(port: int) -> EngineCounters:
    """Read the engine's counters. Raises StackError if it does not answer."""
    with exchange(port, "GET", "/metrics", timeout_seconds=READ_SECONDS) as response:
        return parse_counters(response.read().decode(errors="replace"))
