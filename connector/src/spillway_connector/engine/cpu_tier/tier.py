"""The CPU tier's rows: which chunk is in which row and which may be evicted, for whole prefixes at once.

Upstream's manager keeps one object per row and walks them in Python, several times per request and step. Here a row is
a number, a pin an entry of a dict, and "which of these are ready" one set operation. What it decides (order of rows and
of eviction, refusals) is upstream's LRU, and a test holds the two against each other. The room of a generation of vLLM
completes these classes: answers of a lookup, media of events.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice, repeat
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.duplicates import Duplicates
from spillway_connector.engine.cpu_tier.holding_arc import HoldingArc
from spillway_connector.engine.requests.tenancy import session_of_context
from spillway_connector.plan.holds import Holds
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.plan.retention import EVICTION_LOOKAHEAD, Retention
from spillway_connector.plan.waiting import KEPT_SHARE_MAX, WaitingChunks
from spillway_connector.transfer.announcements import Announcement, Announcements


class CpuTier(OffloadingManager):
    """What the tiering manager needs beyond vLLM's OffloadingManager.

    ready: chunks that may be read. resident: those and the ones still being written. changed_chunks: those that were
    added, became ready or were evicted. quarantine: rows whose chunks a reset dropped while jobs still use them, and by
    how many; a row is reused when the last has ended. waiting: what the requests in the queue are about to use, which
    leaves last. news: of rows that engines share; else None.

    load and store are copies to and from the device, read and write those to and from shared tiers; prepare_read is
    None if rows that are shared were given to other chunks meanwhile.
    """

    resident: AbstractSet[OffloadKey]
    news: Announcements | None = None

    def __init__(
        self, num_rows: int, region: HostRegion, enable_events: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._holds: Holds[OffloadKey] = Holds(num_rows)
        self.ready: set[OffloadKey] = set()
        self.changed_chunks: ChangeLog[OffloadKey] = ChangeLog()
        self.quarantine: Counter[int] = Counter()
        self.waiting: WaitingChunks[OffloadKey] = WaitingChunks(0, frozenset())
        self._duplicates: Duplicates | None = None
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self._region = region
        self._view = region.create_kv_memoryview()
        self._free_list: list[int] = []
        self.prepare_write, self.complete_write = self.prepare_store, self.complete_store
        self.complete_read = self.complete_load

    def evict_first(self, duplicates: Duplicates) -> None:
        """From now on, what the device holds as well leaves first, behind what sessions that are gone left."""
        self._duplicates = duplicates

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec | None:
        return self.prepare_load(keys, req_context)

    def sync(self) -> None:
        """Learn what others have changed in rows that are shared, before what a step asks."""

    def together(self) -> AbstractContextManager[None]:
        """Stores that are completed within it are made known to others that share the rows at its end, all at once."""
        return nullcontext()

    def weights_changed(self) -> None:
        """The model's weights change: chunks that this engine shares with others then belong to other weights."""

    def use_namespace(self, namespace: bytes) -> None:
        """The weights that changed have a name: engines whose namespaces are equal share chunks again."""

    def take_announcements(self) -> Iterable[Announcement]:
        """What to tell of shared rows, once per step: `take_events` then is for vLLM's books alone."""
        return ()

    @property
    def is_joined(self) -> bool | None:
        """Whether these rows, which others share, can be used; None for rows of one's own."""
        return None

    def has_room(self, count: int) -> bool:
        """Whether so many chunks can come, and none leaves that a session may use again."""
        return self.free_rows() >= count

    def used_rows(self) -> int:
        return len(self.resident)

    def retained_rows(self) -> int:
        """Rows of sessions that are expected to go on; see plan/retention.py."""
        return 0

    def held_rows(self) -> int:
        """Chunks that clients asked to retain, whether they are here or not; see plan/holds.py."""
        self._holds.expire(self._clock())
        return len(self._holds)

    def hold(self, tenant: bytes, share: float, seconds: float, keys: Sequence[OffloadKey]) -> None:
        """A request asks to retain these chunks."""
        self._holds.hold(tenant, share, seconds, keys, self._clock())

    def _held_of(self, keys: Collection[OffloadKey], now: float) -> set[OffloadKey]:
        """Return those of these resident chunks that are held."""
        return self._holds.held_of(keys, now)

    def take_ended_sessions(self) -> int:
        """How many sessions have ended since the last call."""
        return 0

    def retire(self, keys: Iterable[OffloadKey]) -> None:
        """Nobody came for these chunks: they go first. A policy that tells chunks used once from others ignores it."""

    @abstractmethod
    def free_rows(self) -> int: ...

    @abstractmethod
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """The rows of resident chunks."""

    @abstractmethod
    def _rows_in_use(self) -> Counter[int]:
        """Rows that are being written, each by one job, or read, and by how many."""

    @abstractmethod
    def _drop_all(self) -> int:
        """All chunks, ready or not. Returns the number of rows that have ever been handed out, 0 to that."""

    @abstractmethod
    def _event(self, keys: list[OffloadKey], removed: bool) -> OffloadingEvent: ...

    def _announce(self, keys: Iterable[OffloadKey], removed: bool) -> None:
        if self.events is not None and (announced := list(keys)):
            self.events.append(self._event(announced, removed))

    def _lost(self, keys: list[OffloadKey]) -> None:
        """Chunks that were never ready have left: their store failed. vLLM may hold a description of each."""

    @override
    def reset_cache(self) -> None:
        """Drop every chunk; rows that jobs still read or write are quarantined until `release`."""
        self._announce(self.ready, removed=True)
        self.quarantine += self._rows_in_use()
        rows = self._drop_all()
        self.ready.clear()
        self.waiting.clear()
        self._holds.clear()
        # Handed out from the end, so from row 0 on as in a new tier: rows side by side are copied in one run.
        self._free_list = [row for row in reversed(range(rows)) if row not in self.quarantine]
        self.changed_chunks.add_all()

    def release(self, rows: Iterable[int]) -> None:
        """A job that used these rows at a reset has ended."""
        for row in rows:
            self.quarantine[row] -= 1
            assert self.quarantine[row] >= 0, f"row {row} was released more often than it was used"
            if not self.quarantine[row]:
                del self.quarantine[row]
                self._free_list.append(row)

    def get_kv_memoryview(self) -> memoryview:
        """The pair (rows, bytes of a row), for all ranks together."""
        return self._view

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        if self.events:
            events, self.events = self.events, []
            return events
        return ()

    @override
    def shutdown(self) -> None:
        self._view.release()
        self._region.cleanup()


