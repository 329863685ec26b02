"""A transfer job and its items, shared by the scheduler thread and the workers: which may touch a row, and until when.

The invariant: once a job has been given up, no worker reads or writes its rows. A worker calls `begin_copy` before and
`end_copy` after; giving up succeeds at once unless a copy (memory to memory, at most a few
milliseconds) is under way, and then it succeeds at the next attempt. Nothing is waited for between the two calls.

    load:   QUEUED -> (tier to bounce buffer, verified) -> COPYING -> COPIED -> SETTLED
            QUEUED -> COPYING (from memory, verified in the row) -> COPIED -> SETTLED, or back to QUEUED
            QUEUED -> COPYING (a piece that has arrived) -> QUEUED, for each piece; all verified -> COPIED -> SETTLED
    store:  QUEUED -> COPYING -> COPIED -> (bounce buffer to tier) -> SETTLED
            QUEUED -> COPYING (a piece, to the tier) -> QUEUED, for each piece -> SETTLED
    both:   QUEUED or COPIED -> VOID when the job is given up

A job is two lists and a byte per item, and workers settle items in it, so that submitting a job and taking in its end
cost the scheduler the same for any size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import compress, filterfalse
from typing import NamedTuple

from spillway_connector.errors import TierError
from spillway_connector.tiers.tier import NO_TENANT
from spillway_connector.transfer.stats import Operation, SkipReason

ARRIVALS_REPORTED_FROM = 0.25  # of a job: no early load starts with less
ARRIVALS_REPORTED_PARTS = 8  # the most reports for one job before its end


class ItemState(IntEnum):
    QUEUED = 0
    COPYING = 1
    COPIED = 2  # the row is no longer needed, the outcome not known yet
    SETTLED = 3
    VOID = 4


_IS_SETTLED = ItemState.SETTLED.value.__eq__  # of a byte, without a step of Python's


class Settled(Enum):
    """The state of the job after an item was settled. LATE: the item had been given up."""

    MORE = "more"
    LAST = "last"
    LATE = "late"


class Behind(NamedTuple):
    """The chunks, parts of them included, that the tier had delivered when a load was given up, and the seconds that it
    took."""

    chunks: float
    seconds: float


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of one job. ``done``: keys stored or loaded; ``failed`` has the other items, each with its error.

    ``moved``: how many of ``done`` were moved by this job; the others were there already.
    """

    job_id: int
    operation: Operation
    done: tuple[bytes, ...]
    failed: dict[bytes, TierError]
    seconds: float = 0.0  # from the submission to the last key that was moved; 0: none was
    moved: int = 0
    behind: Behind | None = None  # of a load that was given up because computing had overtaken it

    @property
    def success(self) -> bool:
        return not self.failed


@dataclass(slots=True, eq=False)
class TransferItem:
    """One key and its row, taken by a worker."""

    job: TransferJob
    index: int

    @property
    def key(self) -> bytes:
        return self.job.keys[self.index]

    @property
    def row(self) -> int:
        return self.job.rows[self.index]

    def begin_copy(self) -> bool:
        """Worker: whether the row may be touched now; then end_copy must follow within milliseconds."""
        with self.job.lock:
            if self.job.states[self.index] != ItemState.QUEUED:
                return False
            self.job.states[self.index] = ItemState.COPYING
            return True

    def end_copy(self) -> None:
        """Worker: the row will not be touched again."""
        with self.job.lock:
            self.job.states[self.index] = ItemState.COPIED

    def undo_copy(self) -> None:
        """Worker: the row has not got its bytes, and will not be touched before begin_copy is called again."""
        with self.job.lock:
            self.job.states[self.index] = ItemState.QUEUED

    @property
    def void(self) -> bool:
        return self.job.states[self.index] == ItemState.VOID

    def settle(
        self, error: TierError | None, begun_at: float, ended_at: float, *, left: SkipReason | None = None
    ) -> Settled:
        """Worker: record the item's result and its time span. Called once per item, last. left: why it was not stored,
        though nothing failed."""
        job = self.job
        with job.lock:
            if job.states[self.index] == ItemState.VOID:
                return Settled.LATE
            job.busy_seconds += ended_at - begun_at
            if left is not None:
                job.left[self.index] = left
            elif error is None:
                job.last_moved_at = max(ended_at, job.last_moved_at or 0.0)
            else:
                job.errors[self.index] = error
            job.states[self.index] = ItemState.SETTLED
            job.open_items -= 1
            return Settled.MORE if job.open_items else Settled.LAST


