"""Rates taken from measurements, each with its source. What was not measured is marked."""

from __future__ import annotations

from dataclasses import replace

from spillway_simulator.model.rates import EngineRates, LinkRates

_H200_KV_BYTES = 163_840
_H200_SHARED = {"nvme": 3.3e9, "redis": 10e9}


def _h200(shared: str, shared_source: str) -> EngineRates:
    shared_bytes = _H200_SHARED[shared]
    return EngineRates(
        step_seconds=0.0085,
        prefill_token_seconds=39.5e-6,
        prefill_pair_seconds=1.38e-9,
        decode_sequence_seconds=20e-6,
        decode_context_token_seconds=_H200_KV_BYTES / 4.8e12,
        request_overhead_seconds=0.020,
        kv_bytes_per_token=_H200_KV_BYTES,
        cpu=LinkRates(300_000.0, 300_000.0, 0.015),
        shared=LinkRates(shared_bytes / _H200_KV_BYTES, 1.9e9 / _H200_KV_BYTES, 0.015),
        sources=(
            (
                "prefill",
                "fitted to measured first tokens of 2,048 / 8,192 / 32,000-token prompts (89 / 391 / 2030 ms, "
                "Qwen3-14B-shaped bf16, vLLM 0.23.0, one H200); the fit gives 104 / 390 / 1990 ms",
            ),
            ("step, decode", "derived from 29.5 GB of weights and 163,840 B of KV per token at 4.8 TB/s; not measured"),
            ("request overhead", "measured device hits of 36 to 52 ms less one forward pass"),
            ("cpu tier", "measured on the same H200: 154 ms for 32,000 tokens against 42 ms on the device"),
            ("shared tier", shared_source),
        ),
    )


_CPU_ENGINE = EngineRates(
    step_seconds=0.0208,
    prefill_token_seconds=0.95e-3,
    prefill_pair_seconds=2.4e-8,
    decode_sequence_seconds=0.004,
    decode_context_token_seconds=1e-6,
    request_overhead_seconds=0.005,
    kv_bytes_per_token=23_040,
    cpu=LinkRates(30_000.0, 30_000.0, 0.02),
    shared=LinkRates(15_000.0, 15_000.0, 0.03),
    sources=(
        ("prefill", "measured: 4,096 tokens in 4.1 s, SmolLM2-135M bf16, vLLM 0.23.0 on two AVX-512 cores"),
        ("step", "measured: 48 tokens/s decode of one sequence on the same machine"),
        ("decode per sequence and context", "assumed; not measured"),
        ("tiers", "measured answers of 0.55 s (CPU tier) and 0.69 s (file tier) less 16 decoded tokens and one pass"),
    ),
)

PRESETS: dict[str, EngineRates] = {
    "h200-qwen3-14b-nvme": _h200("nvme", "measured O_DIRECT disk of the same machine: 3.3 GB/s read, 1.9 GB/s write"),
    "h200-qwen3-14b-redis": _h200("redis", "published, not measured: 10 GB/s read (LMCache's client); write 1.9 GB/s"),
    "cpu-smollm2-135m": _CPU_ENGINE,
    # No time but what tests of the gateway itself need to see: order of events, not their length.
    "instant": replace(
        _CPU_ENGINE,
        step_seconds=1e-4,
        prefill_token_seconds=1e-9,
        prefill_pair_seconds=0.0,
        decode_sequence_seconds=0.0,
        decode_context_token_seconds=0.0,
        request_overhead_seconds=0.0,
        cpu=LinkRates(1e9, 1e9),
        shared=LinkRates(1e9, 1e9),
        sources=(("all", "no measurement: as fast as the machine allows"),),
    ),
}
