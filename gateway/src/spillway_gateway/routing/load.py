"""What sending a request to an engine would cost, in milliseconds until its first token.

    cost = max(queue, link) + load from tiers + prefill of the rest + displaced

queue: uncached tokens already sent and not answered, at the engine's prefill rate, plus a share per running request.
link: tokens that others are loading from the same tier, at that tier's rate: on the engine's own link, and at the store
that all engines read where its rate is configured. Both queues drain at the same time, so a
request that loads waits for the longer of the two, and one that loads nothing for the first alone.
displaced: what computing this prompt costs those behind it. With Poisson arrivals and a prefill that is busy for the
share rho of the time, one more second of work delays others by rho / (1 - rho) seconds in all (M/G/1). An idle engine
displaces nobody, so a hot prefix spreads at once; a busy one displaces many, so hits are kept. KV memory is a second
resource with the same law: a prompt takes its uncached share of the cache for as long as a request stays, which makes
others wait, or evicts what they would have found, the more the fuller the cache is. The way to the shared tier is a
third: a load occupies it for its own time.
Every term is a time, so there are no weights to tune.
"""

from __future__ import annotations

import msgspec

from spillway_gateway.routing.fleet_view import EngineView, HeldPrefix

# rho / (1 - rho) has no limit at 1, but rho is an estimate over seconds: beyond this one its error would decide.
RHO_MAX = 0.8


class Cost(msgspec.Struct, frozen=True, gc=False):
    queue_ms: float
    link_ms: float
    load_ms: float
    prefill_ms: float
    displaced_ms: float
    total_ms: float


def cost_of(engine: EngineView, prompt_tokens: int) -> Cost:
    """Expected cost of a prompt of `prompt_tokens` on `engine`. Pure."""
    rates = engine.rates
    held = engine.held
    per_token_ms = 1000.0 / rates.prefill_tokens_per_second
    load_ms = link_ms = displaced_ms = 0.0
    if held.cpu_tokens:
        load_ms = 1000.0 * held.cpu_tokens / rates.cpu_load_tokens_per_second
        link_ms = 1000.0 * engine.cpu_link_tokens / rates.cpu_load_tokens_per_second
    if held.shared_tokens:
        shared_ms = 1000.0 * held.shared_tokens / rates.shared_load_tokens_per_second
        load_ms += shared_ms
        displaced_ms = shared_ms * crowding(engine.shared_busy_share)
        own_link_ms = 1000.0 * engine.shared_link_tokens / rates.shared_load_tokens_per_second
        link_ms = max(link_ms, own_link_ms, engine.store_wait_ms)
    uncached = uncached_tokens(held, prompt_tokens)
    prefill_ms = uncached * per_token_ms
    queue_ms = engine.queued_tokens * per_token_ms + engine.running_requests * rates.running_request_ms
    displaced_ms += prefill_ms * crowding(engine.busy_share)
    if engine.kv_token_ms:
        displaced_ms += uncached * engine.kv_token_ms * crowding(engine.kv_usage)
    total_ms = (queue_ms if queue_ms > link_ms else link_ms) + load_ms + prefill_ms + displaced_ms
    return Cost(queue_ms, link_ms, load_ms, prefill_ms, displaced_ms, total_ms)


def crowding(rho: float) -> float:
    """Delay of others per unit of work on a resource that is taken for the share rho of the time: 0 to 4."""
    if rho <= 0.0:
        return 0.0
    return rho / (1.0 - rho) if rho < RHO_MAX else RHO_MAX / (1.0 - RHO_MAX)


def uncached_tokens(held: HeldPrefix, prompt_tokens: int) -> int:
    """Tokens left to compute; at least one, as an engine always computes the last token for its logits."""
    rest = prompt_tokens - held.device_tokens - held.cpu_tokens - held.shared_tokens
    return rest if rest > 1 else 1
