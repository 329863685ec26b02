"""The CPU tier in rows that the engines of a node share.

Each engine keeps the same state as for a private tier: a dict of chunks in the order of their use, the set of ready
chunks, sessions, and what clients asked to retain. It is a picture of the shared index, brought up to date by what
others changed at the start of each step, so a look-up costs what it costs in a private tier. The index, under its lock,
then decides about each row: who may write to it, who reads it, what it holds. The picture may be out of date, the index
never is. An outdated picture is noticed when rows are pinned for a load. That load is sent to the ranks nevertheless,
with words that no row has, so they refuse it as they refuse any copy that cannot be made, and the request computes its
chunks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import compress, islice, repeat, takewhile
from typing import cast

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.engine.node_tier.picture import NodePicture
from spillway_connector.engine.node_tier.row_checks import NodeRowsSpec
from spillway_connector.plan import node_records
from spillway_connector.plan.node_index import NO_STAMP, NodeIndex
from spillway_connector.plan.node_records import RowArray
from spillway_connector.plan.retention import EVICTION_LOOKAHEAD

logger = logging.getLogger(__name__)

# Rows that an engine reserves beyond those that it needs: so many, or its part of a sixteenth of all. Others may come
# later, so its part is an eighth at most.
_SPARE_ROWS_MAX, _SPARE_DIVISOR, _SPARE_ENGINES = 32, 16, 8
_LOOK_FACTOR = 8  # how many more of the oldest chunks are looked at each time that a choice met some that others read


class NodeRows(NodePicture):
    """LruRows over a region of the node. EngineCore process, scheduler thread.

    What sessions and waiting requests say of chunks decides which of them leave for this engine's own chunks. Other
    engines know the chunks' last use, and until when clients of any engine asked to retain them.
    """

    # -- counts

    @override
    def used_rows(self) -> int:
        return self._num_rows - self._index.free_rows - len(self._reserved)

    @override
    def free_rows(self) -> int:
        return self._index.free_rows + len(self._reserved) if self._left is None else 0

    # -- holds

    @override
    def hold(self, tenant: bytes, share: float, seconds: float, keys: Sequence[OffloadKey]) -> None:
        super().hold(tenant, share, seconds, keys)
        if self._left is None:
            self._show_holds(key for key in keys if key in self._rows)

    @override
    def _held_of(self, keys: Collection[OffloadKey], now: float) -> set[OffloadKey]:
        if not self._any_held:
            return set()
        index, rows = self._index, self._rows
        return {key for key in keys if index.is_held(rows[key], now)}

    # -- stores

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().touch(keys, req_context)
        if self._left is not None or self.resident.isdisjoint(keys):
            return
        now_ms = int(self._clock() * 1000)  # written without the lock, as only the order of eviction depends on it
        if len(keys) > node_records.FEW_ROWS:
            at = self._rows_at(keys)
            at = at[at >= 0]
            self._index.used_ms_array[at] = self._used_array[at] = now_ms
        else:
            used_ms, seen_ms, row_of = self._index.used_ms, self._used_ms, self._rows.get
            for key in keys:
                if (row := row_of(key)) is not None:
                    used_ms[row] = seen_ms[row] = now_ms

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None
        if self._left is not None or len(keys) > len(self._reserved):
            output = self._reserve_and_store(keys, req_context)
        else:
            if self._counts.tobytes() != self._version:
                self._look()
            output = super().prepare_store(keys, req_context)
        if output is None or not output.keys_to_store or self._claim(output, req_context):
            return output
        return None

    def _reserve_and_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = None

        def change(_: NodeIndex) -> None:
            nonlocal output
            output = super(NodeRows, self).prepare_store(keys, req_context)

        return output if self._change(change) else None

    def _claim(self, output: PrepareStoreOutput, req_context: ReqContext) -> bool:
        """The chunks are going to be written to the rows that they were just given. False: the tier is left."""
        keys, index, place, now_ms = output.keys_to_store, self._index, self._place, int(self._clock() * 1000)
        count = len(keys)
        rows, self._reserved = self._reserved[:count], self._reserved[count:]
        if count > node_records.FEW_ROWS:
            assert isinstance(output.store_spec, CPULoadStoreSpec)
            at = output.store_spec.block_ids.astype(np.intp, copy=False)
            is_claimed = index.claim_many(at, self._known, self._namespace, keys, place, now_ms=now_ms)
        else:
            is_claimed = index.claim(rows, self._known, self._namespace, keys, place, now_ms=now_ms)
        # An engine that was taken for dead between the look at the rows and the claim has no row.
        if not is_claimed or not self._has_place():
            self._end_writes(list(keys), False)
            self._free_list.clear()
            self._leave_changed_rows()
            return False
        self._chunk_in.update(zip(rows, keys, strict=True))
        self._mine.update(zip(keys, rows, strict=True))
        self._version_words[1 + place] = self._counts[1 + place]
        if self._holds:
            self._show_holds(keys)
        return True

    @override
    def _make_room(self, count: int, protected: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey] | None:
        """Called with the lock, unless enough rows are reserved. Reserves more rows for the next chunks, but evicts for
        them no chunk that clients asked to retain or that a waiting request needs."""
        missing = count - len(self._reserved)
        if missing <= 0:
            return []
        index = self._index
        self._any_held = index.any_held(self._clock())
        wanted = missing if self._any_held else missing + self._spare_rows()
        if self._foreign:
            self._make_foreign_room(index, wanted - index.free_rows)
        # Rows are free if their stamps say so: an engine that was taken for dead may have published one of them late,
        # which is not in the count of those that are free.
        found = index.take_free(min(index.free_rows, wanted))
        evicted = self._evict(wanted - len(found), protected, context)
        if wanted > missing and (evicted is None or (evicted and not self.waiting.kept.isdisjoint(evicted))):
            evicted = self._evict(missing - len(found), protected, context)
        if evicted is None:
            return None
        left = self.rows_of(evicted)
        rows = left + found
        if len(rows) > node_records.FEW_ROWS:
            at = np.array(rows, np.intp)
            stamps = index.reserve(at, self._place)
            self._seen_array[at] = self._known.reserved_array[at] = np.arange(
                stamps.start, stamps.stop, stamps.step, np.uint64
            )
        else:
            for row, stamp in zip(rows, index.reserve(rows, self._place), strict=True):
                self._seen[row] = self._known.reserved[row] = stamp
        self._reserved += rows
        deque(map(self._chunk_in.__delitem__, left), maxlen=0)
        return evicted

    def _spare_rows(self) -> int:
        """Return how many rows to reserve beyond those that are needed."""
        return min(_SPARE_ROWS_MAX, self._num_rows // (_SPARE_DIVISOR * max(_SPARE_ENGINES, len(self._engines))))

    @override
    def _allocate(self, count: int) -> list[int]:
        self._free_list.clear()  # the rows of what was evicted are reserved, too
        return self._reserved[:count]

    def _make_foreign_room(self, index: NodeIndex, count: int) -> None:
        """Free rows that this picture does not show: those used before its oldest chunk, and others while it is short
        of evictable chunks or below its floor, what is held last. Other namespaces keep theirs."""
        if count <= 0:
            return
        now, any_held = self._clock(), self._any_held
        oldest_first = self._foreign.oldest_first(index.used_ms_array, self._now_ms())
        is_above_floor = len(self._rows) >= self._foreign.floor_rows
        has_enough = is_above_floor and len(self.ready) - len(self._readers) >= count
        if has_enough:
            oldest = next((self._used_ms[row] for key, row in self._rows.items() if key in self.ready), 0)
            oldest_first = list(takewhile(lambda row: index.used_ms[row] <= oldest, oldest_first))
        chosen: list[int] = []
        held: list[int] = []
        for row in oldest_first:
            if len(chosen) == count:
                break
            if index.may_leave(row):
                (held if any_held and index.is_held(row, now) else chosen).append(row)
        if not has_enough:
            chosen += held[: count - len(chosen)]
        if chosen:
            self._free(index, chosen)
            for row in chosen:
                self._foreign.discard(row)

    @override
    def _evict(self, count: int, protected: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey] | None:
        """Called with the lock. The picture shows all but what other engines read and when they used it last, so chunks
        are chosen by it, and the index is asked about those that were chosen. If others have used any of these since,
        the picture follows them before the next choice. That leaves out what others read of those chosen and of the
        oldest chunks, of which it looks at more each time: to look at all rows takes 20 ms for 50,000."""
        staying, looked_at = set(protected), count + EVICTION_LOOKAHEAD
        while evicted := super()._evict(count, staying, req_context):
            at = self._rows_at(evicted)
            if (self._index.used_ms_array[at] > self._used_array[at]).any():
                self._follow_others(count, evicted)
                continue
            if self._index.all_may_leave(at):
                break
            looked = [*evicted, *islice(self._rows, looked_at)]
            staying.update(compress(looked, (~self._index.which_may_leave(self._rows_at(looked))).tolist()))
            looked_at *= _LOOK_FACTOR
        return evicted

    def _follow_others(self, count: int, chosen: Sequence[OffloadKey]) -> None:
        """The oldest chunks that others have used since become the youngest, until `count` may leave before them. So do
        those that this engine's ended sessions left over, and the chosen ones."""
        index, seen_ms, chunk_in, now = self._index, self._used_array, self._chunk_in, self._clock()
        newer = set(index.used_since(self.rows_of(chosen), seen_ms))
        left_over, looked_at = self._retention.left_over, count + EVICTION_LOOKAHEAD
        while left_over and (rows := index.used_since(self.rows_of(islice(left_over, looked_at)), seen_ms)):
            self._retention.use_without_session([chunk_in[row] for row in rows])
            newer.update(rows)
        oldest_first = iter(self._rows)
        while count > 0 and (batch := list(islice(oldest_first, max(count, EVICTION_LOOKAHEAD)))):
            late = self._late_of(batch, now)
            if rows := index.used_since(self.rows_of(batch), seen_ms):
                newer.update(rows)
                late = late.union(map(chunk_in.__getitem__, rows))
            count -= len(self.ready.intersection(batch).difference(late))
        for row in sorted(newer, key=index.used_ms.__getitem__):
            self._rows.move_to_end(chunk_in[row])
            seen_ms[row] = index.used_ms[row]

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        mine = self._mine
        if not success and (failed := [mine[key] for key in keys if key in mine]):
            self._change(lambda index: self._free(index, failed))
        rows = list(map(mine.pop, keys, repeat(-1)))
        if -1 in rows:
            keys = [key for key, row in zip(keys, rows, strict=True) if row >= 0]
            rows = [row for row in rows if row >= 0]
        if success and self._left is None:
            self._unpublished.update(zip(keys, rows, strict=True))
            if not self._together.depth and rows:
                self._publish()
        success = success and self._left is None
        self._end_writes(list(keys), success)
        if not success:
            for row in rows:
                self._chunk_in.pop(row, None)
            self._free_list.clear()

    # -- loads

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        ordered = list(keys)
        spec = self._pin(ordered, req_context)
        if spec is None:  # some of them have just left, or all: the load is refused as a whole
            self._unpinned.update(ordered)
            nothing = [0] * len(ordered)
            return NodeRowsSpec(nothing, [NO_STAMP] * len(ordered), nothing)
        return spec

    @override
    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec | None:
        """Pin the rows for a store to a shared tier; None, and nothing is pinned, if some of the chunks have left."""
        rows = list(map(self._unpublished.get, keys, repeat(-1)))
        if self._left is None and -1 not in rows and self._has_place():  # no other engine may touch them yet
            self._index.pin(np.array(rows, np.intp) if len(rows) > node_records.FEW_ROWS else rows, self._place)
            self._begin_reads(keys)
            return CPULoadStoreSpec(rows)
        return self._pin(list(keys), req_context)

    def _pin(self, keys: list[OffloadKey], req_context: ReqContext) -> NodeRowsSpec | None:
        spec: NodeRowsSpec | None = None

        def pin(index: NodeIndex) -> None:
            nonlocal spec
            at = self._rows_at(keys)
            if (at < 0).any() or (found := index.ready_words(at)) is None:
                return
            stamps, checks = found
            if (checks != self._known.check_array[at]).any():  # the picture is wrong
                logger.error("Spillway: rows of the node's CPU tier are not what this engine took them for; seen again")
                self._seen_array[at] = NO_STAMP
                self._see_all_anew()
                return
            index.pin(at, self._place)
            spec = NodeRowsSpec(at, stamps, checks)

        if not self._change(pin) or spec is None:
            return None
        self._begin_reads(keys)
        return spec

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        pinned = keys
        if self._unpinned:
            # If two loads of one chunk were answered differently, the load that ends first counts as the refused one:
            # the other's pin stays.
            pinned = []
            for key in keys:
                if self._unpinned[key] > 0:
                    self._unpinned[key] -= 1
                else:
                    pinned.append(key)
            self._unpinned += Counter()  # without those at 0
        ended = self._end_reads(pinned)
        if not self._has_place():
            pass  # its pins ended with its place, whose pins are another engine's now
        elif self.quarantine:  # a job of before a reset reads the same row
            self._index.unpin([row for row in self.rows_of(ended) if row not in self.quarantine], self._place)
        elif len(ended) > node_records.FEW_ROWS:
            at = self._rows_at(ended)
            self._index.unpin(at[at >= 0], self._place)
        else:
            self._index.unpin(self.rows_of(ended), self._place)
        if self._left is not None:
            for key in self.ready.intersection(pinned).difference(self._readers):
                self._drop(self._rows[key], key)

    # -- resets

    @override
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the rows, without those of chunks that left before they could be pinned."""
        found = list(map(self._rows.get, keys))
        return [row for row in found if row is not None] if None in found else cast("list[int]", found)

    def _rows_at(self, keys: Collection[OffloadKey]) -> RowArray:
        """Return the rows of :meth:`rows_of` as an array; -1 for chunks that left."""
        return np.fromiter(map(self._rows.get, keys, repeat(-1)), np.intp, len(keys))

    @override
    def _rows_in_use(self) -> Counter[int]:
        in_use = Counter(self._mine.values())
        in_use.update({self._rows[key]: count for key, count in self._readers.items() if key in self._rows})
        for key, count in self._unpinned.items():
            # Their jobs release the row of such a chunk too, if another job uses it. If none does, it is not this
            # engine's: another one may write to it at once.
            if (row := self._rows.get(key)) is not None and row in in_use:
                in_use[row] += count
        return in_use

    @override
    def reset_cache(self) -> None:
        """Drop the chunks of this namespace from the node, but for those that other engines read or write: this engine
        takes those for gone."""
        freed: list[OffloadKey] = []

        def free(index: NodeIndex) -> None:
            idle = self.rows_of(key for key in self.ready if key not in self._readers)
            rows = list(filter(index.may_leave, idle))
            freed.extend(self._chunk_in[row] for row in rows)
            rows += self._reserved  # what is claimed from now on has later generations
            self._reserved = []
            self._free(index, rows)
            self._oldest_generation = index.generation

        if not self._change(free):
            self._oldest_generation = self._index.generation
        LruRows._announce(self, self.ready.difference(freed), removed=True)  # gone for this engine alone
        self.ready.intersection_update(freed)  # whose removal is announced
        self._reset_writes.update(self._mine.values())
        self._index.end_holds(self._place)
        super().reset_cache()
        self._free_list.clear()

    @override
    def _drop_all(self) -> int:
        super()._drop_all()
        self._chunk_in.clear()
        self._mine.clear()
        self._unpublished.clear()
        self._unpinned.clear()
        self._foreign.clear()  # what other engines still use will be among them
        self._seen_array[:] = NO_STAMP
        self._see_all_anew()
        return 0

    @override
    def release(self, rows: Iterable[int]) -> None:
        ended: list[int] = []
        for row in rows:
            if row not in self.quarantine:  # of a load that was refused
                continue
            self.quarantine[row] -= 1
            if not self.quarantine[row]:
                del self.quarantine[row]
                ended.append(row)
        if not ended:
            return
        read_again = set(self.rows_of(self._readers))  # weights that have their former name find their chunks
        if self._has_place():
            self._index.unpin([row for row in ended if row not in read_again], self._place)
        written = self._reset_writes.intersection(ended)
        if written:
            self._reset_writes -= written
            self._change(lambda index: index.free(list(written)), followed=False)

    @override
    def shutdown(self) -> None:
        """Close the view. Rows in use are released when the last process of this engine has ended."""
        self._view.release()
        self._node.close()
