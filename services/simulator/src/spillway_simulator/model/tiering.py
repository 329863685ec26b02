"""One engine's tiers below the device: what they hold, what loading would cost, and the stores under way.

Every link carries one transfer after the other. A store becomes visible when its transfer ends, so a block is never
found before it could be there. The CPU tier takes prompt blocks only, as vLLM's offloading does by default. If one
shared tier is behind another, a block is loaded from the nearer one; a subclass says what goes from that one to the
other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from spillway_settings.wire import type_of_store
from spillway_simulator.model.counters import EngineCounters
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, KvEvent, Medium
from spillway_simulator.model.prefill_meter import HALF_LIFE_SECONDS
from spillway_simulator.model.rates import EngineRates, LinkRates
from spillway_simulator.model.tiers import LoadLink, LruTier, SharedTier

BACKLOG_SECONDS_MAX = 2.0  # stores that would wait longer for their link are dropped


# Whether loads from a tier pay, as the gate of Spillway's connector judges it: by what lately asked loads take beside
# computing, as a mean that fades, and not by one request.

WORTH_RATIO = 0.9  # load only if it takes at most this share of the time that recomputing takes


class LoadMeter:
    """The meter of one shared tier. Loads that are not made count with what they would have taken."""

    def __init__(self) -> None:
        self._load_seconds = 0.0
        self._compute_seconds = 0.0
        self._updated_at = 0.0

    def add(self, load_seconds: float, compute_seconds: float, now: float) -> None:
        """A request asks for a load."""
        fade = 0.5 ** (max(0.0, now - self._updated_at) / HALF_LIFE_SECONDS)
        self._load_seconds = self._load_seconds * fade + load_seconds
        self._compute_seconds = self._compute_seconds * fade + compute_seconds
        self._updated_at = now

    @property
    def pays(self) -> bool:
        """Whether loading pays; True before the first load."""
        return self._load_seconds <= WORTH_RATIO * self._compute_seconds


class LoadPlan(NamedTuple):
    """The blocks to load, in order, right behind the device's own. shared_keys: of each shared tier, nearest first."""

    cpu_keys: tuple[int, ...]
    shared_keys: tuple[tuple[int, ...], ...]
    ready_at: float

    @property
    def cpu_blocks(self) -> int:
        return len(self.cpu_keys)

    @property
    def shared_blocks(self) -> int:
        return sum(map(len, self.shared_keys))

    @property
    def blocks(self) -> int:
        return self.cpu_blocks + self.shared_blocks


class _Store(NamedTuple):
    ends_at: float
    keys: list[int]
    seconds: float


@dataclass(slots=True, eq=False)
class SharedLevel:
    """A shared tier as one engine uses it. medium: under which the engine announces what it has stored there."""

    tier: SharedTier
    rates: LinkRates
    medium: Medium
    link: LoadLink = field(init=False)
    stores: deque[_Store] = field(default_factory=deque)
    store_free_at: float = 0.0
    meter: LoadMeter = field(default_factory=LoadMeter)

    def __post_init__(self) -> None:
        self.link = self.tier.link or LoadLink()


_MEDIA = (Medium.SHARED, Medium.BELOW)


