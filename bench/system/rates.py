"""Sizes and times of the measured machine: one host with four H200, Qwen3-8B's shape, bfloat16, vLLM 0.23.

All systems have the same figures. Fitted to the measured rows: a token of prefill, a pair of attention, passes with and
without prefill, and what a request costs outside the scheduler. Assumed: a decoding sequence, the start of a load. The
copy rates were measured with four engines at once, the disk's with O_DIRECT; the rest follows from the model's shape.
The object store's path is assumed: BUCKET_BYTES_PER_SECOND for all engines of the host, and the round trip as stated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spillway_settings.values.offload import TierBelow
from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.rates import EngineRates, LinkRates

BLOCK_TOKENS = 128
DEVICE_BLOCKS = 800
KV_BYTES_PER_TOKEN = 36 * 2 * 8 * 128 * 2  # layers, K and V, heads, head size, bytes
CPU_TIER_BYTES = 24 << 30
CPU_ROWS = CPU_TIER_BYTES // (KV_BYTES_PER_TOKEN * BLOCK_TOKENS)
SHARED_BYTES = 120 << 30
SHARED_BLOCKS = SHARED_BYTES // (KV_BYTES_PER_TOKEN * BLOCK_TOKENS)
ENDLESS_ROWS = 60_000
ENDLESS_BLOCKS = 1_000_000
BUCKET_BYTES_PER_SECOND = 25e9 / 8


@dataclass(frozen=True, slots=True)
class SystemRates(EngineRates):
    """mixed_step_seconds: the least that a pass with prefill takes, which replays no graph."""

    mixed_step_seconds: float = 0.0

    def step_duration(self, prefill_seconds: float, decoding: int, context_tokens: int) -> float:
        decode = decoding * self.decode_sequence_seconds + context_tokens * self.decode_context_token_seconds
        least = self.mixed_step_seconds if prefill_seconds else self.step_seconds
        return max(least, prefill_seconds) + decode


H200_QWEN3_8B = SystemRates(
    step_seconds=0.0055,
    prefill_token_seconds=22e-6,
    prefill_pair_seconds=1.1e-9,
    decode_sequence_seconds=50e-6,
    decode_context_token_seconds=KV_BYTES_PER_TOKEN / 4.0e12,
    request_overhead_seconds=0.155,
    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    cpu=LinkRates(40e9 / KV_BYTES_PER_TOKEN, 31e9 / KV_BYTES_PER_TOKEN, 0.010),
    shared=LinkRates(1.8e9 / KV_BYTES_PER_TOKEN, 1.8e9 / 4 / KV_BYTES_PER_TOKEN, 0.015),
    mixed_step_seconds=0.020,
)


def slower(rates: EngineRates, times: float) -> EngineRates:
    """An engine that takes so many times as long for the arithmetic of a prompt."""
    return replace(
        rates,
        prefill_token_seconds=rates.prefill_token_seconds * times,
        prefill_pair_seconds=rates.prefill_pair_seconds * times,
    )


def with_bucket(rates: EngineRates, round_trip_seconds: float, engines: int) -> EngineRates:
    """The same engine in front of an object store. A load is a lookup and then gets, as many at once as the connector
    has threads; half of these store."""
    threads = TierBelow().io_threads
    block_bytes = rates.kv_bytes_per_token * BLOCK_TOKENS

    def tokens_per_second(at_once: int, bytes_per_second: float) -> float:
        return BLOCK_TOKENS / (block_bytes / bytes_per_second + round_trip_seconds / at_once)

    load = tokens_per_second(threads, BUCKET_BYTES_PER_SECOND)
    store = tokens_per_second(threads // 2, BUCKET_BYTES_PER_SECOND / engines)
    return replace(rates, below=LinkRates(load, store, rates.shared.load_fixed_seconds + round_trip_seconds))


SHAPE = EngineShape(
    BLOCK_TOKENS, DEVICE_BLOCKS, CPU_ROWS, max_running=64, max_batched_tokens=8_192, max_model_tokens=32_768
)
