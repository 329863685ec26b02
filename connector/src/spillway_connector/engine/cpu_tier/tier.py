"""The CPU tier as the tiering manager sees it: which chunk is in which row, for whole prefixes at once.

vLLM's manager keeps one object per row and walks them in Python, several times per request and step. Here a row is
a number, a pin an entry of a dict, and "which of these are ready" one set operation. The room of a generation of vLLM
completes these classes: answers of a lookup, media of events.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.duplicates import Duplicates
from spillway_connector.plan.holds import Holds
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.plan.waiting import WaitingChunks
from spillway_connector.transfer.announcements import Announcement, Announcements

_NOTHING = nullcontext()


class CpuTier(OffloadingManager):
    """The methods that the tiering manager needs beyond vLLM's OffloadingManager.

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
        """Evict chunks that the device holds too before all others, except for those that gone sessions have left."""
        self._duplicates = duplicates

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec | None:
        return self.prepare_load(keys, req_context)

    def will_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Learn the chunks, in the order of the prefix, that are stored once the device gives them up."""

    def sync(self) -> None:
        """Learn what others have changed in rows that are shared, before what a step asks."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context: at its end, the stores that were completed within it are announced all at once to the
        engines that share the rows."""
        return _NOTHING

    def weights_changed(self) -> None:
        """The model's weights change: chunks that this engine shares with others then belong to other weights."""

    def use_namespace(self, namespace: bytes) -> None:
        """The weights that changed have a name: engines whose namespaces are equal share chunks again."""

    def take_announcements(self) -> Iterable[Announcement]:
        """Return what to announce about shared rows, once per step. `take_events` then serves vLLM's own bookkeeping
        alone."""
        return ()

    @property
    def is_joined(self) -> bool | None:
        """Whether these rows, which others share, can be used; None for rows of one's own."""
        return None

    def has_room(self, count: int) -> bool:
        """Whether so many chunks can be added without evicting one that a session may use again."""
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
        """Return the number of sessions that have ended since the last call."""
        return 0

    def retire(self, keys: Iterable[OffloadKey]) -> None:
        """Make these chunks leave first, because no request came for them. A policy that tells chunks used once from
        others ignores it."""

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
        """Drop all chunks, ready or not. Returns how many rows have ever been handed out; they are the first ones."""

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
