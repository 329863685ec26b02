"""The CPU tier's rows: which chunk is in which row and which may be evicted, for whole prefixes at once.

Upstream's manager keeps one ctypes object per row and walks them in Python, several times per request and step. Here a
row is a number, a pin is an entry of a dict, and "which of these are ready" is one set operation. What it decides
(order of rows, order of eviction, what is refused) is upstream's LRU, and a test holds the two against each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, repeat
from typing import Literal

from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingEvent, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.policies.base import BlockStatus
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

from spillway_connector.device.host_region import HostRegion
from spillway_connector.plan.prefix_memo import ChangeLog

_EVICTION_LOOKAHEAD = 32  # rows looked at beyond those wanted, for the pinned ones among them


class CpuTier(CPUPrimaryTierOffloadingManager):
    """What the tiering manager needs beyond upstream's interface.

    ready: chunks that may be read. resident: those and the ones still being written. changed_chunks: those
    that were added, became ready or were evicted. quarantine: rows whose chunks a reset dropped while jobs still read
    or write them, and by how many jobs; a row is reused when the last of these jobs has ended.
    """

    ready: set[OffloadKey]
    resident: AbstractSet[OffloadKey]
    changed_chunks: ChangeLog[OffloadKey]
    quarantine: Counter[int]

    def __init__(
        self, num_rows: int, region: HostRegion, *, policy: Literal["lru", "arc"], enable_events: bool
    ) -> None:
        # The region has what upstream's manager calls.
        super().__init__(num_rows, region, cache_policy=policy, enable_events=enable_events)  # type: ignore[arg-type]
        self.ready = set()
        self.changed_chunks = ChangeLog()
        self.quarantine = Counter()

    def used_rows(self) -> int:
        return len(self.resident)

    @abstractmethod
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Of resident chunks."""

    @abstractmethod
    def _rows_in_use(self) -> Counter[int]:
        """Rows that are being written, each by one job, or read, and by how many."""

    @abstractmethod
    def _drop_all(self) -> None:
        """All chunks, ready or not."""

    def reset_cache(self) -> None:
        """Drop every chunk; rows that jobs still read or write are quarantined until `release`."""
        self.quarantine += self._rows_in_use()
        self._drop_all()
        self.ready.clear()
        # Handed out from the end, so from row 0 on as in a new tier: rows side by side are copied in one run.
        self._free_list = [row for row in reversed(range(self._num_allocated_blocks)) if row not in self.quarantine]
        self.changed_chunks.add_all()

    def release(self, rows: Iterable[int]) -> None:
        """A job that used these rows at a reset has ended."""
        for row in rows:
            self.quarantine[row] -= 1
            assert self.quarantine[row] >= 0, f"row {row} was released more often than it was used"
            if not self.quarantine[row]:
                del self.quarantine[row]
                self._free_list.append(row)


def make_cpu_tier(num_rows: int, region: HostRegion, policy: str, enable_events: bool) -> CpuTier:
    """policy: "lru" or "arc"."""
    kind = LruCpuTier if policy == "lru" else ArcCpuTier
    return kind(num_rows, region, enable_events=enable_events)