class LruRows(CpuTier):
    """Evicts the least recently used ready chunk that no job reads, no waiting request needs and no client asked to
    retain; its session may choose another one in its place (plan/retention.py). Upstream's policies know none of it."""

    def __init__(
        self,
        num_rows: int,
        region: HostRegion,
        *,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_rows, region, enable_events, clock)
        self._retention: Retention[OffloadKey] = Retention()
        self._num_rows = num_rows
        self._allocated_rows = 0  # rows 0 to that have been handed out, once or more often
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()  # the oldest first
        self._readers: dict[OffloadKey, int] = {}  # of the chunks that are being read
        self.resident = self._rows.keys()
        self.waiting = WaitingChunks(int(num_rows * KEPT_SHARE_MAX), self.resident)

    @override
    def retire(self, keys: Iterable[OffloadKey]) -> None:
        for key in filter(self._rows.__contains__, keys):
            self._rows.move_to_end(key, last=False)

    @override
    def free_rows(self) -> int:
        return len(self._free_list) + self._num_rows - self._allocated_rows

    @override
    def retained_rows(self) -> int:
        return self._retention.retained_chunks

    @override
    def take_ended_sessions(self) -> int:
        ended, self._retention.sessions_ended = self._retention.sessions_ended, 0
        return ended

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        ordered = keys if isinstance(keys, list | tuple) else list(keys)
        # The head of a prefix becomes the youngest: without its head a prefix is useless.
        deque(map(self._rows.move_to_end, filter(self._rows.__contains__, reversed(ordered))), maxlen=0)
        self._use(ordered, req_context)

    def _use(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        if (named := session_of_context(req_context)) is not None:
            self._retention.use(*named, filter(self._rows.__contains__, keys), self._clock())
        elif not self._retention.is_idle:
            self._retention.use_without_session(keys)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if (named := session_of_context(req_context)) is not None:
            self._retention.begin_request(*named, self._clock())
        return super().on_new_request(req_context)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        if (named := session_of_context(req_context)) is not None:
            self._retention.end_request(*named, self._clock())

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pins the rows. Every key must be ready."""
        self._begin_reads(keys)
        return CPULoadStoreSpec(list(map(self._rows.__getitem__, keys)))

    def _begin_reads(self, keys: Collection[OffloadKey]) -> None:
        assert self.ready.issuperset(keys), "a chunk that is not ready cannot be read"
        if self._readers.keys().isdisjoint(keys):  # the usual case, without a loop
            self._readers.update(dict.fromkeys(keys, 1))
        else:
            self._readers.update((key, self._readers.get(key, 0) + 1) for key in keys)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        left = list(map(self._readers.pop, keys, repeat(0)))
        assert 0 not in left, "a chunk was unpinned more often than it was pinned"
        if max(left, default=1) > 1:
            self._readers.update((key, count - 1) for key, count in zip(keys, left, strict=True) if count > 1)

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for those of `keys` that are not here; None when too few can be freed, and then nothing has changed."""
        none_here = self.resident.isdisjoint(keys)
        wanted = list(keys) if none_here else [key for key in keys if key not in self._rows]
        evicted = self._make_room(len(wanted), () if none_here else keys, req_context) if wanted else []
        if evicted is None:
            return None
        if evicted:
            self._free_list += map(self._rows.pop, evicted)
            self._retention.forget(evicted)
            self.ready.difference_update(evicted)
            self._announce(evicted, removed=True)
        rows = self._allocate(len(wanted))
        self._rows.update(zip(wanted, rows, strict=True))
        self._use(wanted, req_context)
        self.changed_chunks.add(evicted)
        self.changed_chunks.add(wanted)
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(rows), evicted)

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        if self.ready.isdisjoint(keys) and self.resident >= set(keys):
            written = list(keys)
        else:
            written = [key for key in keys if key in self._rows and key not in self.ready]
        if success:
            self.ready.update(written)
            self._announce(written, removed=False)
        else:
            self._free_list += [self._rows.pop(key) for key in written]
            self._retention.forget(written)
            self._lost(written)
        self.changed_chunks.add(written)

    @override
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return list(map(self._rows.__getitem__, keys))

    @override
    def _rows_in_use(self) -> Counter[int]:
        in_use = Counter(self.rows_of(self._rows.keys() - self.ready))
        in_use.update({self._rows[key]: count for key, count in self._readers.items()})
        return in_use

    @override
    def _drop_all(self) -> int:
        self._rows.clear()
        self._readers.clear()
        self._retention.clear()
        return self._allocated_rows

    def _allocate(self, count: int) -> list[int]:
        fresh = min(count, self._num_rows - self._allocated_rows)
        rows = list(range(self._allocated_rows, self._allocated_rows + fresh))
        self._allocated_rows += fresh
        reused = count - fresh
        if reused:
            rows += self._free_list[: -reused - 1 : -1]
            del self._free_list[-reused:]
        return rows

    def _make_room(self, count: int, protected: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey] | None:
        """The chunks that leave for `count` others; None if too few may."""
        return self._evict(count - self.free_rows(), protected, context)

    def _evict(self, count: int, protected: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey] | None:
        """`count` chunks that may be evicted, the oldest unless sessions choose others; None when there are fewer."""
        if count <= 0:
            return []
        if len(self.ready) - len(self._readers) < count:
            return None  # without a search: in a full tier whose rows are all being read, this is every step
        kept = set(protected)
        if self._duplicates is None:
            return self._evict_unique(count, kept, req_context)
        gone = self._left_behind(count, kept)
        kept.update(gone)
        spare = self._duplicates.take_spare(count - len(gone), lambda key: self._is_unneeded(key, kept))
        first = gone + [key for key, _ in spare]
        rest = self._evict_unique(count - len(first), kept.union(first), req_context)
        if rest is None:
            self._duplicates.put_back(spare)
            return None
        self._duplicates.gave_up(spare, gone, rest)
        return first + rest

    @override
    def has_room(self, count: int) -> bool:
        missing = count - self.free_rows()
        return missing <= 0 or len(self._left_behind(missing, frozenset())) == missing

    def _left_behind(self, count: int, kept: AbstractSet[OffloadKey]) -> list[OffloadKey]:
        """Up to `count` chunks that sessions which are gone have left, and that may leave."""
        now, unneeded, held = self._clock(), self._is_unneeded, self._held_of
        return self._retention.gone(count, self._rows, lambda key: unneeded(key, kept) and not held((key,), now), now)

    def _is_unneeded(self, key: OffloadKey, kept: AbstractSet[OffloadKey]) -> bool:
        return key not in self.waiting.kept and self._may_leave(key, kept)

    def _evict_unique(
        self, count: int, kept: AbstractSet[OffloadKey], req_context: ReqContext
    ) -> list[OffloadKey] | None:
        if count <= 0:
            return []
        waiting, now = self.waiting.kept, self._clock()
        if not self._retention.is_idle and (chosen := self._evict_with_sessions(count, kept, req_context, now)):
            return chosen
        victims, spared = list[OffloadKey](), list[OffloadKey]()
        oldest_first = iter(self._rows)
        while len(victims) < count and (batch := list(islice(oldest_first, count + EVICTION_LOOKAHEAD))):
            late = self._held_of(batch, now)
            if waiting and not waiting.isdisjoint(batch):
                late |= waiting & set(batch)
            if late:
                spared += filter(late.__contains__, batch)
                batch = [key for key in batch if key not in late]
            enough = batch[: count - len(victims)]
            if self._all_may_leave(enough, kept):
                victims += enough
                continue
            victims += [key for key in batch if self._may_leave(key, kept)]
        del victims[count:]
        if len(victims) < count:
            held = (key for key in spared if key not in waiting)
            last = dict.fromkeys(key for key in chain(held, self.waiting.last_first()) if self._may_leave(key, kept))
            victims += islice(last, count - len(victims))
            if len(victims) < count:
                return None
        # They are not looked at again before every other chunk was.
        deque(map(self._rows.move_to_end, spared), maxlen=0)
        return victims

    def _all_may_leave(self, batch: Sequence[OffloadKey], kept: AbstractSet[OffloadKey]) -> bool:
        return self._readers.keys().isdisjoint(batch) and self.ready.issuperset(batch) and kept.isdisjoint(batch)

    def _may_leave(self, key: OffloadKey, kept: AbstractSet[OffloadKey]) -> bool:
        return key in self.ready and key not in self._readers and key not in kept

    def _evict_with_sessions(
        self, count: int, kept: AbstractSet[OffloadKey], req_context: ReqContext, now: float
    ) -> list[OffloadKey] | None:
        """None if fewer may leave without what waiting requests need and clients asked to retain."""
        passed: list[OffloadKey] = []

        def may_leave(key: OffloadKey) -> bool:
            if key in self.waiting.kept or self._held_of((key,), now):
                passed.append(key)
                return False
            return self._may_leave(key, kept)

        asking = None if (named := session_of_context(req_context)) is None else (named[0], named[1].session)
        plan = self._retention.plan_eviction(count, self._rows, may_leave, now, asking)
        if plan is None:
            return None
        victims, spared = plan
        deque(map(self._rows.move_to_end, chain(passed, spared)), maxlen=0)
        return victims


