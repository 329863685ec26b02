"""The demo's phases, and how the counters prove each of them. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from spillway_stack.demo.asking import Answer
from spillway_stack.demo.engine_counters import EngineCounters
from spillway_stack.demo.sizing import EngineLimits

COMPUTED, DEVICE, CPU, MIXED = "none", "device", "cpu", "mixed"


class Phase(enum.Enum):
    """The phases in the order of the table."""

    COLD = "cold"
    DEVICE_HIT = "device hit"
    CPU_TIER = "CPU tier, after eviction"
    OTHER_ENGINE = "shared tier, on the other engine"
    RESTARTED = "shared tier, after a restart"
    GATEWAY = "device hit, through the gateway"

    def expected_tier(self, shared_tier: str) -> str:
        return {
            Phase.COLD: COMPUTED,
            Phase.DEVICE_HIT: DEVICE,
            Phase.GATEWAY: DEVICE,
            Phase.CPU_TIER: CPU,
        }.get(self, shared_tier)


@dataclass(frozen=True, slots=True)
class Served:
    """Source of one prompt's KV, in tokens, by the engine's counters."""

    prompt_tokens: int  # of all requests between the two readings; more than the prompt's: another client sent requests
    tokens_by_tier: dict[str, int]  # device, cpu and shared tiers; what is missing was computed

    @property
    def tier(self) -> str:
        used = [tier for tier, tokens in self.tokens_by_tier.items() if tokens]
        return used[0] if len(used) == 1 else MIXED if used else COMPUTED

    def text(self) -> str:
        parts = [f"{tokens:,} from {tier}" for tier, tokens in self.tokens_by_tier.items() if tokens]
        computed = self.prompt_tokens - sum(self.tokens_by_tier.values())
        return ", ".join([*parts, f"{computed:,} computed"])


def attribute(delta: EngineCounters, limits: EngineLimits) -> Served:
    """Attribute the counters around one request: what the connector loaded came from the CPU tier, except for as much
    as was read from shared tiers."""
    shared = {tier: read_bytes // limits.bytes_per_token for tier, read_bytes in delta.tier_read_bytes.items()}
    cpu_tokens = max(0, delta.external_hit_tokens - sum(shared.values()))
    return Served(delta.prompt_tokens, {DEVICE: delta.device_hit_tokens, CPU: cpu_tokens, **shared})


@dataclass(frozen=True, slots=True)
class Sample:
    """One document asked about once in one phase."""

    phase: Phase
    document: int
    engine: str
    answer: Answer
    delta: EngineCounters
    served: Served

    def fault(self, limits: EngineLimits, shared_tier: str) -> str | None:
        """Return why this was not served from the phase's tier; None if it was."""
        expected = self.phase.expected_tier(shared_tier)
        prompt_tokens = self.answer.prompt_tokens
        if self.served.prompt_tokens != prompt_tokens:
            return f"other requests ran on {self.engine} at the same time, so its counters prove nothing"
        wanted = {} if expected == COMPUTED else {expected: limits.reusable_tokens(prompt_tokens)}
        given = {tier: tokens for tier, tokens in self.served.tokens_by_tier.items() if tokens}
        if given != wanted:
            return self.served.text()
        loaded_bytes = 0 if expected in (COMPUTED, DEVICE) else wanted[expected] * limits.bytes_per_token
        if self.delta.device_load_bytes != loaded_bytes:
            return f"{self.delta.device_load_bytes:,} bytes were copied to the device, {loaded_bytes:,} were due"
        return None
