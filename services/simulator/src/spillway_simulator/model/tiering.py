"""One engine's tiers below the device: what they hold, what loading would cost, and the stores under way.

Every link carries one transfer after the other. A store becomes visible when its transfer ends, so a block is never
found before it could be there. The CPU tier takes prompt blocks only, as vLLM's offloading does by default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spillway_simulator.model.counters import EngineCounters
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, KvEvent, Medium
from spillway_simulator.model.rates import EngineRates
from spillway_simulator.model.tiers import LoadLink, LruTier, SharedTier

WORTH_RATIO = 0.9  # load from the shared tier only below this share of the time recomputing takes
BACKLOG_SECONDS_MAX = 2.0  # stores that would wait longer for their link are dropped


class LoadPlan(NamedTuple):
    """The blocks to load, in order, right behind the device's own."""

    cpu_keys: tuple[int, ...]
    shared_keys: tuple[int, ...]
    ready_at: float

    @property
    def cpu_blocks(self) -> int:
        return len(self.cpu_keys)

    @property
    def blocks(self) -> int:
        return self.cpu_blocks + len(self.shared_keys)


class _Store(NamedTuple):
    ends_at: float
    keys: list[int]
    seconds: float


class Tiering:
    """emit: takes events in the order in which they become true."""

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
    ) -> None:
        self.cpu = LruTier(cpu_blocks)
        self._shared = shared
        self._block_tokens = block_tokens
        self._rates = rates
        self._counters = counters
        self._emit = emit
        self._announce_shared = announce_shared
        self._cpu_stores: deque[_Store] = deque()
        self._shared_stores: deque[_Store] = deque()
        self._cpu_load_free_at = 0.0
        self._cpu_store_free_at = 0.0
        self._shared_link = (shared.link if shared is not None else None) or LoadLink()
        self._shared_store_free_at = 0.0
        if announce_shared and shared is not None:
            emit(BlocksStored(Medium.SHARED, ()))

    @property
    def next_time(self) -> float | None:
        ends = [stores[0].ends_at for stores in (self._cpu_stores, self._shared_stores) if stores]
        return min(ends) if ends else None

    # -- loads -------------------------------------------------------------------------------------------------------

    def plan_load(self, keys: Sequence[int], start: int, limit: int, now: float) -> LoadPlan | None:
        """What to load behind the first `start` blocks of a prompt; None: nothing is there, or prefill is cheaper."""
        shared_tier = self._shared
        where: list[bool] = []  # True: shared
        for key in keys[start:limit]:
            if key in self.cpu:
                where.append(False)
            elif shared_tier is not None and key in shared_tier:
                where.append(True)
            else:
                break
        if shared_tier is not None:
            self._counters.shared_lookup_hits += sum(where)
            if start + len(where) < limit:
                self._counters.shared_lookup_misses += 1
        if True in where and not self._worth(where, start, now):
            first = where.index(True)
            self._counters.not_worth_blocks += where[first:].count(True)
            del where[first:]
        if not where:
            return None
        found = keys[start : start + len(where)]
        shared_keys = tuple([key for key, is_shared in zip(found, where, strict=True) if is_shared])
        cpu_keys = tuple([key for key, is_shared in zip(found, where, strict=True) if not is_shared])
        ready_at = self._ready_at(len(cpu_keys), len(shared_keys), now)
        return LoadPlan(cpu_keys, shared_keys, ready_at)

    def _worth(self, where: list[bool], start: int, now: float) -> bool:
        first = where.index(True)
        tokens = (len(where) - first) * self._block_tokens
        recompute = self._rates.prefill_seconds(tokens, (start + first) * self._block_tokens)
        return self._ready_at(0, where.count(True), now) - now <= WORTH_RATIO * recompute

    def _ready_at(self, cpu_blocks: int, shared_blocks: int, now: float) -> float:
        ready = now
        if cpu_blocks:
            link = self._rates.cpu
            seconds = link.load_fixed_seconds + cpu_blocks * self._block_tokens / link.load_tokens_per_second
            ready = max(now, self._cpu_load_free_at) + seconds
        if shared_blocks:
            link = self._rates.shared
            seconds = link.load_fixed_seconds + shared_blocks * self._block_tokens / link.load_tokens_per_second
            ready = max(ready, max(now, self._shared_link.free_at) + seconds)
        return ready

    def begin_load(self, plan: LoadPlan, now: float) -> None:
        """Occupy the links as planned at the same `now`."""
        counters = self._counters
        if plan.cpu_blocks:
            ends = self._ready_at(plan.cpu_blocks, 0, now)
            counters.device_load_seconds += ends - max(now, self._cpu_load_free_at)
            counters.device_loaded_tokens += plan.cpu_blocks * self._block_tokens
            self._cpu_load_free_at = ends
        if plan.shared_keys:
            ends = self._ready_at(0, len(plan.shared_keys), now)
            counters.shared_read_seconds += ends - max(now, self._shared_link.free_at)
            counters.shared_read_tokens += len(plan.shared_keys) * self._block_tokens
            self._shared_link.free_at = ends

    def end_load(self, plan: LoadPlan) -> None:
        """Blocks from the shared tier came through rows of the CPU tier and stay there."""
        if plan.shared_keys:
            self._put_cpu(plan.shared_keys)

    def touch(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.cpu.touch(key)
        if self._shared is not None:
            for key in keys:
                self._shared.touch(key)

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[int], now: float) -> None:
        """Computed prompt blocks start their way down."""
        if self.cpu.capacity == 0:
            return
        missing = [key for key in keys if key not in self.cpu]
        if not missing:
            return
        started = max(now, self._cpu_store_free_at)
        if started - now > BACKLOG_SECONDS_MAX:
            self._counters.stores_dropped_blocks += len(missing)
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
        while self._shared_stores and self._shared_stores[0].ends_at <= now:
            assert self._shared is not None
            store = self._shared_stores.popleft()
            self._counters.shared_write_seconds += store.seconds
            self._counters.shared_written_tokens += len(store.keys) * self._block_tokens
            stored = self._shared.put(store.keys, self._shared_lost)
            if stored and self._announce_shared:
                self._emit(BlocksStored(Medium.SHARED, tuple(stored)))

    def _put_cpu(self, keys: Sequence[int]) -> None:
        stored, removed = self.cpu.put(keys)
        if removed:
            self._emit(BlocksRemoved(Medium.CPU, tuple(removed)))
        if stored:
            self._emit(BlocksStored(Medium.CPU, tuple(stored)))

    def _spill(self, keys: Sequence[int], now: float) -> None:
        shared = self._shared
        if shared is None or shared.capacity == 0:
            return
        missing = [key for key in keys if key not in shared]
        if not missing:
            return
        started = max(now, self._shared_store_free_at)
        if started - now > BACKLOG_SECONDS_MAX:
            self._counters.stores_dropped_blocks += len(missing)
            return
        seconds = len(missing) * self._block_tokens / self._rates.shared.store_tokens_per_second
        self._shared_store_free_at = started + seconds
        self._shared_stores.append(_Store(started + seconds, missing, seconds))

    def _shared_lost(self, keys: tuple[int, ...]) -> None:
        if self._announce_shared:
            self._emit(BlocksRemoved(Medium.SHARED, keys))