class Tiering:
    """emit: takes events in the order in which they become true."""

    cpu_medium = Medium.CPU

    def __init__(
        self,
        *,
        block_tokens: int,
        cpu_blocks: int,
        shared: SharedTier | None,
        rates: EngineRates,
        counters: EngineCounters,
        emit: Callable[[KvEvent], None],
        announce_shared: bool,
        gates_loads: bool = True,
    ) -> None:
        self.cpu = LruTier(cpu_blocks)
        self._gates_loads = gates_loads
        self._block_tokens = block_tokens
        self._rates = rates
        self._counters = counters
        self._emit = emit
        self._announce_shared = announce_shared
        self._cpu_stores: deque[_Store] = deque()
        self._cpu_load_free_at = 0.0
        self._cpu_store_free_at = 0.0
        tiers = [] if shared is None else [shared] if shared.below is None else [shared, shared.below]
        self._levels = [
            SharedLevel(*of) for of in zip(tiers, (rates.shared, rates.below or rates.shared), _MEDIA, strict=False)
        ]
        if announce_shared:
            for level in self._levels:
                emit(BlocksStored(level.medium, ()))

    @property
    def declined_tiers(self) -> frozenset[str]:
        """The types of shared tiers from which loads do not pay lately."""
        return frozenset(type_of_store(level.medium.value) for level in self._levels if not level.meter.pays)

    @property
    def next_time(self) -> float | None:
        queues = (self._cpu_stores, *[level.stores for level in self._levels])
        ends = [stores[0].ends_at for stores in queues if stores]
        return min(ends) if ends else None

    # -- loads -------------------------------------------------------------------------------------------------------

    def plan_load(self, keys: Sequence[int], start: int, limit: int, now: float) -> LoadPlan | None:
        """Plan the load behind the first `start` blocks of a prompt; None: nothing is there, or prefill is cheaper."""
        where: list[SharedLevel | None] = []  # None: the CPU tier
        for key in keys[start:limit]:
            if key in self.cpu:
                where.append(None)
            elif level := next((each for each in self._levels if key in each.tier), None):
                where.append(level)
            else:
                break
        if self._levels:
            self._counters.shared_lookup_hits += len(where) - where.count(None)
            if start + len(where) < limit:
                self._counters.shared_lookup_misses += 1
        for level in reversed(self._levels):
            if level in where and not self._worth(level, where, start, now):
                first = where.index(level)
                self._counters.not_worth_blocks += len(where) - first - where[first:].count(None)
                del where[first:]
        if not where:
            return None
        found = list(zip(keys[start : start + len(where)], where, strict=True))
        cpu_keys = tuple([key for key, level in found if level is None])
        shared_keys = tuple([tuple([key for key, of in found if of is level]) for level in self._levels])
        ready_at = self._cpu_ready_at(len(cpu_keys), now)
        for level, of_level in zip(self._levels, shared_keys, strict=True):
            ready_at = max(ready_at, self._ready_at(level, len(of_level), now))
        return LoadPlan(cpu_keys, shared_keys, ready_at)

    def _worth(self, level: SharedLevel, where: list[SharedLevel | None], start: int, now: float) -> bool:
        first = where.index(level)
        tokens = (len(where) - first) * self._block_tokens
        recompute = self._rates.prefill_seconds(tokens, (start + first) * self._block_tokens)
        load = self._ready_at(level, where.count(level), now) - now
        level.meter.add(load, recompute, now)
        return not self._gates_loads or load <= WORTH_RATIO * recompute

    def _cpu_ready_at(self, blocks: int, now: float) -> float:
        return max(now, self._cpu_load_free_at) + self._load_seconds(self._rates.cpu, blocks) if blocks else now

    def _ready_at(self, level: SharedLevel, blocks: int, now: float) -> float:
        return max(now, level.link.free_at) + self._load_seconds(level.rates, blocks) if blocks else now

    def _load_seconds(self, link: LinkRates, blocks: int) -> float:
        return link.load_fixed_seconds + blocks * self._block_tokens / link.load_tokens_per_second

    def begin_load(self, plan: LoadPlan, now: float) -> None:
        """Occupy the links as planned at the same `now`."""
        counters = self._counters
        if plan.cpu_blocks:
            ends = self._cpu_ready_at(plan.cpu_blocks, now)
            counters.device_load_seconds += ends - max(now, self._cpu_load_free_at)
            counters.device_loaded_tokens += plan.cpu_blocks * self._block_tokens
            self._cpu_load_free_at = ends
        for level, keys in zip(self._levels, plan.shared_keys, strict=True):
            if keys:
                ends = self._ready_at(level, len(keys), now)
                counters.shared_read_seconds += ends - max(now, level.link.free_at)
                counters.shared_read_tokens += len(keys) * self._block_tokens
                level.link.free_at = ends

    def end_load(self, plan: LoadPlan, now: float) -> None:
        """Blocks from a shared tier came through rows of the CPU tier and stay there; those from a tier below another
        are stored in that, too."""
        for keys in plan.shared_keys:
            if keys:
                self._put_cpu(keys)
        for keys in plan.shared_keys[1:]:
            self._begin_store(self._levels[0], keys, now)

    def touch(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.cpu.touch(key)
        for level in self._levels:
            for key in keys:
                level.tier.touch(key)

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[int], now: float) -> None:
        """Start computed prompt blocks on their way down."""
        if self.cpu.capacity == 0:
            return
        missing = [key for key in keys if key not in self.cpu]
        if not missing:
            return
        started = max(now, self._cpu_store_free_at)
        if started - now > BACKLOG_SECONDS_MAX:
            return
        seconds = len(missing) * self._block_tokens / self._rates.cpu.store_tokens_per_second
        self._cpu_store_free_at = started + seconds
        self._cpu_stores.append(_Store(started + seconds, missing, seconds))

    def finish_stores(self, now: float) -> None:
        while self._cpu_stores and self._cpu_stores[0].ends_at <= now:
            store = self._cpu_stores.popleft()
            self._counters.device_store_seconds += store.seconds
            self._counters.device_stored_tokens += len(store.keys) * self._block_tokens
            self._put_cpu(store.keys)
            self._spill(store.keys, store.ends_at)
        for level in self._levels:
            while level.stores and level.stores[0].ends_at <= now:
                store = level.stores.popleft()
                self._counters.shared_write_seconds += store.seconds
                self._counters.shared_written_tokens += len(store.keys) * self._block_tokens
                stored = level.tier.put(store.keys, partial(self._shared_lost, level.medium))
                if stored and self._announce_shared:
                    self._emit(BlocksStored(level.medium, tuple(stored)))

    def _put_cpu(self, keys: Sequence[int]) -> None:
        stored, removed = self.cpu.put(keys)
        if removed:
            self._emit(BlocksRemoved(self.cpu_medium, tuple(removed)))
        if stored:
            self._emit(BlocksStored(self.cpu_medium, tuple(stored)))

    def _spill(self, keys: Sequence[int], now: float) -> None:
        """The CPU tier has received these blocks, and offers them to the nearest shared tier."""
        if self._levels:
            self._begin_store(self._levels[0], keys, now)

    def _begin_store(self, level: SharedLevel, keys: Sequence[int], now: float) -> None:
        missing = [key for key in keys if key not in level.tier] if level.tier.capacity else []
        if not missing:
            return
        started = max(now, level.store_free_at)
        if started - now > BACKLOG_SECONDS_MAX:
            return
        seconds = len(missing) * self._block_tokens / level.rates.store_tokens_per_second
        level.store_free_at = started + seconds
        level.stores.append(_Store(started + seconds, missing, seconds))

    def _shared_lost(self, medium: Medium, keys: tuple[int, ...]) -> None:
        if self._announce_shared:
            self._emit(BlocksRemoved(medium, keys))
