"""Counters of one shared tier, and the picture of them that metrics are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from spillway_connector.tiers.breaker import BreakerState


class Operation(Enum):
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class LookupOutcome(Enum):
    """HIT, MISS: the tier's answer. EXPIRED: none within the deadline. REFUSED: not asked (breaker, bound)."""

    HIT = "hit"
    MISS = "miss"
    EXPIRED = "expired"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TierStats:
    """All counts and sums only ever grow while the process lives; the gauges come last.

    read_seconds and write_seconds are summed over threads. failures: by operation and reason (a TierError's).
    """

    tier: str
    lookups: dict[LookupOutcome, int]
    read_bytes: int
    read_seconds: float
    written_bytes: int
    write_seconds: float
    failures: dict[tuple[Operation, str], int]
    stores_skipped: int  # keys that were known to be there, or on their way
    late_completions: int  # I/O that ended after its job had been given up; its bytes were dropped
    evicted_frames: int  # by this process, to make room
    resident_bytes: int
    queued_store_bytes: int
    queued_load_bytes: int
    breakers: dict[Operation, BreakerState]


@dataclass(slots=True)
class TierCounters:
    """The growing part, written by the scheduler thread alone."""

    lookups: Counter[LookupOutcome] = field(default_factory=Counter)
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    failures: Counter[tuple[Operation, str]] = field(default_factory=Counter)
    stores_skipped: int = 0
    late_completions: int = 0
