"""A transfer job and its items, shared by the scheduler thread and the workers: who may touch a row, and until when.

The one promise: once a job has been given up, no worker reads or writes its rows. A worker asks :meth:`begin_copy`
first and says :meth:`end_copy` after; giving up succeeds at once unless a copy (memory to memory, at most a few
milliseconds) is under way, and then it succeeds at the next attempt. I/O never happens between the two calls.

    load:   QUEUED -> (tier to bounce buffer, verified) -> COPYING -> SETTLED
    store:  QUEUED -> COPYING -> COPIED -> (bounce buffer to tier) -> SETTLED
    both:   QUEUED or COPIED -> DEAD when the job is given up
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from spillway_connector.errors import TierError
from spillway_connector.tiers.stats import Operation


class ItemState(Enum):
    QUEUED = auto()
    COPYING = auto()
    COPIED = auto()  # the row is no longer needed, the outcome not known yet
    SETTLED = auto()
    DEAD = auto()


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one job. ``done``: keys stored or loaded; ``failed``: the others, each with its error."""

    job_id: int
    operation: Operation
    done: tuple[bytes, ...]
    failed: dict[bytes, TierError]
    seconds: float = 0.0  # from the submission to the last key that was moved, whenever that is told; 0: none was

    @property
    def success(self) -> bool:
        return not self.failed


@dataclass(slots=True, eq=False)
class TransferItem:
    """One key and its row."""

    job: TransferJob
    key: bytes
    row: int
    state: ItemState = ItemState.QUEUED

    def begin_copy(self) -> bool:
        """Worker: may the row be touched now? If so, end_copy must follow, soon."""
        with self.job.lock:
            if self.state is not ItemState.QUEUED:
                return False
            self.state = ItemState.COPYING
            return True

    def end_copy(self) -> None:
        """Worker: the row will not be touched again."""
        with self.job.lock:
            self.state = ItemState.COPIED

    @property
    def dead(self) -> bool:
        return self.state is ItemState.DEAD


@dataclass(slots=True, eq=False)
class TransferJob:
    """The scheduler thread owns everything but the states of items, which ``lock`` guards."""

    job_id: int
    operation: Operation
    queued_at: float
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    items: list[TransferItem] = field(default_factory=list)
    open_items: int = 0
    done: list[bytes] = field(default_factory=list)
    failed: dict[bytes, TierError] = field(default_factory=dict)
    last_moved_at: float | None = None

    def add(self, key: bytes, row: int) -> TransferItem:
        item = TransferItem(self, key, row)
        self.items.append(item)
        self.open_items += 1
        return item

    def settle(self, item: TransferItem, error: TierError | None) -> bool:
        """Scheduler: take in a worker's report. False when the item had been given up: the report is void."""
        with self.lock:
            if item.state in (ItemState.DEAD, ItemState.SETTLED):
                return False
            item.state = ItemState.SETTLED
        self.open_items -= 1
        if error is None:
            self.done.append(item.key)
        else:
            self.failed[item.key] = error
        return True

    def give_up(self, error: TierError) -> list[TransferItem]:
        """Scheduler: void every item that no worker is copying or has loaded. Never blocks.

        Returns the items voided by this call; the job can be reported once ``open_items`` is 0.
        """
        if not self.lock.acquire(blocking=False):
            return []  # a worker is between two states; the next poll will do
        voided = []
        try:
            for item in self.items:
                voidable = item.state is ItemState.QUEUED or (
                    # A loaded item is COPIED with its report on the way: it is good, let it arrive.
                    item.state is ItemState.COPIED and self.operation is Operation.STORE
                )
                if voidable:
                    item.state = ItemState.DEAD
                    self.failed[item.key] = error
                    self.open_items -= 1
                    voided.append(item)
        finally:
            self.lock.release()
        return voided

    def outcome(self) -> JobOutcome:
        seconds = self.last_moved_at - self.queued_at if self.last_moved_at is not None else 0.0
        return JobOutcome(self.job_id, self.operation, tuple(self.done), self.failed, seconds)


def check_shape(keys: Sequence[bytes], rows: Sequence[int], rows_total: int) -> None:
    """Raises ValueError when keys and rows do not pair up within the region: a defect of the caller."""
    if len(keys) != len(rows):
        raise ValueError(f"{len(keys)} keys for {len(rows)} rows")
    for row in rows:
        if not 0 <= row < rows_total:
            raise ValueError(f"row {row} is outside 0..{rows_total - 1}")