class ArcRows(CpuTier, CPUOffloadingManager):
    """Upstream's ARC, with the two sets beside it; what clients asked to retain leaves last."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        CPUOffloadingManager.__init__(self, num_rows, cache_policy="arc", enable_events=enable_events)
        CpuTier.__init__(self, num_rows, region, enable_events)
        self._policy = HoldingArc(num_rows, self._held)
        self._resident: set[OffloadKey] = set()
        self.resident = self._resident

    @abstractmethod
    def _row_of(self, status: Any) -> int:
        """status: what upstream's policy keeps of a chunk."""

    def _held(self) -> AbstractSet[OffloadKey]:
        self._holds.expire(self._clock())
        return self._holds.keys

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = CPUOffloadingManager.prepare_store(self, keys, req_context)
        if output is not None:
            for gone in (self._resident, self.ready):
                gone.difference_update(output.evicted_keys)
            self._resident.update(output.keys_to_store)
            self.changed_chunks.add(output.evicted_keys)
            self.changed_chunks.add(output.keys_to_store)
        return output

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = [key for key in keys if key in self._resident and key not in self.ready]
        CPUOffloadingManager.complete_store(self, keys, req_context, success)
        if success:
            self.ready.update(written)
        else:
            self._resident.difference_update(written)
        self.changed_chunks.add(written)

    @override
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return [self._row_of(self._status_of(key)) for key in keys]

    @override
    def _rows_in_use(self) -> Counter[int]:
        chunks = [self._status_of(key) for key in self._resident]
        return Counter({self._row_of(chunk): abs(chunk.ref_cnt) for chunk in chunks if chunk.ref_cnt})

    def _status_of(self, key: OffloadKey) -> Any:
        """Its `ref_cnt` is -1 while it is being written, else the number of its readers."""
        status = self._policy.get(key)
        assert status is not None, "a resident chunk has a row"
        return status