@dataclass(slots=True, eq=False)
class TransferJob:
    """``states`` to ``last_moved_at`` are written under a lock, the movers' (``taken``) or the job's; the rest is the
    scheduler thread's, and so is reading any of it once ``open_items`` is 0."""

    job_id: int
    operation: Operation
    queued_at: float
    deadline: float
    tenant: bytes = NO_TENANT
    session: bytes | None = None  # of a store: see SessionTier.store_of_session
    hand_over: bool = False  # of a store: announced when it has ended
    own_room: frozenset[bytes] = frozenset()  # keys that are stored in place of the same tenant's alone
    keys: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    states: bytearray = field(default_factory=bytearray)
    taken: int = 0  # items that workers have taken, from the front
    begun_at: dict[int, float] = field(default_factory=dict)  # when, by index
    open_items: int = 0
    errors: dict[int, TierError] = field(default_factory=dict)  # by index
    left: dict[int, SkipReason] = field(default_factory=dict)  # stores that were not done, by index
    busy_seconds: float = 0.0  # of the workers
    last_moved_at: float | None = None
    done: list[bytes] = field(default_factory=list)
    failed: dict[bytes, TierError] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    arrivals_reported: set[int] = field(default_factory=set)  # indices
    open_items_reported: int = 0
    received_before: float = 0.0  # of a load: chunks that the tier had given when it was submitted
    behind: Behind | None = None

    def fill(self, keys: list[bytes], rows: list[int]) -> None:
        """Set the chunks to move; once, before any worker sees the job."""
        self.keys, self.rows, self.states = keys, rows, bytearray(len(keys))
        self.open_items = self.open_items_reported = len(keys)

    def take(self, now: float) -> TransferItem | None:
        """Movers: the next item that has not been given up; None when there is none left."""
        while self.taken < len(self.keys):
            index = self.taken
            self.taken += 1
            if self.states[index] == ItemState.QUEUED:
                self.begun_at[index] = now
                return TransferItem(self, index)
        return None

    def moved(self) -> list[bytes]:
        """Scheduler: the keys that were stored or loaded, once ``open_items`` is 0."""
        if not self.errors and not self.left and ItemState.VOID not in self.states:
            return self.keys
        return [
            key
            for index, (key, state) in enumerate(zip(self.keys, self.states, strict=True))
            if state == ItemState.SETTLED and index not in self.errors and index not in self.left
        ]

    def take_arrived(self) -> list[bytes]:
        """Scheduler: the keys that were moved since the last call, in order. Never blocks.

        First when a quarter of the job has ended, then by eighths: each report costs scheduler time. Keys not returned
        by the last call before the job's end are in :meth:`moved`.
        """
        items, ended = len(self.keys), self.open_items_reported - self.open_items
        settled = items - self.open_items
        if not ended or ended < items // ARRIVALS_REPORTED_PARTS or settled < items * ARRIVALS_REPORTED_FROM:
            return []
        if not self.lock.acquire(blocking=False):
            return []
        try:
            self.open_items_reported = self.open_items
            settled_ones = compress(range(items), map(_IS_SETTLED, self.states))
            unreported = filterfalse(self.arrivals_reported.__contains__, settled_ones)
            arrived = list(filterfalse(self.errors.__contains__, unreported))
        finally:
            self.lock.release()
        self.arrivals_reported.update(arrived)
        return list(map(self.keys.__getitem__, arrived))

    def give_up(self, error_of: Callable[[int], TierError]) -> dict[bytes, TierError]:
        """Scheduler: void every item that no worker is copying or has loaded. Never blocks.

        error_of: why, by the item's index. Returns the keys voided by this call, each with its error; the job can be
        reported once ``open_items`` is 0.
        """
        if not self.lock.acquire(blocking=False):
            return {}  # a worker is between two states; the next poll retries
        voided: dict[bytes, TierError] = {}
        try:
            for index, state in enumerate(self.states):
                # A loaded item is COPIED and about to be settled: its bytes are good, so it stays.
                if state == ItemState.QUEUED or (state == ItemState.COPIED and self.operation is Operation.STORE):
                    self.states[index] = ItemState.VOID
                    voided[self.keys[index]] = error_of(index)
            self.open_items -= len(voided)
        finally:
            self.lock.release()
        self.failed.update(voided)
        return voided

    def outcome(self) -> JobOutcome:
        seconds = self.last_moved_at - self.queued_at if self.last_moved_at is not None else 0.0
        moved = len(self.moved()) if self.last_moved_at is not None else 0
        return JobOutcome(self.job_id, self.operation, tuple(self.done), self.failed, seconds, moved, self.behind)


def check_shape(keys: Sequence[bytes], rows: Sequence[int], rows_total: int) -> None:
    """Raises ValueError when keys and rows do not pair up within the region: a defect of the caller."""
    if len(keys) != len(rows):
        raise ValueError(f"{len(keys)} keys for {len(rows)} rows")
    if rows and (min(rows) < 0 or max(rows) >= rows_total):
        raise ValueError(f"rows {min(rows)} to {max(rows)} are not all within 0..{rows_total - 1}")
