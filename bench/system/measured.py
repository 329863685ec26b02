"""Figures measured on real GPUs, and the model's distance from them.

Four engines of vLLM 0.23 with Qwen3-8B's shape on H200 (the first row on H100), 2026-11-26. The model is believed where
cached share, input tokens per second and the median first token are within `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TOLERANCE = 0.15
COMPARED = ("cached_share", "input_tokens_per_second", "first_token_p50_seconds")


@dataclass(frozen=True, slots=True)
class Measured:
    """One row. seconds: of load after which it was read."""

    system: str
    sessions: int
    seconds: float
    cached_share: float
    input_tokens_per_second: float
    first_token_p50_seconds: float
    first_token_p90_seconds: float


MEASURED = (
    Measured("vllm_round_robin", 64, 75, 0.28, 127_500, 2.57, 4.51),
    Measured("vllm_offload_router", 64, 75, 0.36, 112_700, 4.62, 6.90),
    Measured("vllm_offload_pinned", 64, 75, 0.66, 214_600, 1.10, 3.41),
    Measured("spillway_cpu", 64, 75, 0.65, 214_600, 1.12, 3.39),
    Measured("spillway_nvme", 64, 75, 0.64, 207_400, 1.13, 4.03),
    Measured("vllm_round_robin", 32, 40, 0.40, 127_009, 0.586, 1.655),
    Measured("vllm_offload_pinned", 32, 50, 0.887, 268_527, 0.223, 0.414),
    Measured("spillway_cpu", 32, 50, 0.879, 259_082, 0.272, 0.480),
)


def distances(row: Measured, simulated: Mapping[str, float]) -> dict[str, float]:
    """Simulated over measured, less one, by compared figure."""
    return {name: simulated[name] / getattr(row, name) - 1 for name in COMPARED}


def outside(row: Measured, simulated: Mapping[str, float]) -> list[str]:
    """The compared figures that are not reproduced."""
    return [name for name, distance in distances(row, simulated).items() if abs(distance) > TOLERANCE]
