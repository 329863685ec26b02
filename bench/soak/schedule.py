"""Schedule of faults. Pure: a seed gives one schedule, whatever the machine does meanwhile.

Three lanes run at once, so that an engine may die while the store is sick: `store` disturbs what the engines share,
`engine` the processes, and `reset` empties the prefix caches of an engine, connector included. Within a lane one fault
is healed before the next begins. Kinds come in shuffled decks:
each is met before any is met again, in an order that the seed alone decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

REDIS_KINDS = (
    "valkey_silent",
    "valkey_killed",
    "valkey_emptied",
    "valkey_full",
    "valkey_read_only",
    "valkey_connections_cut",
    "values_flipped",
    "values_truncated",
    "values_swapped",
    "values_foreign",
)
NVME_KINDS = (
    "folder_read_only",
    "folder_full",
    "folder_removed",
    "folder_replaced",
    "files_flipped",
    "files_truncated",
    "files_swapped",
    "files_foreign",
    "files_deleted",
)
STORE_KINDS = {"nvme": NVME_KINDS, "redis": REDIS_KINDS}
ENGINE_KINDS = ("engine_killed", "engine_core_killed", "engine_parent_killed", "engine_terminated")
GATEWAY_KINDS = ("gateway_terminated",)

STORE_GAP_SECONDS = (4.0, 15.0)
STORE_HOLD_SECONDS = (2.0, 8.0)
ENGINE_GAP_SECONDS = (15.0, 60.0)
RESET_KINDS = ("caches_reset", "caches_reset_preempting")
# Afterwards the gateway and the last engine are left alone: only a process that lives long can be seen to grow.
DISTURBED_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class Fault:
    """gap_seconds: quiet before it. hold_seconds: how long it lasts, if it can end. seed: its own chance."""

    kind: str
    gap_seconds: float
    hold_seconds: float
    target: int  # number of the engine; 0 where the kind has no target
    seed: int


def store_faults(seed: int, tier: str) -> Iterator[Fault]:
    """Yield faults without end; the lane stops when its time is over."""
    chance = random.Random(f"{seed} store {tier}")
    while True:
        for kind in shuffled(chance, STORE_KINDS[tier]):
            yield Fault(
                kind,
                chance.uniform(*STORE_GAP_SECONDS),
                chance.uniform(*STORE_HOLD_SECONDS),
                0,
                chance.getrandbits(32),
            )


def engine_faults(seed: int, tier: str, engines: int) -> Iterator[Fault]:
    """Yield faults without end. The gateway comes first: `may_disturb` decides each time what the lane leaves out."""
    chance = random.Random(f"{seed} engine {tier}")
    deck = [*GATEWAY_KINDS, *shuffled(chance, ENGINE_KINDS)]
    while True:
        for kind in deck:
            yield Fault(
                kind, chance.uniform(*ENGINE_GAP_SECONDS), 0.0, chance.randrange(engines), chance.getrandbits(32)
            )
        deck = shuffled(chance, ENGINE_KINDS + GATEWAY_KINDS)


def reset_faults(seed: int, tier: str, engines: int, mean_seconds: float) -> Iterator[Fault]:
    """Yield resets without end, every `mean_seconds` on average; none if that is 0."""
    chance = random.Random(f"{seed} reset {tier}")
    while mean_seconds:
        for kind in shuffled(chance, RESET_KINDS):
            gap = chance.uniform(0.1, 1.9) * mean_seconds
            yield Fault(kind, gap, 0.0, chance.randrange(engines), chance.getrandbits(32))


def may_disturb(fault: Fault, elapsed_share: float, engines: int) -> Fault | None:
    """The fault as it may happen after this share of the run: the same, on the first engine instead, or not at all."""
    if elapsed_share < DISTURBED_SHARE:
        return fault
    if fault.kind in GATEWAY_KINDS:
        return None
    if fault.kind not in RESET_KINDS and fault.target == engines - 1:
        return Fault(fault.kind, fault.gap_seconds, fault.hold_seconds, 0, fault.seed)
    return fault


def shuffled(chance: random.Random, kinds: tuple[str, ...]) -> list[str]:
    deck = list(kinds)
    chance.shuffle(deck)
    return deck
