"""The cost of sending a request to an engine, in milliseconds until its first token.

    cost = max(queue, link) + load from tiers + prefill of the rest + displaced + adapter + later

queue: uncached tokens already sent and not answered, less what the oldest of these prompts has computed by now, at the
engine's prefill rate, plus a share per running request.
link: tokens that other requests are loading from the same tier, at that tier's rate: on the engine's link, and at the
store behind the shared tier if its rate is configured. Both queues drain at the same time. So a request that loads
waits for the longer of the two, and a request that loads nothing waits only for the first. displaced: the delay that
this prompt causes to later requests. In an M/G/1 queue (Poisson arrivals, one server) a busy period that begins with x
seconds of work lasts x / (1 - rho) seconds on average, where rho is the share of time for which the server is busy; x *
rho / (1 - rho) of them are work of requests that arrive meanwhile (L. Kleinrock, Queueing Systems, volume 1, 1975,
chapter 5; the mean wait of the Pollaczek-Khinchine formula there has the same factor 1 / (1 - rho)). An idle engine
displaces nothing, so a hot prefix spreads over idle engines; on a busy engine cache hits save more time. Two more
resources are priced by the same factor. KV cache: a prompt takes its uncached share of the cache for as long as an
average request runs. The link to the shared tier: a load occupies it for the load's duration. A prompt also displaces
blocks: what it brings to the device, computed or loaded, evicts as much there, in a cache that is full as caches are.
With h the share of cached tokens that requests find on a device, an evicted block would have been found there with a
probability of about h; then it is loaded, which evicts another one, and so on: h + h^2 + ... = h / (1 - h) loads for
each block, the factor from above again, at the time that loads of the model took lately. Without this term small
differences of the queues scatter a prefix over all engines that can load it, and each one's device holds less that is
of use (docs/benchmarks.md, many prompt groups). If it counted loads alone, computing a prefix again on another engine
would be the cheaper choice wherever the device finds most (docs/benchmarks.md, the whole under load). A prefix that
another engine computes at the moment, for a prompt of the same burst, displaces too if it is computed a second time: a
quarter of that work counts (REPEATED_SHARE). Otherwise each engine of an idle fleet would compute it, for prompts that
differ in a few hundred tokens. So the first prompts of a burst go to one engine, and the next ones to another when the
first one's queue is longer by a quarter of the prefix: none is later by more than that. adapter: what the engine takes
to load the request's LoRA adapter, if it does not have it. So an engine that has it is preferred until its queue is
longer than such a load. later: what the later turns of a conversation wait for if it begins there
(fleet/conversations.py). Every term is a time, so there are no weights to tune, except that quarter.
"""

from __future__ import annotations

import msgspec

from spillway_gateway.routing.fleet_view import EngineRates, EngineView, HeldPrefix

# rho / (1 - rho) is unbounded at 1, and rho is an estimate over seconds: above this bound its error would decide.
RHO_MAX = 0.8
REPEATED_SHARE = 0.25


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The terms of the module's formula. total_ms: the sum, of queue_ms and link_ms only the larger."""

    queue_ms: float
    link_ms: float
    load_ms: float
    prefill_ms: float
    displaced_ms: float
    total_ms: float
    adapter_ms: float = 0.0
    later_ms: float = 0.0


