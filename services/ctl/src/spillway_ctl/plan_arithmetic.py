"""The gain of an offload setting, before it runs: break-even bandwidths and times to the first token. Pure.

- Break-even: loading a prefix beats computing it above `prefill rate x bytes per token` that a load reads (the sum
  behind the connector's own decision, plan/load_cost.py, without its fixed costs).
- First token, computed: `tokens / prefill rate`. Attention grows with the square of the length, so long prompts take
  longer than this and gain more.
- First token, loaded: whole chunks come from the tier, the rest is computed; of a prompt at least one token always is,
  as vLLM needs its logits. A load reads bytes from the shared tier into the CPU tier, and then copies them to the
  device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates of one engine. A rate is None if it was not given; figures that need it are left out."""

    prefill_tokens_per_second: float | None = None
    device_copy_bytes_per_second: float | None = None  # CPU tier -> device
    tier_read_bytes_per_second: float | None = None  # shared tier -> CPU tier
    put_price_per_million: float | None = None  # what an object store asks for a million requests
    get_price_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds; None: a rate is missing, or no whole chunk fits into the prompt."""

    prompt_tokens: int
    computed_seconds: float | None
    cpu_tier_seconds: float | None
    shared_tier_seconds: float | None


def break_even_bytes_per_second(bytes_per_token: float, prefill_tokens_per_second: float) -> float:
    return bytes_per_token * prefill_tokens_per_second


def first_token(prompt_tokens: int, bytes_per_token: float, chunk_tokens: int, rates: Rates) -> FirstToken:
    """Estimate the time to the first token on an engine that does nothing else."""
    prefill, copy, read = (
        rates.prefill_tokens_per_second,
        rates.device_copy_bytes_per_second,
        rates.tier_read_bytes_per_second,
    )
    computed = prompt_tokens / prefill if prefill else None
    loadable_tokens = (prompt_tokens - 1) // chunk_tokens * chunk_tokens
    cpu_tier = shared_tier = None
    if prefill and copy and loadable_tokens:
        size_bytes = loadable_tokens * bytes_per_token
        cpu_tier = size_bytes / copy + (prompt_tokens - loadable_tokens) / prefill
        shared_tier = cpu_tier + size_bytes / read if read else None
    return FirstToken(prompt_tokens, computed, cpu_tier, shared_tier)
