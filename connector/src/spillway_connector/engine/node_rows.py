"""The CPU tier in rows that the engines of a node share.

Each engine keeps what it would keep of rows of its own: a dict of chunks in the order of their use, the set of those
that are ready, sessions, what clients asked to retain. It is a picture of the shared index, brought up to date by what
others changed at the start of each step, so a look-up costs what it costs in a private tier. Whatever is then done with
a row is decided by the index, under its lock: who may write to it, who reads it, what it holds. The picture may be
late, the index never is.

A picture that was late is seen when rows are pinned for a load. That load is sent to the ranks nevertheless, with words
that no row has, so they refuse it as they refuse any copy that cannot be made, and the request computes its chunks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, takewhile

import numpy as np
from blake3 import blake3
from typing_extensions import override
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext

from spillway_connector.engine.cpu_tier import LruRows
from spillway_connector.engine.row_checks import NodeRowsSpec
from spillway_connector.errors import TierTimeout
from spillway_connector.node.region import NodeRegion
from spillway_connector.plan.node_index import FREE, NO_STAMP, READY, STATE_BITS, NodeIndex
from spillway_connector.transfer.announcements import Announcement, Announcements

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 0.4  # between two looks for engines that were killed
_REJOIN_SECONDS = 5.0  # between two attempts of an engine that has left, which wait for nothing
STORE_ID_BYTES = 8
_LOOKAHEAD = 32  # of the oldest chunks, those that others may have used since


class NodeRows(LruRows):
    """LruRows over a region of the node. EngineCore process, scheduler thread.

    What sessions, waiting requests and retention say of chunks decides which of them leave for this engine's own
    chunks. Other engines know the chunks' last use alone.
    """

    def __init__(
        self,
        region: NodeRegion,
        namespace: bytes,
        *,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """namespace: 16 bytes; engines share chunks if theirs are equal. Raises HostMemoryError."""
        super().__init__(region.num_rows, region.memory, enable_events=enable_events, clock=clock)
        self._node, self._index = region, region.index
        self._namespace = namespace
        self._seen = np.zeros(region.num_rows, np.uint64)  # the stamps that this picture shows
        self._segments = self._index.new_segments()
        self._version = -1
        self._chunk_in: dict[int, OffloadKey] = {}  # the reverse of _rows
        self._foreign: set[int] = set()  # ready rows of other namespaces, and of before a reset
        self._used_ms: dict[OffloadKey, int] = {}  # when this picture last moved a chunk to the end
        self._mine: set[OffloadKey] = set()  # being written by this engine
        self._unpinned: Counter[OffloadKey] = Counter()  # of loads that will be refused
        self._reset_writes: set[int] = set()  # being written by this engine, of chunks that a reset has dropped
        self._oldest_generation = 0  # what was claimed before it was dropped by a reset
        self._left: str | None = None
        self._may_rejoin = True  # as long as its weights and files are those of the namespace and the node
        self._sweep_at = 0.0
        self._engines: frozenset[int] = frozenset()
        self._store_id = blake3(self._index.identity + namespace).digest(STORE_ID_BYTES)
        self._news = Announcements(clock) if enable_events else None
        self._is_mixed = False  # engines of other namespaces use these rows too, and say nothing of this one's chunks
        self.prepare_read = self._prepare_read
        self._place = region.join(self._now_ms())
        self.sync()
        if self._news is not None:
            self._news.storing(self.ready)  # whoever has computed them may have ended
        logger.info(
            "Spillway: the CPU tier of this node is %s, shared by %d engines; %d of its %d chunks are this namespace's",
            *(region.path, self._index.engines(), len(self._rows), self._num_rows),
        )

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # -- the picture

    @override
    def sync(self) -> None:
        if self._left is not None:
            self._try_to_rejoin()
            return
        if self._clock() >= self._sweep_at:
            self._sweep_at = self._clock() + _SWEEP_SECONDS
            self._change(self._sweep, followed=False)
            before, self._engines = self._engines, self._index.numbers()
            if self._news is not None and before - self._engines:  # whoever has swept them
                self._news.others_ended()
        if self._index.version != self._version and self._left is None:
            self._look()

    def _sweep(self, index: NodeIndex) -> None:
        self._node.require_files()
        index.sweep(self._node.lease.is_held, self._place, self._now_ms())

    def _look(self) -> None:
        self._version = self._index.version
        rows = self._index.changed_rows(self._seen, self._segments)
        if len(rows) > 1:  # the most recently used last
            rows.sort(key=self._index.used_ms.__getitem__)
        found: list[tuple[int, OffloadKey, bool]] = []
        gone: list[OffloadKey] = []
        come: list[OffloadKey] = []
        changed: list[OffloadKey] = []
        for row in rows:  # what has left first: a chunk may have changed its row
            entry, key, is_ready = self._index.entry(row), None, False
            generation = int(self._seen[row]) >> STATE_BITS
            self._foreign.discard(row)
            if entry is None:  # it is changing now: looked at again with the next change
                self._seen[row] = NO_STAMP
            else:
                self._seen[row] = entry.stamp
                is_ready = entry.state == READY
                if entry.state != FREE and entry.namespace == self._namespace:
                    key = OffloadKey(entry.key) if entry.generation > self._oldest_generation else None
                elif entry.state != FREE:
                    self._is_mixed = True
            is_same = entry is not None and entry.generation == generation
            if (before := self._chunk_in.get(row)) is not None and (before != key or not is_same):
                if before in self.ready:
                    gone.append(before)
                changed.append(before)
                self._drop(row, before)
            if key is not None:
                found.append((row, key, is_ready))
            elif is_ready:
                self._foreign.add(row)
        for row, key, is_ready in found:
            if self._rows.setdefault(key, row) != row:  # a second one
                if is_ready:
                    self._foreign.add(row)
                continue
            if row not in self._chunk_in:
                self._chunk_in[row] = key
                self._used_ms[key] = self._index.used_ms[row]
            if is_ready and key not in self.ready:
                self.ready.add(key)
                come.append(key)
            changed.append(key)
        super()._announce(gone, removed=True)
        super()._announce(come, removed=False)
        if self._news is not None and (gone or come):
            (self._news.removed if self._is_mixed else self._news.lost)(gone)
            self._news.gained(come)
        if changed:
            self.changed_chunks.add(changed)

    @override
    def _announce(self, keys: Iterable[OffloadKey], removed: bool) -> None:
        """What this engine has changed itself."""
        super()._announce(changed := list(keys), removed)
        if self._news is not None:
            (self._news.removed if removed else self._news.storing)(changed)

    @property
    @override
    def announces_store(self) -> bool:
        return self._news is not None

    @override
    def take_announcements(self) -> Iterable[Announcement]:
        return () if self._news is None else self._news.take(self._store_id, self._left is None)

    def _drop(self, row: int, key: OffloadKey) -> None:
        del self._chunk_in[row], self._rows[key]
        self._used_ms.pop(key, None)
        self.ready.discard(key)
        self._mine.discard(key)
        self._retention.forget([key])

    def _change(self, change: Callable[[NodeIndex], object], *, followed: bool = True) -> bool:
        """Make a change under the lock, with a picture that is up to date. followed: the change brings the picture up
        to date itself. False: it was not made, and the tier is left."""
        if self._left is not None:
            return False
        try:
            with self._node.changing() as index:
                if index.version != self._version:
                    self._look()
                change(index)
                if followed:
                    self._version = index.version
                    index.skip_changes(self._segments)
        except (OSError, TierTimeout) as error:
            self._leave(str(error), isinstance(error, FileNotFoundError))
            return False
        return True

    def _took(self, rows: Iterable[int]) -> None:
        """This engine has changed these rows itself, and its picture with them."""
        for row in rows:
            self._seen[row] = self._index.stamps[row]

    def _leave(self, why: str, is_gone: bool = False) -> None:
        self._may_rejoin &= not is_gone  # the ranks map the old files
        logger.error(
            "Spillway: this engine leaves the CPU tier of its node and serves without one until %s: %s",
            *("it can be used again" if self._may_rejoin else "it is restarted", why),
        )
        self._left = why
        self._sweep_at = self._clock() + _REJOIN_SECONDS
        idle = self.ready.difference(self._readers)
        super()._announce(idle, removed=True)
        for key in idle:
            self._drop(self._rows[key], key)
        self._foreign.clear()
        self.changed_chunks.add_all()

    def _try_to_rejoin(self) -> None:
        """Use the rows again, if the lock can be had at once and the files are those that this engine's processes map.
        What it still reads or writes has its pins and claims; other claims are released, all else is seen anew."""
        if not self._may_rejoin or self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + _REJOIN_SECONDS
        try:
            with self._node.changing(0.0) as index:
                self._node.require_files()
                writing = self._reset_writes.union(self.rows_of(self._mine))
                ended = [row for row in index.written_by(self._place) if row not in writing]
                index.free(ended)
                used = list(self._chunk_in)
                seen = self._seen[used]
                self._seen[:] = NO_STAMP
                self._seen[used] = seen
                self._segments = index.new_segments()
                self._look()
        except FileNotFoundError as error:
            return self._leave(str(error), is_gone=True)
        except (OSError, TierTimeout):
            return
        logger.warning("Spillway: this engine uses the CPU tier of its node again")
        self._left = None
        self.changed_chunks.add_all()

    @override
    def weights_changed(self) -> None:
        """The other engines' chunks are those of the old weights, and no other engine could use this engine's."""
        self._may_rejoin = False
        if self._left is None:
            self._leave("the weights of its model change")

    # -- counts

    @override
    def used_rows(self) -> int:
        return self._num_rows - self._index.free_rows

    @override
    def free_rows(self) -> int:
        return self._index.free_rows if self._left is None else 0

    # -- stores

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().touch(keys, req_context)
        rows = [row for row in map(self._rows.get, keys) if row is not None]
        if rows and self._left is None:
            now_ms = self._now_ms()
            self._index.use(rows, now_ms)
            self._used_ms.update((self._chunk_in[row], now_ms) for row in rows)

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None = None

        def claim(index: NodeIndex) -> None:
            nonlocal output
            wanted = [key for key in keys if key not in self._rows]
            if len(wanted) > index.free_rows:
                self._make_foreign_room(index, len(wanted) - index.free_rows)
            output = super(NodeRows, self).prepare_store(keys, req_context)
            if output is None or not output.keys_to_store:
                return
            stored = list(output.keys_to_store)
            rows = self.rows_of(stored)
            now_ms = self._now_ms()
            index.claim(rows, self._namespace, stored, self._place, now_ms)
            self._took(rows)
            self._chunk_in.update(zip(rows, stored, strict=True))
            self._used_ms.update(dict.fromkeys(stored, now_ms))
            self._mine.update(stored)

        return output if self._change(claim) else None

    @override
    def _allocate(self, count: int) -> list[int]:
        """Called with the lock; the rows of what was just evicted are in _free_list."""
        evicted, self._free_list = self._free_list, []
        if evicted:
            self._index.free(evicted)
            self._took(evicted)
            for row in evicted:
                self._used_ms.pop(self._chunk_in.pop(row), None)
        found = evicted if len(evicted) == count else self._index.take_free(count)
        assert len(found) == count, f"{count} rows were to be free, {len(found)} are"
        return found

    def _make_foreign_room(self, index: NodeIndex, count: int) -> None:
        """Free rows that this picture does not show: those used before its oldest chunk, and others if it is short."""
        if count <= 0 or not self._foreign:
            return
        rows = np.fromiter(self._foreign, np.intp)
        oldest_first = rows[np.argsort(index.used_ms_array[rows], kind="stable")].tolist()
        if len(self.ready) - len(self._readers) >= count:
            oldest = next((self._used_ms[key] for key in self._rows if key in self.ready), 0)
            oldest_first = list(takewhile(lambda row: index.used_ms[row] <= oldest, oldest_first))
        chosen = list(islice((row for row in oldest_first if not index.is_pinned(row)), count))
        if chosen:
            index.free(chosen)
            self._took(chosen)
            self._foreign.difference_update(chosen)

    @override
    def _evict(self, count: int, protected: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey] | None:
        if count > 0:
            self._follow_others(count)
        return super()._evict(count, protected, req_context)

    def _follow_others(self, count: int) -> None:
        """The oldest chunks that other engines have used since become the youngest."""
        for _ in range(1 + len(self._rows) // (count + _LOOKAHEAD)):
            oldest = list(islice(self._rows.items(), count + _LOOKAHEAD))
            newer = [(key, now) for key, row in oldest if (now := self._index.used_ms[row]) > self._used_ms[key]]
            for key, now in sorted(newer, key=lambda one: one[1]):
                self._rows.move_to_end(key)
                self._used_ms[key] = now
            if len(oldest) - len(newer) >= count:
                return

    @override
    def _all_may_leave(self, batch: Sequence[OffloadKey], kept: AbstractSet[OffloadKey]) -> bool:
        return super()._all_may_leave(batch, kept) and not self._index.any_pinned(self.rows_of(batch))

    @override
    def _may_leave(self, key: OffloadKey, kept: AbstractSet[OffloadKey]) -> bool:
        return super()._may_leave(key, kept) and not self._index.is_pinned(self._rows[key])

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        mine = [key for key in keys if key in self._mine]
        rows = self.rows_of(mine)

        def publish(index: NodeIndex) -> None:
            (index.publish if success else index.free)(rows)
            self._took(rows)

        if not mine:
            return
        done = self._change(publish)
        self._mine.difference_update(mine)
        for row, key in zip(rows, mine, strict=True):
            if not (done and success):
                self._chunk_in.pop(row, None)
                self._used_ms.pop(key, None)
        super().complete_store(mine, req_context, done and success)
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

    def _prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec | None:
        """For a store to a shared tier. None: some of the chunks have left, and nothing is pinned."""
        return self._pin(list(keys), req_context)

    def _pin(self, keys: list[OffloadKey], req_context: ReqContext) -> NodeRowsSpec | None:
        spec: NodeRowsSpec | None = None

        def pin(index: NodeIndex) -> None:
            nonlocal spec
            rows = self.rows_of(keys)
            if self.ready.issuperset(keys) and index.are_ready(rows):
                index.pin(rows, self._place)
                spec = NodeRowsSpec(rows, [index.stamps[row] for row in rows], index.checks(rows))

        if not self._change(pin) or spec is None:
            return None
        super().prepare_load(keys, req_context)
        return spec

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        pinned = list(keys)
        if self._unpinned:
            # If loads of one chunk differ, the one that ends first counts as the refused one: the other's pin stays.
            pinned = []
            for key in keys:
                if self._unpinned[key] > 0:
                    self._unpinned[key] -= 1
                else:
                    pinned.append(key)
            self._unpinned += Counter()  # without those at 0
        super().complete_load(pinned, req_context)
        idle = self.rows_of(key for key in pinned if key not in self._readers)
        if idle:
            self._index.unpin(idle, self._place)
        if self._left is not None:
            for key in self.ready.intersection(pinned).difference(self._readers):
                self._drop(self._rows[key], key)

    # -- resets

    @override
    def rows_of(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Without those of chunks that left before they could be pinned."""
        return [row for row in map(self._rows.get, keys) if row is not None]

    @override
    def _rows_in_use(self) -> Counter[int]:
        in_use = Counter(self.rows_of(self._mine))
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
            rows = [row for row in idle if not index.is_pinned(row)]
            index.free(rows)
            self._took(rows)
            freed.extend(self._chunk_in[row] for row in rows)
            self._oldest_generation = index.generation

        if not self._change(free):
            self._oldest_generation = self._index.generation
        super()._announce(self.ready.difference(freed), removed=True)
        self.ready.intersection_update(freed)  # whose removal is announced
        self._reset_writes.update(self.rows_of(self._mine))
        super().reset_cache()
        self._free_list.clear()

    @override
    def _drop_all(self) -> int:
        super()._drop_all()
        self._chunk_in.clear()
        self._used_ms.clear()
        self._mine.clear()
        self._unpinned.clear()
        self._foreign.clear()  # what other engines still use will be among them
        self._seen[:] = NO_STAMP
        self._segments = self._index.new_segments()
        self._version = -1
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
        self._index.unpin(ended, self._place)
        written = self._reset_writes.intersection(ended)
        if written:
            self._reset_writes -= written
            self._change(lambda index: index.free(list(written)), followed=False)

    @override
    def shutdown(self) -> None:
        """What is under way is released when the last process of this engine has ended."""
        self._view.release()
        self._node.close()
