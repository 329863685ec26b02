"""The frozen picture of the fleet that one routing decision reads.

Built for each decision from the live state (fleet/engine.py) and from the index's answer for this prompt
(fleet/prefix_index.py); it is immutable, so a decision can be repeated and explained.

Structs, as a dozen are made for each request: one costs a third of a named tuple, and the cyclic garbage collector does
not visit it.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from spillway_settings.roles import EngineRole


class TierLabel(StrEnum):
    """The tier in which a prefix is expected. Value of the label `tier` of metrics."""

    DEVICE = "device"
    CPU = "cpu"
    SHARED = "shared"


class HeldPrefix(msgspec.Struct, frozen=True, gc=False):
    """Tokens of this prompt that an engine would find, in the order in which the engine looks."""

    device_tokens: int = 0
    cpu_tokens: int = 0
    shared_tokens: int = 0
    below_tokens: int = 0  # those of shared_tokens that the tier below the shared tier has alone

    @property
    def total_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.device_tokens + self.cpu_tokens + self.shared_tokens

    def scaled(self, tokens: int, of_tokens: int) -> HeldPrefix:
        """The same shares of a prompt of another length. of_tokens: what these are counted in, positive."""
        return HeldPrefix(
            self.device_tokens * tokens // of_tokens,
            self.cpu_tokens * tokens // of_tokens,
            self.shared_tokens * tokens // of_tokens,
            self.below_tokens * tokens // of_tokens,
        )

    def first(self, tokens: int) -> HeldPrefix:
        """Return the prefix's first `tokens` tokens only."""
        device = min(self.device_tokens, tokens)
        cpu = min(self.cpu_tokens, tokens - device)
        shared = min(self.shared_tokens, tokens - device - cpu)
        return HeldPrefix(device, cpu, shared, min(self.below_tokens, shared))

    def tier_of_first_missing(self, found_tokens: int) -> TierLabel | None:
        """The tier that was to hold the first token that is not there; without it those behind it are of no use. None:
        as many were found as expected."""
        if found_tokens >= self.total_tokens:
            return None
        if found_tokens < self.device_tokens:
            return TierLabel.DEVICE
        return TierLabel.CPU if found_tokens < self.device_tokens + self.cpu_tokens else TierLabel.SHARED


NOTHING_HELD = HeldPrefix()


class EngineRates(msgspec.Struct, frozen=True, gc=False):
    """Prices of one engine, measured or default. Tokens per second."""

    prefill_tokens_per_second: float
    cpu_load_tokens_per_second: float
    shared_load_tokens_per_second: float
    running_request_ms: float
    below_load_tokens_per_second: float = 0.0  # of the tier below the shared tier; 0: as that


class EngineView(msgspec.Struct, frozen=True, gc=False):
    """One engine at the moment of the decision."""

    name: str
    routable: bool
    running_requests: int  # sent and unfinished
    queued_tokens: int  # left to compute of requests without a first byte, by the engine's rate
    rates: EngineRates
    held: HeldPrefix = NOTHING_HELD
    busy_share: float = 0.0  # of prefill, over the last seconds; may exceed 1
    cpu_link_tokens: int = 0  # being loaded from the CPU tier by requests without a first byte
    shared_link_tokens: int = 0  # the same for the shared tier and the one below it
    store_wait_ms: float = 0.0  # of loads of all engines ahead at the shared tier's store, if that is the limit
    shared_busy_share: float = 0.0  # like busy_share, of the link or store that loads from the shared tier go through
    kv_usage: float = 0.0  # share of the device's KV cache taken by running requests; an estimate, may be outside 0..1
    kv_token_ms: float = 0.0  # time for which an average request takes one token's share of that cache; 0: unknown
    device_share: float = 0.0  # of the tokens that requests of this model found cached lately, those on a device
    reload_token_ms: float = 0.0  # load of one token, as requests of this model loaded lately; 0: none did
    events_live: bool = True  # `held` is what it announced; of another engine, what it may still hold is not all known
    role: EngineRole = EngineRole.BOTH
    stores: frozenset[str] = frozenset()  # shared ones that it uses; of a model whose engines have roles
    declined_stores: frozenset[str] = frozenset()  # those of them that it does not load from, since that does not pay
    token_ms: float = 0.0  # between two tokens of its answers, lately; 0: there were none
    below_link_tokens: int = 0  # those of shared_link_tokens that come from the tier below
    adapter_load_ms: float = 0.0  # until it can begin with the request's LoRA adapter; 0: it has it, or there is none
    later_ms: float = 0.0  # that later turns of a conversation which begins would wait there; 0: it has its engine


class FleetView(msgspec.Struct, frozen=True, gc=False):
    """All engines of a model."""

    engines: tuple[EngineView, ...]


class Leg(IntEnum):
    """The part of a request that an engine is chosen for. OPEN: the whole of it, or the first of two legs."""

    WHOLE = 0
    OPEN = 1
    SECOND = 2


class SplitTerms(msgspec.Struct, frozen=True, gc=False):
    """The terms of two legs. always: no price is compared. token_ms_max: None: no bound. by_connector: the engines'
    own connectors hand prompts over, so that no common store is needed. hand_over_token_ms: for each token that the
    second engine loads, on top of hand_over_ms."""

    always: bool
    uncached_tokens_min: int
    hand_over_ms: float
    token_ms_max: float | None
    block_tokens: int
    by_connector: bool = False
    hand_over_token_ms: float = 0.0


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, as routing sees it."""

    prompt_tokens: int  # exact with a tokenizer, estimated from text without
    spread_key: int  # key of the first block: requests that share it go to the same engine when none holds any of it
    tried: frozenset[str] = frozenset()
    only: str | None = None  # the one engine that can answer, because it stores what is requested
    in_session: bool = False  # it names a session
    session_engine: str | None = None  # which served that session last
    text_tokens: int | None = None  # as in PromptBlocks
    # The part of the prompt that an engine computes at the moment for another request: from this token to that one.
    computed_from: int = 0
    computed_to: int = 0
    leg: Leg = Leg.WHOLE
    any_role: bool = False  # a whole request may go to a prefill engine, too
    splitting: SplitTerms | None = None  # of an OPEN one
