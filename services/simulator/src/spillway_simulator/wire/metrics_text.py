"""An engine's /metrics: vLLM's names for what the model counts, and the connector's spillway_* series."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_simulator.model.engine import SimulatedEngine
from spillway_simulator.model.tiers import SharedTier

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class _Page:
    def __init__(self, labels: str) -> None:
        self._labels = labels
        self.lines: list[str] = []

    def add(self, kind: str, name: str, *samples: tuple[str, float]) -> None:
        """samples: pairs of further labels and the value."""
        self.lines.append(f"# HELP {name} Of a simulated engine.")
        self.lines.append(f"# TYPE {name} {kind}")
        for labels, value in samples:
            joined = f"{self._labels},{labels}" if labels else self._labels
            self.lines.append(f"{name}{{{joined}}} {float(value)!r}")


def metrics_page(engine: SimulatedEngine, shared: SharedTier | None, model: str, lag_seconds: float) -> bytes:
    """lag_seconds: how far the process is behind its own virtual clock, in real seconds."""
    counters, shape = engine.counters, engine.shape
    page = _Page(f'model_name="{_escaped(model)}",engine="0"')
    _vllm(page, engine)
    kv_bytes = engine.rates.kv_bytes_per_token
    page.add(
        "counter",
        "spillway_device_copy_bytes_total",
        ('direction="store"', counters.device_stored_tokens * kv_bytes),
        ('direction="load"', counters.device_loaded_tokens * kv_bytes),
    )
    page.add(
        "counter",
        "spillway_device_copy_seconds_total",
        ('direction="store"', counters.device_store_seconds),
        ('direction="load"', counters.device_load_seconds),
    )
    cpu_used = len(engine.tiers.cpu)
    page.add("gauge", "spillway_cpu_tier_blocks", ('state="used"', cpu_used), ('state="total"', shape.cpu_blocks))
    tier = 'tier="simulated"'
    page.add(
        "counter",
        "spillway_tier_lookups_total",
        (f'{tier},outcome="hit"', counters.shared_lookup_hits),
        (f'{tier},outcome="miss"', counters.shared_lookup_misses),
    )
    for name, value in (
        ("spillway_tier_read_bytes_total", counters.shared_read_tokens * kv_bytes),
        ("spillway_tier_read_seconds_total", counters.shared_read_seconds),
        ("spillway_tier_written_bytes_total", counters.shared_written_tokens * kv_bytes),
        ("spillway_tier_write_seconds_total", counters.shared_write_seconds),
        ("spillway_tier_not_worth_total", counters.not_worth_blocks),
    ):
        page.add("counter", name, (tier, value))
    resident = len(shared) * shape.block_tokens * kv_bytes if shared is not None else 0
    page.add("gauge", "spillway_tier_resident_bytes", (tier, resident))
    measured = engine.prefill_meter.per_second
    if measured is not None:
        page.add("gauge", "spillway_prefill_tokens_per_second", ("", measured))
    page.add(
        "gauge", "spillway_tier_load_bytes_per_second", (tier, engine.rates.shared.load_tokens_per_second * kv_bytes)
    )
    page.add("gauge", "spillway_tier_loads_pay", *((f'tier="{kind}"', 0.0) for kind in engine.tiers.declined_tiers))
    page.add("gauge", "spillway_simulator_lag_seconds", ("", lag_seconds))
    return ("\n".join(page.lines) + "\n").encode()


def _vllm(page: _Page, engine: SimulatedEngine) -> None:
    counters, shape = engine.counters, engine.shape
    external = counters.cpu_hit_tokens + counters.shared_hit_tokens
    page.add("gauge", "vllm:num_requests_running", ("", engine.running_requests))
    page.add("gauge", "vllm:num_requests_waiting", ("", engine.waiting_requests))
    page.add("gauge", "vllm:kv_cache_usage_perc", ("", engine.kv_usage))
    simple: Sequence[tuple[str, float]] = (
        ("vllm:prefix_cache_queries_total", counters.device_queried_tokens),
        ("vllm:prefix_cache_hits_total", counters.device_hit_tokens),
        ("vllm:external_prefix_cache_queries_total", counters.external_queried_tokens),
        ("vllm:external_prefix_cache_hits_total", external),
        ("vllm:prompt_tokens_total", counters.prompt_tokens),
        ("vllm:prompt_tokens_cached_total", counters.device_hit_tokens + external),
        ("vllm:generation_tokens_total", counters.generated_tokens),
        ("vllm:num_preemptions_total", 0),
    )
    for name, value in simple:
        page.add("counter", name, ("", value))
    page.add(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        ('source="local_compute"', counters.computed_tokens),
        ('source="local_cache_hit"', counters.device_hit_tokens),
        ('source="external_kv_transfer"', external),
    )
    page.add("counter", "vllm:request_success_total", ('finished_reason="stop"', counters.finished_requests))
    cache = f'block_size="{shape.block_tokens}",num_gpu_blocks="{shape.device_blocks}",enable_prefix_caching="True"'
    page.add("gauge", "vllm:cache_config_info", (cache, 1))


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
