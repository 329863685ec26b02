"""The memory of a simulated engine: a device whose blocks can be kept or held, and the connector's own CPU rows."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, cast

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.cpu_tier.duplicates import Duplicates
from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.engine.manager.spills import Spills
from spillway_connector.engine.requests.tenancy import UNKNOWN_REQUEST, TenantContext
from spillway_connector.plan.answers import AnswerReuse
from spillway_connector.plan.conversations import Conversations
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.testing.generation import make_cpu_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_simulator.model.device_cache import DeviceCache
from spillway_simulator.model.events import BlocksStored, Medium
from spillway_simulator.model.tiering import LoadPlan, SharedLevel, Tiering
from spillway_simulator.model.tiers import LruTier
from system.agent_request import AgentRequest
from system.demotions import Demotions
from system.design import Answers, Design, Storing

_KEY_BYTES = 16
_RETAINING_TENANT = b"retains"
_ROW_BYTES = 4096  # of the mapping behind the rows, which is never written
LAZY_BLOCKS = 128  # SimpleCPUOffloadConnector: twice the blocks of max_num_batched_tokens
HELD_SECONDS = 3600.0
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
        """Keep blocks on the device while they are copied."""
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
    """The connector's rows of the CPU tier and their order of eviction, without bytes. now: its clock."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        region = unnamed_region(max(1, rows), _ROW_BYTES)
        self._rows = cast(LruRows, make_cpu_tier(rows, region, "lru", enable_events=False))
        self.now = 0.0
        self._rows._clock = lambda: self.now
        self._context = TenantContext("bench")
        self._users: dict[int, TenantContext] = {}  # the last request of a conversation that uses a block
        self.pinned: Counter[int] = Counter()

    def close(self) -> None:
        self._rows.shutdown()

    def __contains__(self, key: int) -> bool:
        return cast(Any, key) in self._rows.ready

    def __len__(self) -> int:
        return len(self._rows.ready)

    def keys(self) -> frozenset[int]:
        return frozenset(cast("set[int]", self._rows.ready))

    def begin(self, context: TenantContext) -> None:
        self._rows.on_new_request(context)

    def end(self, context: TenantContext) -> None:
        self._rows.on_request_finished(context)

    def use(self, keys: Sequence[int], context: TenantContext | None = None) -> None:
        """The head of a prefix becomes the youngest. context: of the request that uses it and will store the rest."""
        self._rows.touch(cast(Any, keys), context or self._context)
        if context is not None:
            self._users.update(dict.fromkeys(keys, context))

    def hold(self, keys: Sequence[int], share: float) -> None:
        self._rows.hold(_RETAINING_TENANT, share, HELD_SECONDS, cast(Any, keys))

    def evict_first(self, duplicates: Duplicates) -> None:
        self._rows.evict_first(duplicates)

    def has_gone(self, blocks: int) -> bool:
        """Whether no row is free, and sessions that are gone make room for so many blocks."""
        return not self._rows.free_rows() and self._rows.has_room(blocks)

    def will_store(self, keys: Sequence[int]) -> None:
        for context, later in self.by_user(keys):
            self._rows.will_store(cast(Any, later), context)

    def pin(self, keys: Sequence[int]) -> None:
        self._rows.prepare_load(cast(Any, keys), self._context)
        self.pinned.update(keys)

    def unpin(self, keys: Sequence[int]) -> None:
        self._rows.complete_load(cast(Any, keys), self._context)
        self.pinned.subtract(keys)
        self.pinned = +self.pinned

    def by_user(self, keys: Iterable[int]) -> Iterator[tuple[TenantContext, list[int]]]:
        """Yield each request that used some of the blocks last, and these."""
        found: dict[str, tuple[TenantContext, list[int]]] = {}
        for key in dict.fromkeys(keys):
            context = self._users.get(key, self._context)
            found.setdefault(context.req_id, (context, []))[1].append(key)
        yield from found.values()

    def spills_to(self, tier: Any, submit: Callable[..., None], pays: Callable[[], bool]) -> Spills:
        return Spills(tier, self._rows, submit, pays, lambda: self.now, rows=self.capacity)

    def put(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        if not self.capacity:
            return [], []
        stored: list[int] = []
        evicted: list[int] = []
        for context, wanted in self.by_user(keys):
            self._rows.touch(cast(Any, wanted), context)
            output = self._rows.prepare_store(cast(Any, wanted), context)
            if output is not None:
                self._rows.complete_store(output.keys_to_store, context)
                stored += cast("list[int]", output.keys_to_store)
                evicted += cast("list[int]", output.evicted_keys)
        gone = set(evicted)
        back = gone.intersection(stored)  # stored for one request, evicted for the next
        return [key for key in stored if key not in back], [key for key in evicted if key not in back]


class NodeRows(ProductRows):
    """The rows of one CPU tier that all engines of a node share. Each engine knows what its own device holds."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._storing: Duplicates | None = None  # of the engine that stores now

    def evict_first(self, duplicates: Duplicates) -> None:
        """See stores_for."""
        super().evict_first(self)

    def stores_for(self, duplicates: Duplicates) -> None:
        """Take what is stored from now on as this engine's, whose duplicates leave first."""
        self._storing = duplicates

    def take_spare(self, count: int, may_leave: Callable[[OffloadKey], bool]) -> list[tuple[OffloadKey, ReqContext]]:
        assert self._storing is not None
        return self._storing.take_spare(count, may_leave)

    def put_back(self, spare: list[tuple[OffloadKey, ReqContext]]) -> None:
        assert self._storing is not None
        self._storing.put_back(spare)

    def gave_up(
        self, spare: list[tuple[OffloadKey, ReqContext]], gone: list[OffloadKey], others: list[OffloadKey]
    ) -> None:
        """Do nothing: such blocks are copied again when they are about to leave the device."""


def _bytes_of(key: int) -> bytes:
    return key.to_bytes(_KEY_BYTES, signed=True)


class _StoredLevel:
    """A shared tier as the connector's Spills see it."""

    def __init__(self, level: SharedLevel) -> None:
        self._level = level

    def known(self, keys: Sequence[int]) -> set[int]:
        under_way = {key for store in self._level.stores for key in store.keys}
        return {key for key in keys if key in self._level.tier or key in under_way}

    def stores_in_hand(self) -> int:
        return sum(len(store.keys) for store in self._level.stores)


class SystemTiers(Tiering):
    """An engine's tiers in one design."""

    def __init__(self, design: Design, device: KeepingDevice, rows: ProductRows, **arguments: Any) -> None:
        super().__init__(cpu_blocks=rows.capacity, **arguments)
        self.cpu: ProductRows = rows
        self._design = design
        self._device = device
        self._copying: set[int] = set()  # held on the device
        self._spare: dict[int, None] = {}  # in the CPU tier, of requests that run; the latest last
        if design.storing is Storing.EXCLUSIVE:
            self.cpu.evict_first(self)
        if design.node:
            self.cpu_medium = Medium.NODE
            self._emit(BlocksStored(Medium.NODE, ()))
        self.copied_blocks = 0
        self.demotions: Demotions | None = None
        if len(self._levels) > 1:
            above, below = self._levels
            self.demotions = Demotions(above, below, self._begin_store, self._block_tokens)
        self._spills: Spills | None = None
        self._in_hand: deque[tuple[float, list[int]]] = deque()  # (end, blocks) of stores, whose rows are pinned
        if self._levels:
            level = self._levels[0]
            self._spills = self.cpu.spills_to(_StoredLevel(level), self._give, lambda: level.meter.pays)
        self._conversations = Conversations()
        self._contexts: dict[str, TenantContext] = {}  # by request, of conversations that are followed
        self._admitted: TenantContext | None = None
        self.answers = AnswerReuse()
        self._not_kept: set[int] = set()  # blocks of answers that no prompt holds

    def begin_request(self, request: AgentRequest, keys: Sequence[int]) -> None:
        """Take in a request that has come and waits."""
        chunks = [_bytes_of(key) for key in keys]
        session = None
        if self._design.named:
            session = SessionHint(request.session.encode())
        elif self._design.recognised:
            session = self._conversations.session_of(chunks)
        context = self._contexts[request.id] = TenantContext(request.id, session=session, prefix=cast(Any, keys))
        if session is not None:
            self.cpu.begin(context)
        if self._spills is not None:
            self._spills.use(context)
        if self._design.answers is Answers.AUTO:
            self.answers.requested(chunks, None if session is None else session.session)
        if request.retains and self._design.hold_share:
            self.cpu.hold(keys, self._design.hold_share)

    def end_request(self, name: str, generated: Sequence[int]) -> None:
        """generated: the full blocks behind the prompt's."""
        context = self._contexts.pop(name, None)
        if context is not None and context.session is not None:
            self.cpu.end(context)
        if not generated or self._design.answers is None:
            return
        if self._design.answers is Answers.AUTO:
            session = None if context is None or context.session is None else context.session.session
            self.answers.answered(_bytes_of(generated[0]), session)
        if self._design.answers is Answers.OFF or not self.answers.keeps:
            self._not_kept.update(generated)
        else:
            self.store(generated, self.cpu.now)

    def admitting(self, name: str) -> None:
        """Count what is touched next as used by this request."""
        self._admitted = self._contexts.get(name)

    def touch(self, keys: Sequence[int]) -> None:
        self._not_kept.difference_update(keys)
        self.cpu.use(keys, self._admitted)
        for level in self._levels:
            for key in keys:
                level.tier.touch(key)
        if self.demotions is not None:
            self.demotions.use(keys, self.cpu.now)

    def begin_load(self, plan: LoadPlan, now: float) -> None:
        super().begin_load(plan, now)
        self.cpu.pin(plan.cpu_keys)

    def end_load(self, plan: LoadPlan, now: float) -> None:
        self.cpu.unpin(plan.cpu_keys)
        super().end_load(plan, now)
        self.on_device(plan.cpu_keys)
        if self.demotions is not None:
            self.demotions.add(plan.shared_keys[0], now)

    @property
    def next_time(self) -> float | None:
        times = [super().next_time, None if self.demotions is None else self.demotions.next_time]
        return min((at for at in times if at is not None), default=None)

    def finish_stores(self, now: float) -> None:
        super().finish_stores(now)
        while self._in_hand and self._in_hand[0][0] <= now:
            self.cpu.unpin(self._in_hand.popleft()[1])
        if self._spills is not None:
            self._spills.give()
        if self.demotions is not None:
            self.demotions.look(now)

    def _spill(self, keys: Sequence[int], now: float) -> None:
        if self._spills is not None:
            for context, used in self.cpu.by_user([key for key in keys if key in self.cpu]):
                self._spills.offer(cast(Any, used), context)
        if self.demotions is not None:
            self.demotions.add(keys, now)

    def _give(self, keys: Sequence[int], _: ReqContext) -> None:
        """The connector's Spills give these blocks to the nearest shared tier, chunk by chunk."""
        level = self._levels[0]
        known = _StoredLevel(level).known(keys)
        for key in keys:
            if key not in known:
                self._begin_store(level, [key], self.cpu.now)
                self.cpu.pin([key])
                self._in_hand.append((level.store_free_at, [key]))

    def on_device(self, keys: Sequence[int]) -> None:
        """A running request holds these blocks on the device."""
        if self._design.storing is Storing.EXCLUSIVE:
            for key in keys:
                self._spare.pop(key, None)
                if key in self.cpu:
                    self._spare[key] = None

    def take_spare(self, count: int, may_leave: Callable[[OffloadKey], bool]) -> list[tuple[OffloadKey, ReqContext]]:
        """Blocks that the device holds as well; those used last first, as the connector's late stores choose them."""
        taken: list[tuple[OffloadKey, ReqContext]] = []
        passed: list[int] = []
        while self._spare and len(taken) < count:
            key, _ = self._spare.popitem()
            if key not in self.cpu:
                continue
            if may_leave(cast(Any, key)):
                taken.append((cast(Any, key), UNKNOWN_REQUEST))
            else:
                passed.append(key)
        self._spare.update(dict.fromkeys(reversed(passed)))
        return taken

    def put_back(self, spare: list[tuple[OffloadKey, ReqContext]]) -> None:
        self._spare.update(dict.fromkeys(cast(Any, key) for key, _ in reversed(spare)))

    def gave_up(
        self, spare: list[tuple[OffloadKey, ReqContext]], gone: list[OffloadKey], others: list[OffloadKey]
    ) -> None:
        """Do nothing: such blocks are copied again when they are about to leave the device."""

    def store(self, keys: Sequence[int], now: float) -> None:
        exclusive = self._design.storing is Storing.EXCLUSIVE
        at_once = self.cpu.has_gone(len(keys)) or (self._spills is not None and self._spills.keeps_up)
        if self._design.storing is Storing.EAGER or (exclusive and at_once):
            self.copied_blocks += len(keys)
            super().store(keys, now)
        elif exclusive:
            self.cpu.will_store(keys)

    def store_leaving(self, now: float) -> None:
        """Begin to copy what the device evicts next and the CPU tier lacks; it stays on the device until then."""
        exclusive = self._design.storing is Storing.EXCLUSIVE
        near = list(islice(self._device.next_to_leave(), EXCLUSIVE_BLOCKS if exclusive else LAZY_BLOCKS))
        for key in near if self._spare else ():
            self._spare.pop(key, None)
        passed = (self.cpu, self._copying, self._not_kept)
        missing = [key for key in near if not any(key in each for each in passed)]
        if missing:
            self.copied_blocks += len(missing)
            self._device.hold(missing)
            self._copying.update(missing)
            super().store(missing, now)

    def _put_cpu(self, keys: Sequence[int]) -> None:
        if isinstance(self.cpu, NodeRows):
            self.cpu.stores_for(self)
        super()._put_cpu(keys)
        held = [key for key in keys if key in self._copying]
        if held:
            self._copying.difference_update(held)
            self._device.end_hold(held, first=self._design.storing is Storing.EXCLUSIVE)
