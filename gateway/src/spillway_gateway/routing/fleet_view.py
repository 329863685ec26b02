"""The frozen picture of the fleet that one routing decision reads.

Built for each decision from the live state (fleet/engines.py) and from the index's answer for this prompt
(fleet/prefix_index.py); nothing in it changes afterwards, so a decision can be repeated and explained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class HeldPrefix(NamedTuple):
    """How many tokens of this prompt an engine would find, in the order in which the engine looks."""

    device_tokens: int = 0
    cpu_tokens: int = 0
    shared_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.device_tokens + self.cpu_tokens + self.shared_tokens


NOTHING_HELD = HeldPrefix()


class EngineRates(NamedTuple):
    """Prices of one engine, measured or default. Tokens per second."""

    prefill_tokens_per_second: float
    cpu_load_tokens_per_second: float
    shared_load_tokens_per_second: float
    running_request_ms: float


class EngineView(NamedTuple):
    """One engine at the moment of the decision."""

    name: str
    routable: bool
    running_requests: int  # sent by this gateway and not finished
    queued_tokens: int  # uncached prompt tokens sent and still without a first byte
    rates: EngineRates
    held: HeldPrefix = NOTHING_HELD


@dataclass(frozen=True, slots=True)
class FleetView:
    engines: tuple[EngineView, ...]


class RouteRequest(NamedTuple):
    """What routing knows about a request."""

    prompt_tokens: int  # exact with a tokenizer, estimated from text without
    spread_key: int  # key of the first block: requests that share it go the same way when nothing is known
    tried: frozenset[str] = frozenset()
