"""The memory of a simulated engine: a device whose blocks can be kept or held, and the connector's own CPU rows."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, cast

from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.cpu_tier import LruRows
from spillway_connector.engine.tenancy import TenantContext
from spillway_connector.testing.generation import make_cpu_tier
from spillway_simulator.model.device_cache import DeviceCache
from spillway_simulator.model.tiering import LoadPlan, Tiering
from spillway_simulator.model.tiers import LruTier
from system.design import Design, Storing

_ROW_BYTES = 4096  # of the mapping behind the rows, which is never written
LAZY_BLOCKS = 128  # SimpleCPUOffloadConnector: twice the blocks of max_num_batched_tokens
EXCLUSIVE_BLOCKS = 800  # all that is free: what is freed is stored


class KeepingDevice(DeviceCache):
    """Blocks that waiting requests keep are evicted after all others; blocks that are being copied are not evicted."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: OrderedDict[int, None] = OrderedDict()  # unreferenced, evicted after the others
        self._keepers: Counter[int] = Counter()

    @property
    def used_blocks(self) -> int:
        return super().used_blocks - len(self._kept)

    def keep(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._keepers[key] += 1
            if key in self._unreferenced:
                del self._unreferenced[key]
                self._kept[key] = None

    def let_go(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._keepers[key] -= 1
            if not self._keepers[key]:
                del self._keepers[key]
                if key in self._kept:
                    del self._kept[key]
                    self._unreferenced[key] = None

    def next_to_leave(self) -> Iterator[int]:
        return chain(self._unreferenced, self._kept)

    def hold(self, keys: Sequence[int]) -> None:
        """They are being copied."""
        self.acquire(keys)

    def end_hold(self, keys: Sequence[int], *, first: bool) -> None:
        """first: they are the next to leave, as before; else the last, as blocks that vLLM frees."""
        self.release(list(reversed(keys)), 0)
        if first:
            for key in reversed(keys):
                if key in self._unreferenced:
                    self._unreferenced.move_to_end(key, last=False)

    def unreferenced_among(self, keys: Sequence[int]) -> int:
        return super().unreferenced_among(keys) + sum(1 for key in keys if key in self._kept)

    def acquire(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._kept.pop(key, None)
        super().acquire(keys)

    def release(self, keys: Sequence[int], private: int) -> None:
        super().release(keys, private)
        for key in reversed(keys):
            if key in self._keepers and key in self._unreferenced:
                del self._unreferenced[key]
                self._kept[key] = None

    def reserve(self, blocks: int) -> tuple[int, ...]:
        while len(self._unreferenced) < len(self._references) + self._private + blocks - self.capacity:
            key, _ = self._kept.popitem(last=False)
            self._unreferenced[key] = None
        return super().reserve(blocks)


class ProductRows(LruTier):
    """The connector's rows of the CPU tier and their order of eviction, without bytes."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        region = HostRegion(region_path(f"bench-system-{os.getpid()}"), max(1, rows), _ROW_BYTES)
        region.unlink_name()
        self._rows = cast(LruRows, make_cpu_tier(rows, region, "lru", enable_events=False))
        self._context = TenantContext("bench")
        self.pinned: Counter[int] = Counter()

    def close(self) -> None:
        self._rows.shutdown()

    def __contains__(self, key: int) -> bool:
        return cast(Any, key) in self._rows.ready

    def __len__(self) -> int:
        return len(self._rows.ready)

    def keys(self) -> frozenset[int]:
        return frozenset(cast("set[int]", self._rows.ready))

    def use(self, keys: Sequence[int]) -> None:
        """The head of a prefix becomes the youngest."""
        self._rows.touch(cast(Any, keys), self._context)

    def retire(self, keys: Iterable[int]) -> None:
        self._rows.retire(cast(Any, keys))

    def pin(self, keys: Sequence[int]) -> None:
        self._rows.prepare_load(cast(Any, keys), self._context)
        self.pinned.update(keys)

    def unpin(self, keys: Sequence[int]) -> None:
        self._rows.complete_load(cast(Any, keys), self._context)
        self.pinned.subtract(keys)
        self.pinned = +self.pinned

    def put(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        if not self.capacity:
            return [], []
        wanted = list(dict.fromkeys(keys))
        self.use(wanted)
        output = self._rows.prepare_store(cast(Any, wanted), self._context)
        if output is None:
            return [], []
        self._rows.complete_store(output.keys_to_store, self._context)
        return cast("list[int]", output.keys_to_store), cast("list[int]", output.evicted_keys)


class SystemTiers(Tiering):
    """An engine's tiers in one design."""

    def __init__(self, design: Design, device: KeepingDevice, cpu_rows: int, **arguments: Any) -> None:
        super().__init__(cpu_blocks=cpu_rows, **arguments)
        self.cpu: ProductRows = ProductRows(cpu_rows)
        self._design = design
        self._device = device
        self._copying: set[int] = set()  # held on the device
        self._retired: set[int] = set()
        self.copied_blocks = 0

    def touch(self, keys: Sequence[int]) -> None:
        self.cpu.use(keys)
        for key in keys if self._shared is not None else ():
            self._shared.touch(key)  # type: ignore[union-attr]

    def begin_load(self, plan: LoadPlan, now: float) -> None:
        super().begin_load(plan, now)
        self.cpu.pin(plan.cpu_keys)

    def end_load(self, plan: LoadPlan) -> None:
        self.cpu.unpin(plan.cpu_keys)
        super().end_load(plan)
        self.on_device(plan.cpu_keys)

    def on_device(self, keys: Sequence[int]) -> None:
        """A running request holds these blocks on the device."""
        if self._design.storing is Storing.EXCLUSIVE:
            self._retired.update(key for key in keys if key in self.cpu)
            self.cpu.retire(keys)

    def store(self, keys: Sequence[int], now: float) -> None:
        if self._design.storing is Storing.EAGER:
            self.copied_blocks += len(keys)
            super().store(keys, now)

    def store_leaving(self, now: float) -> None:
        """Begin to copy what the device evicts next and the CPU tier lacks; it stays on the device until then."""
        exclusive = self._design.storing is Storing.EXCLUSIVE
        near = list(islice(self._device.next_to_leave(), EXCLUSIVE_BLOCKS if exclusive else LAZY_BLOCKS))
        again = [key for key in near if key in self._retired and key in self.cpu]
        if again:
            self._retired.difference_update(again)
            self.cpu.use(list(reversed(again)))
        missing = [key for key in near if key not in self.cpu and key not in self._copying]
        if missing:
            self.copied_blocks += len(missing)
            self._device.hold(missing)
            self._copying.update(missing)
            super().store(missing, now)

    def _put_cpu(self, keys: Sequence[int]) -> None:
        super()._put_cpu(keys)
        held = [key for key in keys if key in self._copying]
        if held:
            self._copying.difference_update(held)
            self._device.end_hold(held, first=self._design.storing is Storing.EXCLUSIVE)