class LruCpuTier(CpuTier):
    """Evicts the least recently used ready chunk that no job reads."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        super().__init__(num_rows, region, policy="lru", enable_events=enable_events)
        self._rows: OrderedDict[OffloadKey, int] = OrderedDict()  # the oldest first
        self._readers: dict[OffloadKey, int] = {}  # of the chunks that are being read
        self.resident = self._rows.keys()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: ready. None: being written. False: not here."""
        return True if key in self.ready else (None if key in self._rows else False)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        ordered = keys if isinstance(keys, list | tuple) else list(keys)
        # The head of a prefix becomes the youngest: without its head a prefix is useless.
        deque(map(self._rows.move_to_end, filter(self._rows.__contains__, reversed(ordered))), maxlen=0)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pins the rows. Every key must be ready."""
        assert self.ready.issuperset(keys), "a chunk that is not ready cannot be read"
        readers = self._readers
        if readers.keys().isdisjoint(keys):  # the usual case, without a loop
            readers.update(dict.fromkeys(keys, 1))
        else:
            for key in keys:
                readers[key] = readers.get(key, 0) + 1
        return CPULoadStoreSpec(list(map(self._rows.__getitem__, keys)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        readers = self._readers
        left = list(map(readers.pop, keys, repeat(0)))
        assert 0 not in left, "a chunk was unpinned more often than it was pinned"
        if max(left, default=1) > 1:
            readers.update((key, count - 1) for key, count in zip(keys, left, strict=True) if count > 1)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Rows for those of `keys` that are not here; None when too few can be freed, and then nothing has changed."""
        none_here = self.resident.isdisjoint(keys)
        wanted = list(keys) if none_here else [key for key in keys if key not in self._rows]
        protected = () if none_here else keys
        evicted = self._evict(len(wanted) - self._get_num_free_blocks(), protected) if wanted else []
        if evicted is None:
            return None
        if evicted:
            self._free_list += map(self._rows.pop, evicted)
            self.ready.difference_update(evicted)
            self._announce(evicted, removed=True)
        rows = self._allocate(len(wanted))
        self._rows.update(zip(wanted, rows, strict=True))
        self.changed_chunks.add(evicted)
        self.changed_chunks.add(wanted)
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(rows), evicted)

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
        self.changed_chunks.add(written)

    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return list(map(self._rows.__getitem__, keys))

    def _rows_in_use(self) -> Counter[int]:
        in_use = Counter(self.rows_of(self._rows.keys() - self.ready))
        in_use.update({self._rows[key]: count for key, count in self._readers.items()})
        return in_use

    def _drop_all(self) -> None:
        self._rows.clear()
        self._readers.clear()

    def _allocate(self, count: int) -> list[int]:
        fresh = min(count, self._num_blocks - self._num_allocated_blocks)
        rows = list(range(self._num_allocated_blocks, self._num_allocated_blocks + fresh))
        self._num_allocated_blocks += fresh
        reused = count - fresh
        if reused:
            rows += self._free_list[: -reused - 1 : -1]
            del self._free_list[-reused:]
        return rows

    def _evict(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey] | None:
        """The `count` oldest chunks that may be evicted; None when there are fewer."""
        if count <= 0:
            return []
        if len(self.ready) - len(self._readers) < count:
            return None  # without a search: in a full tier whose rows are all being read, this is every step
        kept = set(protected)
        victims: list[OffloadKey] = []
        oldest_first = iter(self._rows)
        while len(victims) < count:
            batch = list(islice(oldest_first, count + _EVICTION_LOOKAHEAD))
            if not batch:
                return None
            unread = self._readers.keys().isdisjoint(batch)
            if unread and self.ready.issuperset(batch) and kept.isdisjoint(batch):
                victims += batch
                continue
            victims += [key for key in batch if key not in self._readers and key in self.ready and key not in kept]
        return victims[:count]

    def _announce(self, keys: Sequence[OffloadKey], removed: bool) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=list(keys), medium=self.medium, removed=removed))


class ArcCpuTier(CpuTier):
    """Upstream's ARC, with the two sets beside it."""

    def __init__(self, num_rows: int, region: HostRegion, *, enable_events: bool = False) -> None:
        super().__init__(num_rows, region, policy="arc", enable_events=enable_events)
        self._resident: set[OffloadKey] = set()
        self.resident = self._resident

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            for gone in (self._resident, self.ready):
                gone.difference_update(output.evicted_keys)
            self._resident.update(output.keys_to_store)
            self._log(output.evicted_keys, output.keys_to_store)
        return output

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        written = [key for key in keys if key in self._resident and key not in self.ready]
        super().complete_store(keys, req_context, success)
        if success:
            self.ready.update(written)
        else:
            self._resident.difference_update(written)
        self._log(written)

    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        return [self._block_of(key).block_id for key in keys]

    def _rows_in_use(self) -> Counter[int]:
        blocks = [self._block_of(key) for key in self._resident]
        return Counter({block.block_id: abs(block.ref_cnt) for block in blocks if block.ref_cnt})

    def _drop_all(self) -> None:
        self._policy.clear()
        self._resident.clear()

    def _block_of(self, key: OffloadKey) -> BlockStatus:
        """Its `ref_cnt` is -1 while it is being written, else the number of its readers."""
        block = self._policy.get(key)
        assert block is not None, "a resident chunk has a row"
        return block

    def _log(self, *changed: Iterable[OffloadKey]) -> None:
        for keys in changed:
            self.changed_chunks.add(keys)
