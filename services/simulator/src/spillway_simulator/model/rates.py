"""Times that things take on an engine, and the two sums made of them.

A forward pass takes at least `step_seconds` (weights are read once per pass, however few tokens it has), more when its
prefill tokens need more arithmetic than that, and on top of it what each decoding sequence and its context add. So
decode throughput rises with the batch while each sequence slows down, and a long prefill chunk delays everyone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LinkRates(NamedTuple):
    """A tier's link to one engine."""

    load_tokens_per_second: float
    store_tokens_per_second: float
    load_fixed_seconds: float = 0.0  # per request that loads


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Times of one engine. sources: where each figure comes from, shown by /spillway/config."""

    step_seconds: float
    prefill_token_seconds: float
    prefill_pair_seconds: float  # per pair of a computed token and a token before it: attention
    decode_sequence_seconds: float
    decode_context_token_seconds: float  # reading the KV of one context token
    request_overhead_seconds: float  # HTTP, template and tokenizer, before the scheduler sees the request
    kv_bytes_per_token: int
    cpu: LinkRates
    shared: LinkRates
    sources: tuple[tuple[str, str], ...] = ()
    below: LinkRates | None = None  # of a tier behind the shared one

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Arithmetic of `tokens` prompt tokens behind `context` tokens that are already there."""
        return tokens * self.prefill_token_seconds + tokens * (context + tokens * 0.5) * self.prefill_pair_seconds

    def step_duration(self, prefill_seconds: float, decoding: int, context_tokens: int) -> float:
        """One forward pass: prefill arithmetic, `decoding` sequences with `context_tokens` of context in all."""
        decode = decoding * self.decode_sequence_seconds + context_tokens * self.decode_context_token_seconds
        return max(self.step_seconds, prefill_seconds) + decode
