"""Rows of the CPU tier that leave in the order of their last use, whole prefixes at once.

What this decides (order of rows and of eviction, refusals) is vLLM's LRU, and a test holds the two against each
other, until sessions, waiting requests or holds choose another chunk (plan/retention.py, plan/waiting.py,
plan/holds.py).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, filterfalse, islice, repeat

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.requests.tenancy import session_of_context
from spillway_connector.plan.retention import EVICTION_LOOKAHEAD, Leavable, Retention
from spillway_connector.plan.waiting import KEPT_SHARE_MAX, WaitingChunks

_FIRST_LOOK = 8  # chunks, of an eviction and of a session; most need few


class LruRows(CpuTier):
    """Evicts the least recently used ready chunk that no job reads, no waiting request needs and no client asked to
    retain; its session may choose another chunk in its place (plan/retention.py). vLLM's policies do none of
    this."""

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
        here = list(filter(self._rows.__contains__, keys))
        # The head of a prefix becomes the youngest: without its head a prefix is useless.
        deque(map(self._rows.move_to_end, reversed(here)), maxlen=0)
        self._use(here, req_context)

    @override
    def will_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if (named := session_of_context(req_context)) is not None:
            self._retention.will_store(*named, keys)

    def _use(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """keys: resident chunks."""
        if (named := session_of_context(req_context)) is not None:
            self._retention.use(*named, keys, self._clock())
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
        assert self.ready.issuperset(keys), "a chunk that is not ready cannot be read"
        self._begin_reads(keys)
        return CPULoadStoreSpec(list(map(self._rows.__getitem__, keys)))

    def _begin_reads(self, keys: Collection[OffloadKey]) -> None:
        if self._readers.keys().isdisjoint(keys):  # the usual case, without a loop
            self._readers.update(dict.fromkeys(keys, 1))
        else:
            self._readers.update((key, self._readers.get(key, 0) + 1) for key in keys)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._end_reads(keys)

    def _end_reads(self, keys: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Returns those that no other job reads."""
        left = list(map(self._readers.pop, keys, repeat(0)))
        assert 0 not in left, "a chunk was unpinned more often than it was pinned"
        if max(left, default=1) == 1:
            return keys
        self._readers.update((key, count - 1) for key, count in zip(keys, left, strict=True) if count > 1)
        return [key for key, count in zip(keys, left, strict=True) if count == 1]

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
        self._end_writes(written, success)

    def _end_writes(self, written: list[OffloadKey], success: bool) -> None:
        """written: resident, not ready."""
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
        kept = set(protected)
        staying = self.ready.intersection(kept).difference(self._readers) if kept else ()
        if len(self.ready) - len(self._readers) - len(staying) < count:
            return None  # without a search: in a full tier whose other rows are all being read, this is every step
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
        """Find up to `count` chunks that gone sessions have left and that may leave."""
        now, passed = self._clock(), list[OffloadKey]()
        gone = self._retention.gone(count, self._rows, self._leavable(count, kept, now, passed), now)
        self._retention.use_without_session(passed)
        return gone

    def _leavable(
        self, count: int, kept: AbstractSet[OffloadKey], now: float, passed: list[OffloadKey]
    ) -> Leavable[OffloadKey]:
        """Make a function that yields those of some resident chunks that may leave before others, in batches.

        Args:
            count: How many are wanted.
            passed: Gets the chunks that it skips because waiting requests need them or clients asked to retain them,
                but not those of one session.
        """

        def leavable(keys: Iterable[OffloadKey], /, *, of_session: bool = False) -> Iterator[Sequence[OffloadKey]]:
            each, size = iter(keys), _FIRST_LOOK if of_session else max(_FIRST_LOOK, count)
            while batch := list(islice(each, size)):
                size = EVICTION_LOOKAHEAD
                if late := self._late_of(batch, now):
                    if not of_session:
                        passed.extend(filter(late.__contains__, batch))
                    batch = list(filterfalse(late.__contains__, batch))
                is_busy = not self._all_may_leave(batch, frozenset())
                if may_leave := self._those_that_may_leave(batch, kept) if is_busy or kept else batch:
                    yield may_leave
                if of_session and (late or is_busy):
                    return

        return leavable

    def _late_of(self, keys: Collection[OffloadKey], now: float) -> set[OffloadKey]:
        """Return the chunks among `keys` that are evicted last."""
        late, waiting = self._held_of(keys, now), self.waiting.kept
        return late if not waiting or waiting.isdisjoint(keys) else late.union(filter(waiting.__contains__, keys))

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
            if late := self._late_of(batch, now):
                spared += filter(late.__contains__, batch)
                batch = [key for key in batch if key not in late]
            enough = batch[: count - len(victims)]
            victims += enough if self._all_may_leave(enough, kept) else self._those_that_may_leave(batch, kept)
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

    def _those_that_may_leave(self, batch: list[OffloadKey], kept: AbstractSet[OffloadKey]) -> list[OffloadKey]:
        if self._all_may_leave(batch, kept):
            return batch
        ready, readers = self.ready, self._readers
        return [key for key in batch if key in ready and key not in readers and key not in kept]

    def _all_may_leave(self, batch: Sequence[OffloadKey], kept: AbstractSet[OffloadKey]) -> bool:
        return (
            (not self._readers or self._readers.keys().isdisjoint(batch))
            and self.ready.issuperset(batch)
            and (not kept or kept.isdisjoint(batch))
        )

    def _may_leave(self, key: OffloadKey, kept: AbstractSet[OffloadKey]) -> bool:
        return key in self.ready and key not in self._readers and key not in kept

    def _evict_with_sessions(
        self, count: int, kept: AbstractSet[OffloadKey], req_context: ReqContext, now: float
    ) -> list[OffloadKey] | None:
        """Choose the chunks to evict; None if fewer may leave without those that waiting requests need or clients
        asked to retain."""
        passed: list[OffloadKey] = []
        asking = None if (named := session_of_context(req_context)) is None else (named[0], named[1].session)
        leavable = self._leavable(count, kept, now, passed)
        plan = self._retention.plan_eviction(count, self._rows, leavable, now, asking)
        self._retention.use_without_session(passed)  # or the next eviction would look at all of them once more
        if plan is None:
            return None
        victims, spared = plan
        deque(map(self._rows.move_to_end, chain(passed, spared)), maxlen=0)
        return victims
