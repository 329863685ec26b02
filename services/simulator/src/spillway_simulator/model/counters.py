"""Totals of one engine since it started; wire/metrics_text.py gives them vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    cancelled_requests: int = 0
    device_queried_tokens: int = 0
    device_hit_tokens: int = 0
    external_queried_tokens: int = 0
    cpu_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    computed_tokens: int = 0
    shared_lookup_hits: int = 0
    shared_lookup_misses: int = 0
    not_worth_blocks: int = 0
    device_stored_tokens: int = 0  # device -> CPU tier
    device_loaded_tokens: int = 0  # CPU tier -> device
    device_store_seconds: float = 0.0
    device_load_seconds: float = 0.0
    shared_written_tokens: int = 0
    shared_write_seconds: float = 0.0
    shared_read_tokens: int = 0
    shared_read_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
