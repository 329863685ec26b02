"""An engine's picture of the rows that the engines of a node share.

It is brought up to date by what others changed at the start of each step, and before each change of this engine's own,
under the lock of the index. An engine that cannot have the lock leaves the rows, and comes back when it can.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import numpy as np
from blake3 import blake3
from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey

from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.errors import TierTimeout
from spillway_connector.node.region import NodeRegion, RegionGone
from spillway_connector.plan import node_records
from spillway_connector.plan.foreign_rows import ForeignRows
from spillway_connector.plan.holds import Holds
from spillway_connector.plan.node_index import NO_STAMP, PLACE, READY, NodeIndex
from spillway_connector.plan.node_records import STATE_BITS, RowWords
from spillway_connector.transfer.announcements import Announcement, Announcements

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 0.4  # between two looks for engines that were killed
_REJOIN_SECONDS = 5.0  # between two attempts of an engine that has left, which wait for nothing
STORE_ID_BYTES = 8


class NodePicture(LruRows):
    """The state of the rows as this engine knows it, and its changes to them. EngineCore process, scheduler thread."""

    def __init__(
        self,
        region: NodeRegion,
        namespace: bytes,
        *,
        floor_share: float = 0.0,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the engines of the node.

        Args:
            region: The rows.
            namespace: 16 bytes; engines share chunks if theirs are equal.
            floor_share: The part of all rows that each namespace keeps when this one wants rows.
            enable_events: Whether what changes is announced.
            clock: In seconds, the same for all engines of the node.

        Raises:
            HostMemoryError: The region cannot be joined.
        """
        super().__init__(region.num_rows, region.memory, enable_events=enable_events, clock=clock)
        self._node, self._index = region, region.index
        self._holds = Holds(region.num_rows, self._hold_ended)
        self._namespace = namespace
        self._known = known = RowWords(region.num_rows)
        self._seen_array, self._used_array = known.seen_array, known.used_array
        self._seen, self._used_ms, self._checks = known.seen, known.used_ms, known.checks
        self._counts = self._index.counts
        self._version = bytearray(self._counts)  # the changes that this picture shows
        self._version_words = memoryview(self._version).cast("Q")
        self._chunk_in: dict[int, OffloadKey] = {}  # the reverse of _rows
        self._foreign = ForeignRows(namespace, region.num_rows, floor_share)  # and those of before a reset
        self._floor_share = floor_share
        self._mine: dict[OffloadKey, int] = {}  # being written by this engine, and their rows
        self._reserved: list[int] = []  # rows for the next chunks of this engine
        self._unpublished: dict[OffloadKey, int] = {}  # written by this engine, and their rows
        self._together = _Together(self)
        self._unpinned: Counter[OffloadKey] = Counter()  # of loads that will be refused
        self._reset_writes: set[int] = set()  # being written by this engine, of chunks that a reset has dropped
        self._oldest_generation = 0  # what was claimed before it was dropped by a reset
        self._left: str | None = None
        self._files_are_gone = False  # the ranks map files that are not those of the node any more
        self._weights_changed = False  # and have not been named since
        self._sweep_at = 0.0
        self._lost_rows: list[int] = []  # rows that looked so before the last sweep
        self._engines: frozenset[int] = frozenset()
        self._store_id = self._store_of(namespace)
        self.news = Announcements(clock) if enable_events else None
        self._any_held = False  # by any engine, at this engine's last change
        self._is_mixed = False  # engines of other namespaces use these rows too, and say nothing of this one's chunks
        self._place = region.join(self._now_ms)
        self._place_words, self._joined = self._index.place_words(self._place), PLACE.pack(region.lease.number, 0)
        self._see_all_anew()
        self.sync()
        if self.news is not None:
            self.news.storing(self.ready)  # whoever has computed them may have ended
        logger.info(
            "Spillway: the CPU tier of this node is %s, shared by %d engines; %d of its %d chunks are this namespace's",
            *(region.path, self._index.engines(), len(self._rows), self._num_rows),
        )

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    @override
    def sync(self) -> None:
        if self._left is not None:
            self._try_to_rejoin()
            return
        if (now := self._clock()) >= self._sweep_at:
            self._sweep_at = now + _SWEEP_SECONDS
            self._lost_rows = self._index.lost(self._place)
            self._change(self._sweep, followed=False)
            before, self._engines = self._engines, self._index.numbers()
            if before != self._engines:  # each engine's clients hold shares of its part of the rows
                self._holds.resize(self._num_rows // max(1, len(self._engines)), now)
            if self.news is not None and before - self._engines:  # whoever has swept them
                self.news.others_ended()
        if self._left is None:
            self._see_changes()

    def _sweep(self, index: NodeIndex) -> None:
        self._node.require_files()
        self._node.sweep(self._place, self._now_ms())
        if self._lost_rows:
            own = self._own_rows()
            if freed := index.free_lost([row for row in self._lost_rows if row not in own], self._place):
                logger.error("Spillway: %d rows of the node's CPU tier were damaged; they are free again", freed)

    def _has_place(self) -> bool:
        """Whether no engine has taken this one for dead, which may give its place to another one."""
        return self._place_words.tobytes() == self._joined

    def _own_rows(self) -> set[int]:
        """Return the rows that this engine has reserved or writes."""
        return self._reset_writes.union(self._mine.values(), self._reserved)

    def _see_all_anew(self) -> None:
        """Let the next look count every row as changed since the last one."""
        self._version[:] = b"\xff" * len(self._version)
        self._segments = self._index.new_segments()

    def _see_changes(self) -> None:
        if self._counts.tobytes() != self._version:
            self._look()

    def _look(self) -> None:
        self._version[:] = self._counts.tobytes()
        rows = self._index.changed_rows(self._seen_array, self._segments)
        if len(rows) > 1:  # the most recently used last
            rows.sort(key=self._index.used_ms.__getitem__)
        found: list[tuple[int, OffloadKey, bool]] = []
        gone: list[OffloadKey] = []
        come: list[OffloadKey] = []
        changed: list[OffloadKey] = []
        for row in rows:  # what has left first: a chunk may have changed its row
            entry, key, is_ready = self._index.entry(row), None, False
            generation = self._seen[row] >> STATE_BITS
            self._foreign.discard(row)
            before = self._chunk_in.get(row)
            if entry is None and (before in self._readers or before in self._mine):
                self._seen[row] = NO_STAMP  # damaged: it is this engine's until its copies have ended
                continue
            if entry is None:  # it is changing now: looked at again with the next change
                self._seen[row] = NO_STAMP
            else:
                self._seen[row], self._checks[row] = entry.stamp, entry.check
                is_ready = entry.state == READY
                if entry.namespace == self._namespace:
                    key = OffloadKey(entry.key) if entry.generation > self._oldest_generation else None
                elif entry.namespace:
                    self._is_mixed = True
            is_same = entry is not None and entry.generation == generation
            if before is not None and (before != key or not is_same):
                if before in self.ready:
                    gone.append(before)
                changed.append(before)
                self._drop(row, before)
            if key is not None:
                found.append((row, key, is_ready))
            elif is_ready and entry is not None:
                self._foreign.add(row, entry.namespace)
        for row, key, is_ready in found:
            if self._rows.setdefault(key, row) != row:  # a second one
                if is_ready:
                    self._foreign.add(row, self._namespace)
                continue
            if row not in self._chunk_in:
                self._chunk_in[row] = key
                self._used_ms[row] = self._index.used_ms[row]
                if self._holds:
                    self._show_holds([key])
            if is_ready and key not in self.ready:
                self.ready.add(key)
                come.append(key)
            changed.append(key)
        super()._announce(gone, removed=True)
        super()._announce(come, removed=False)
        if self.news is not None and (gone or come):
            (self.news.removed if self._is_mixed else self.news.lost)(gone)
            self.news.gained(come)
        if changed:
            self.changed_chunks.add(changed)

    @override
    def _announce(self, keys: Iterable[OffloadKey], removed: bool) -> None:
        """Announce the rows that this engine has changed itself."""
        if self.news is not None:
            super()._announce(changed := list(keys), removed)
            (self.news.removed if removed else self.news.storing)(changed)

    @override
    def take_announcements(self) -> Iterable[Announcement]:
        return () if self.news is None else self.news.take(self._store_id, self._left is None)

    def _drop(self, row: int, key: OffloadKey) -> None:
        del self._chunk_in[row], self._rows[key]
        if self._holds:
            self._index.hold([row], self._place, 0)
        self.ready.discard(key)
        self._mine.pop(key, None)
        self._unpublished.pop(key, None)
        self._retention.forget([key])

    def _change(self, change: Callable[[NodeIndex], object], *, followed: bool = True) -> bool:
        """Make a change under the lock, with a picture that is up to date. followed: the change brings the picture up
        to date itself. False: it was not made, and the tier is left."""
        if self._left is not None:
            return False
        try:
            index = self._node.change()
            try:
                if not self._has_place():
                    raise RegionGone("another engine has taken this one for dead")
                self._see_changes()
                if self._unpublished:
                    self._publish()
                if self._left is None:
                    change(index)
                if followed:
                    self._version_words[0] = self._counts[0]
                index.end()
            finally:
                self._node.changed()
        except (OSError, TierTimeout) as error:
            self._leave(str(error), isinstance(error, FileNotFoundError))
        except Exception:
            if self._node.is_whole:
                raise
            self._leave(f"a file in {self._node.path} was cut or overwritten", is_gone=True)
        return self._left is None

    def _show_holds(self, keys: Iterable[OffloadKey]) -> None:
        """Show every engine until when this one holds these resident chunks."""
        for key in keys:
            self._index.hold([self._rows[key]], self._place, math.ceil(self._holds.held_until(key)))

    def _hold_ended(self, key: OffloadKey) -> None:
        if (row := self._rows.get(key)) is not None:
            self._index.hold([row], self._place, 0)

    def _free(self, index: NodeIndex, rows: list[int]) -> None:
        for row, stamp in zip(rows, index.free(rows), strict=True):
            self._seen[row] = stamp

    def _publish(self) -> None:
        """Make the rows that this engine has written available to all engines. No lock: until now the rows are this
        engine's alone."""
        rows, self._unpublished = list(self._unpublished.values()), {}
        place = self._place
        if len(rows) > node_records.FEW_ROWS:
            is_published = self._index.publish_many(np.array(rows, np.intp), self._known, place)
        else:
            is_published = self._index.publish(rows, self._known, place)
        if is_published:
            self._version_words[1 + place] = self._counts[1 + place]
        else:
            self._leave_changed_rows()

    def _leave_changed_rows(self) -> None:
        try:
            self._node.require_files()
            self._leave("rows that it was writing have changed")
        except OSError as error:
            self._leave(str(error), is_gone=True)

    @override
    def together(self) -> AbstractContextManager[None]:
        return self._together

    def _leave(self, why: str, is_gone: bool = False) -> None:
        self._files_are_gone |= is_gone
        until = "its weights have a name" if self._weights_changed else "it can be used again"
        logger.error(
            "Spillway: this engine leaves the CPU tier of its node and serves without one until %s: %s",
            *("it is restarted" if self._files_are_gone else until, why),
        )
        self._left = why
        self._sweep_at = self._clock() + _REJOIN_SECONDS
        idle = self.ready.difference(self._readers)
        super()._announce(idle, removed=True)
        for key in idle:
            self._drop(self._rows[key], key)
        self._foreign.clear()
        self._reserved = []
        self.changed_chunks.add_all()

    def _try_to_rejoin(self) -> None:
        """Use the rows again, if the lock can be had at once and the files are those that this engine's processes map.
        Rows that it still reads or writes keep their pins and claims; its other claims are released, and all other rows
        are read again."""
        if self._files_are_gone or self._weights_changed or self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + _REJOIN_SECONDS
        try:
            with self._node.changing(0.0) as index:
                self._node.require_files()
                if self._unpublished:
                    self._publish()
                    if self._files_are_gone:
                        return
                own = self._own_rows()
                index.free([row for row in index.owned_by(self._place) if row not in own])
                used = list(self._chunk_in)
                seen = self._seen_array[used]
                self._seen_array[:] = NO_STAMP
                self._seen_array[used] = seen
                self._see_all_anew()
                self._look()
        except FileNotFoundError as error:
            return self._leave(str(error), is_gone=True)
        except (OSError, TierTimeout):
            return
        logger.warning("Spillway: this engine uses the CPU tier of its node again")
        self._left, self._sweep_at = None, self._clock()
        self.changed_chunks.add_all()

    @property
    @override
    def is_joined(self) -> bool:
        return self._left is None

    @override
    def weights_changed(self) -> None:
        """The other engines' chunks are those of the old weights, and no other engine could use this engine's."""
        self._weights_changed = True
        self._index.end_holds(self._place)
        if self._left is None:
            self._leave("the weights of its model change")

    @override
    def use_namespace(self, namespace: bytes) -> None:
        """Rows of the former namespace stay for the engines that use them. Unused ones are evicted as usual."""
        assert self._weights_changed, "weights are named after they have changed"
        self._weights_changed = False
        self._namespace, self._store_id = namespace, self._store_of(namespace)
        self._foreign = ForeignRows(namespace, self._num_rows, self._floor_share)
        self._oldest_generation = 0  # a reset concerned the former weights
        self._is_mixed = True
        if self.news is not None:
            self.news = self.news.successor()
        self._sweep_at = self._clock()
        self._try_to_rejoin()
        if self.news is not None:
            self.news.storing(self.ready)

    def _store_of(self, namespace: bytes) -> bytes:
        return blake3(self._index.identity + namespace).digest(STORE_ID_BYTES)


class _Together(AbstractContextManager[None]):
    """Rows that are completed within the context are published at the end of the outermost one."""

    def __init__(self, picture: NodePicture) -> None:
        self._picture = picture
        self.depth = 0

    @override
    def __enter__(self) -> None:
        self.depth += 1

    @override
    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth and (picture := self._picture)._unpublished and picture._left is None:
            picture._publish()
