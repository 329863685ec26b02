"""What sending a request to an engine would cost, in milliseconds until its first token.

    cost = queue + load from tiers + prefill of the rest + displaced

queue: uncached tokens already sent and not answered, at the engine's prefill rate, plus a share per running request.
displaced: the prefill once more, as the time it takes from the requests behind it. Without it, two equal prompts sent
together would be computed twice, because waiting for the first takes as long as starting afresh elsewhere.
Every term is a time, so there are no weights to tune.
"""

from __future__ import annotations

from typing import NamedTuple

from spillway_gateway.routing.fleet_view import EngineView, HeldPrefix


class Cost(NamedTuple):
    queue_ms: float
    load_ms: float
    prefill_ms: float

    @property
    def displaced_ms(self) -> float:
        return self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.load_ms + self.prefill_ms + self.displaced_ms


def cost_of(engine: EngineView, prompt_tokens: int) -> Cost:
    """Expected cost of a prompt of `prompt_tokens` on `engine`. Pure."""
    rates = engine.rates
    held = engine.held
    per_token_ms = 1000.0 / rates.prefill_tokens_per_second
    load_ms = 0.0
    if held.cpu_tokens or held.shared_tokens:
        load_ms = (
            1000.0 * held.cpu_tokens / rates.cpu_load_tokens_per_second
            + 1000.0 * held.shared_tokens / rates.shared_load_tokens_per_second
        )
    return Cost(
        queue_ms=engine.queued_tokens * per_token_ms + engine.running_requests * rates.running_request_ms,
        load_ms=load_ms,
        prefill_ms=uncached_tokens(held, prompt_tokens) * per_token_ms,
    )


def uncached_tokens(held: HeldPrefix, prompt_tokens: int) -> int:
    """Tokens left to compute; at least one, as an engine always computes the last token for its logits."""
    return max(1, prompt_tokens - held.total_tokens)


def blend_rate(current: float, sample: float, weight: float = 0.2) -> float:
    """Exponentially weighted rate, held within 50 tokens/s and 10 million tokens/s so that one odd sample cannot
    make an engine look free or unusable."""
    bounded = min(max(sample, 50.0), 10_000_000.0)
    return current + weight * (bounded - current)