def cost_of(engine: EngineView, prompt_tokens: int, computed_from: int = 0, computed_to: int = 0) -> Cost:
    """Expected cost of a prompt of `prompt_tokens` on `engine`. Pure.

    Args:
        engine: as it is at the moment.
        prompt_tokens: the tokens of the whole prompt.
        computed_from: the first token of the prompt that an engine computes at the moment for another prompt.
        computed_to: the token behind the last one of these.
    """
    rates = engine.rates
    held = engine.held
    per_token_ms = 1000.0 / rates.prefill_tokens_per_second
    link_ms = load_ms = displaced_ms = 0.0
    if held.cpu_tokens or held.shared_tokens:
        load_ms = load_time_ms(held, rates)
        if held.cpu_tokens:
            link_ms = 1000.0 * engine.cpu_link_tokens / rates.cpu_load_tokens_per_second
        if held.shared_tokens:
            displaced_ms = shared_time_ms(held, rates) * crowding(engine.shared_busy_share)
            link_ms = max(link_ms, _shared_link_ms(engine))
    uncached = uncached_tokens(held, prompt_tokens)
    if engine.reload_token_ms:
        entering = uncached + held.cpu_tokens + held.shared_tokens
        displaced_ms += entering * engine.reload_token_ms * crowding(engine.device_share)
    prefill_ms = uncached * per_token_ms
    queue_ms = engine.queued_tokens * per_token_ms + engine.running_requests * rates.running_request_ms
    if engine.busy_share:
        displaced_ms += prefill_ms * crowding(engine.busy_share)
    if engine.kv_token_ms:
        displaced_ms += uncached * engine.kv_token_ms * crowding(engine.kv_usage)
    if computed_to:
        repeated = computed_to - max(computed_from, held.total_tokens)
        if repeated > 0:
            displaced_ms += REPEATED_SHARE * repeated * per_token_ms
    adapter_ms = engine.adapter_load_ms
    waits_ms = queue_ms if queue_ms > link_ms else link_ms
    later_ms = engine.later_ms
    total_ms = waits_ms + load_ms + prefill_ms + displaced_ms + adapter_ms + later_ms
    return Cost(queue_ms, link_ms, load_ms, prefill_ms, displaced_ms, total_ms, adapter_ms, later_ms)


def certain_ms(engine: EngineView, cost: Cost) -> float:
    """Return the part of a cost that passes before the first token whatever else runs: without the share per running
    request, and without what the prompt displaces."""
    queue_ms = cost.queue_ms - engine.running_requests * engine.rates.running_request_ms
    return max(queue_ms, cost.link_ms) + cost.load_ms + cost.prefill_ms + cost.adapter_ms


def crowding(rho: float) -> float:
    """The delay of others per unit of work on a resource whose busy share is rho: rho / (1 - rho), bounded. 0 to 4."""
    if rho <= 0.0:
        return 0.0
    return rho / (1.0 - rho) if rho < RHO_MAX else RHO_MAX / (1.0 - RHO_MAX)


def uncached_tokens(held: HeldPrefix, prompt_tokens: int) -> int:
    """Tokens left to compute; at least one, as an engine always computes the last token for its logits."""
    rest = prompt_tokens - held.device_tokens - held.cpu_tokens - held.shared_tokens
    return rest if rest > 1 else 1


def load_time_ms(held: HeldPrefix, rates: EngineRates) -> float:
    """Return the time until what an engine's tiers hold of a prompt is on its device."""
    cpu_ms = 1000.0 * held.cpu_tokens / rates.cpu_load_tokens_per_second
    return cpu_ms + shared_time_ms(held, rates) if held.shared_tokens else cpu_ms


def _shared_link_ms(engine: EngineView) -> float:
    """Return the time of the loads ahead of a prompt's, of the tiers that it is loaded from."""
    held, rates = engine.held, engine.rates
    below_rate = rates.below_load_tokens_per_second or rates.shared_load_tokens_per_second
    below_ms = 1000.0 * engine.below_link_tokens / below_rate if held.below_tokens else 0.0
    if held.shared_tokens == held.below_tokens:
        return below_ms
    above = engine.shared_link_tokens - engine.below_link_tokens
    return max(below_ms, 1000.0 * above / rates.shared_load_tokens_per_second, engine.store_wait_ms)


def shared_time_ms(held: HeldPrefix, rates: EngineRates) -> float:
    """Each of two shared tiers at its own rate: they are read at the same time, so the longer part counts."""
    below, rate = held.below_tokens, rates.shared_load_tokens_per_second
    if not below or not rates.below_load_tokens_per_second:
        return 1000.0 * held.shared_tokens / rate
    return 1000.0 * max((held.shared_tokens - below) / rate, below / rates.below_load_tokens_per_second)
