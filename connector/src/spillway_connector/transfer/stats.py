"""Counters of one shared tier, and the picture of them that metrics are made from."""

from __future__ import annotations

import threading
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any

from spillway_connector.errors import RefusedReason, TierCorrupt, TierError, TierMiss, TierTimeout
from spillway_connector.transfer.breaker import BreakerState


class Operation(Enum):
    __hash__ = object.__hash__  # of the one object a member is; Enum's own is a Python call for every count
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


class Upkeep(Enum):
    """Look-ups of a tier that no request needs. A failure counts, and no breaker hears of it."""

    __hash__ = object.__hash__

    CHECK = "check"  # whether the tier can be used, and how much it holds
    RENEW = "renew"  # the age of retained chunks
    DISCARD = "discard"  # of what is damaged


class LookupOutcome(Enum):
    """HIT, MISS: the tier's answer. EXPIRED: none within the deadline. REFUSED: not asked (breaker, bound)."""

    __hash__ = object.__hash__

    HIT = "hit"
    MISS = "miss"
    EXPIRED = "expired"
    REFUSED = "refused"


class MissReason(StrEnum):
    """Reasons for which a requested chunk was not loaded from a shared tier. Only the first such chunk of a prefix
    counts."""

    ABSENT = "absent"  # the tier answered that it does not hold it
    LOOKUP_DEADLINE = "lookup_deadline"
    REFUSED = "refused"  # not asked: a breaker is open, or too many keys are being asked for
    WEIGHTS_CHANGED = "weights_changed"
    GONE = "gone"  # promised by a lookup, not there at the load
    CORRUPT = "corrupt"
    LOAD_DEADLINE = "load_deadline"
    LOAD_FAILED = "load_failed"
    SHED = "shed"  # more loads at once than the tier can serve in time
    NOT_WORTH = "not_worth"  # recomputing is faster
    NO_ROOM = "no_room"  # the CPU tier's bounds on promotion
    REQUEST_DEADLINE = "request_deadline"  # the request has waited enough


class SkipReason(StrEnum):
    """Reasons for which a chunk was not handed to the tier although nothing failed."""

    PRESENT = "present"  # there already, or on its way
    PENDING = "pending"  # another engine is writing it; whether it will be there is not known
    ADMISSION = "admission"  # the tier is full, and the chunk was never asked for twice
    WEIGHTS_CHANGED = "weights_changed"


# Errors without a failure of the tier: this process had more to move than the tier can take, and dropped the rest.
SHED_REASONS = frozenset({RefusedReason.QUEUE_FULL, RefusedReason.QUEUE_AGE})

MISS_OF_OUTCOME = {
    LookupOutcome.MISS: MissReason.ABSENT,
    LookupOutcome.EXPIRED: MissReason.LOOKUP_DEADLINE,
    LookupOutcome.REFUSED: MissReason.REFUSED,
}


def miss_of_error(error: TierError) -> MissReason:
    """Return why a load that failed with `error` gave no chunk."""
    if isinstance(error, TierMiss):
        return MissReason.GONE
    if isinstance(error, TierCorrupt):
        return MissReason.CORRUPT
    if error.reason in SHED_REASONS:
        return MissReason.SHED
    if error.reason is RefusedReason.BEHIND:
        return MissReason.NOT_WORTH
    return MissReason.LOAD_DEADLINE if isinstance(error, TierTimeout) else MissReason.LOAD_FAILED


@dataclass(slots=True)
class Counts:
    """Counters of one tier over the process's lifetime.

    read_seconds and write_seconds are summed over threads. failures and shed: by what failed and why (a TierError's
    reason).
    """

    lookups: Counter[LookupOutcome] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    failures: Counter[tuple[Operation | Upkeep, str]] = field(default_factory=Counter)
    # Chunks dropped because too much was to be done at once.
    shed: Counter[tuple[Operation | Upkeep, str]] = field(default_factory=Counter)
    expiries: Counter[Operation] = field(default_factory=Counter)  # lookup batches and jobs given up at their deadline
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    late_completions: int = 0  # I/O that ended after its job had been given up; its bytes were dropped
    weights_changes: int = 0

    def copied(self) -> dict[str, Any]:
        """Return the fields as they are now."""
        return {each.name: copy(getattr(self, each.name)) for each in fields(Counts)}


@dataclass(slots=True, kw_only=True)
class TierStats(Counts):
    """The counts at one moment, with those that the tier keeps, and gauges."""

    tier: str
    quarantined: dict[str, int]  # damaged files that were renamed, by reason
    evictions: dict[str, int]  # frames this process removed though nothing was wrong with them, by reason
    requests: dict[str, int]  # of a store whose requests cost money, by kind
    resident_bytes: int
    held_blocks: int
    queued_store_bytes: int
    queued_load_bytes: int
    oldest_store_seconds: float  # how long the oldest store has waited for a thread; 0: none waits
    ready: bool  # the tier answered when it was last asked how much it holds
    weights_changed: bool  # the tier is not used because the model's weights are no longer those of its namespace
    breakers: dict[Operation, BreakerState]


@dataclass(slots=True)
class TierCounters(Counts):
    """The counters of a tier. Only the scheduler thread writes them, except through :meth:`count_failure`."""

    moved: bool = True  # a counter or gauge may have changed; cleared by the reader
    _failure_lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count_failure(self, of: Operation | Upkeep, reason: str, number: int = 1) -> None:
        """Count what the tier did not deliver, by the reason of its TierError. Any thread may call it."""
        if reason is RefusedReason.BEHIND:
            return  # nothing has failed: it was not worth the wait
        counts = self.shed if reason in SHED_REASONS else self.failures
        with self._failure_lock:
            counts[of, reason] += number

    def count_lookup(self, outcome: LookupOutcome, number: int = 1) -> None:
        self.lookups[outcome] += number
        if outcome is not LookupOutcome.HIT:
            self.misses[MISS_OF_OUTCOME[outcome]] += number
