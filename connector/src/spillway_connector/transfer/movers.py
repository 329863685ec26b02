"""The threads that move items between rows of the CPU tier and a shared tier, through bounce buffers (buffers.py).

A load lands in the bounce buffer, is verified there by the tier, and is copied to its row only while its job still
stands. What a tier has in memory (the page cache) is copied straight to the row and verified there. A store copies its
row to the bounce buffer first. A tier that moves blocks in pieces (Redis) has no bounce buffers: it gets the row for
each piece, while that is copied. So a job can be reported at its deadline whatever its threads are stuck in. Ended
jobs, not items, go back through a deque; all counting happens in the scheduler thread.

xxhash, numpy.copyto and socket and file calls release the GIL on large buffers (slice assignment between memoryviews
does not: 24 ms for 1 GB), so these threads do not hold up the scheduler.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spillway_connector.cut_files import WatchedMapping
from spillway_connector.errors import (
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
    without_frames,
)
from spillway_connector.tiers.buffers import transfer_buffer
from spillway_connector.tiers.tier import (
    BlockInMemory,
    BorrowingTier,
    Clock,
    ReceivingTier,
    SessionTier,
    StoreOutcome,
    Tier,
)
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.calling_thread import STUCK_SECONDS, as_tier_error
from spillway_connector.transfer.jobs import Settled, TransferItem, TransferJob
from spillway_connector.transfer.stats import Operation, SkipReason, TierCounters, Upkeep

_log = logging.getLogger(__name__)

LOST_THREADS_MAX = 4  # lost at a time, in multiples of the threads; each keeps a bounce buffer until its call ends
FAIR_SHARE = 0.5  # of a job's time: if the tier had less for an item, this process may have caused the timeout
DISCARD_SECONDS = 1.0  # for removing an entry that was proven corrupt
_LEFT = {StoreOutcome.PENDING: SkipReason.PENDING, StoreOutcome.NOT_ADMITTED: SkipReason.ADMISSION}
_LOCAL_REASONS = (RefusedReason.RESOURCES, RefusedReason.CLOSED, RefusedReason.QUEUE_AGE, RefusedReason.BREAKER_OPEN)


class LateEnd(NamedTuple):
    """The result of an item that had been given up before."""

    item: TransferItem
    error: TierError | None
    seconds: float
    left: SkipReason | None = None


class _Worker:
    """item: the item that this thread moves now. slot: whether it holds one of the slots of stores. lost: another
    thread has taken its place, and it ends with its call. Written under Movers' lock."""

    __slots__ = ("item", "lost", "slot", "thread")

    def __init__(self) -> None:
        self.item: TransferItem | None = None
        self.slot = False
        self.lost = False
        self.thread: threading.Thread | None = None


class _RowBorrow:
    """The row of an item, until that is given up. See borrow.Borrow."""

    def __init__(
        self, item: TransferItem, row: Callable[[int], npt.NDArray[np.uint8]], are_whole: Callable[[], bool]
    ) -> None:
        self._item = item
        self._row = row
        self._are_whole = are_whole  # the rows
        self._lock = threading.Lock()
        self._users = 0  # threads between begin and end: the stripes of a block may arrive side by side

    def begin(self) -> memoryview | None:
        with self._lock:
            if not self._are_whole() or (not self._users and not self._item.begin_copy()):
                return None
            self._users += 1
        return self._row(self._item.row).data

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._item.undo_copy()


class Movers:
    """Runs at most ``threads`` workers for one tier. ``rows`` are the CPU tier's bytes, row i at ``i * row_bytes``.

    A worker whose call does not end (a hung NFS) is replaced STUCK_SECONDS after its job's deadline.
    """

    def __init__(
        self,
        tier: Tier,
        rows: npt.NDArray[np.uint8],
        *,
        row_bytes: int,
        payload_bytes: int,
        threads: int,
        store_queue_seconds_max: float,
        breakers: Mapping[Operation, Breaker],
        counters: TierCounters,
        clock: Clock,
        progress: Callable[[], None],
    ) -> None:
        self.ended: deque[TransferJob] = deque()  # whose last item a worker has settled
        self.late: deque[LateEnd] = deque()
        self._tier = tier
        self._borrowing = tier if isinstance(tier, BorrowingTier) else None
        self._session_tier = tier if isinstance(tier, SessionTier) else None
        self._receiving = tier if isinstance(tier, ReceivingTier) else None
        self._loaded = 0
        if self._borrowing is not None:
            threads = min(threads, self._borrowing.transfers_at_once or threads)
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._watched = WatchedMapping.at(rows.ctypes.data)  # rows that others can cut
        self._row_bytes = row_bytes
        self._payload_bytes = payload_bytes
        self._store_queue_seconds_max = store_queue_seconds_max
        self._breakers = breakers
        self._counters = counters
        self._clock = clock
        self._progress = progress
        self._stopping = False
        self._look_at = float("-inf")  # for threads that do not come back: none is late before
        self._answered_at = dict.fromkeys(Operation, float("-inf"))  # when the tier last answered
        # A token wakes one worker, which works until there is nothing left for it, and wakes the next one while
        # there is more, so that the scheduler wakes one thread a job. Loads go first, and a thread stays free of
        # stores: loads are waited for, stores are not.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._jobs: dict[Operation, deque[TransferJob]] = {Operation.LOAD: deque(), Operation.STORE: deque()}
        self._pick = threading.Lock()
        self._store_slots = threading.Semaphore(max(1, threads - 1))
        self._threads = threads
        self._started = 0
        self._workers: list[_Worker] = []
        for _ in range(threads):
            self._start_worker()

    # --- scheduler thread -------------------------------------------------------------------------------------------

    def submit(self, job: TransferJob) -> None:
        """Queue the job's items, in order. Constant cost."""
        self.replace_stuck()
        self._jobs[job.operation].append(job)
        self._wake_one()

    def replace_stuck(self) -> None:
        """Start a thread for each one that has not come back long after its job's deadline.

        Each job calls this. It looks at the threads once one of those that were busy at the last look may be late, or
        one that took an item since: the deadline of such an item was still to come.
        """
        now = self._clock()
        if now < self._look_at:
            return
        with self._pick:
            deadlines = {
                worker: item.job.deadline
                for worker in self._workers
                if not worker.lost and (item := worker.item) is not None  # its thread may take it away meanwhile
            }
            self._look_at = min((now, *deadlines.values())) + STUCK_SECONDS
            stuck = [worker for worker, deadline in deadlines.items() if now >= deadline + STUCK_SECONDS]
            room = LOST_THREADS_MAX * self._threads - sum(worker.lost for worker in self._workers)
            stuck = stuck[: max(0, room)]
            for worker in stuck:
                worker.lost = True
                if worker.slot:
                    worker.slot = False
                    self._store_slots.release()
        for _ in stuck:
            self._start_worker()
        if stuck:
            _log.warning(
                "%s: %d I/O threads have not come back %g s after their deadlines; others take their place",
                self._tier.name,
                len(stuck),
                STUCK_SECONDS,
            )
            self._tokens.put(None)  # one that was meant for them may be lost

    def _start_worker(self) -> None:
        worker = _Worker()
        name = f"spillway-{self._tier.name}-{self._started}"
        self._started += 1
        worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        with self._pick:
            self._workers.append(worker)
        worker.thread.start()

    def _wake_one(self) -> None:
        """Wake a worker, unless a token is still in the queue."""
        if not self._tokens.qsize():
            self._tokens.put(None)

    def oldest_store_queued_at(self) -> float | None:
        """Return when the oldest store that waits for a thread was submitted."""
        try:
            return self._jobs[Operation.STORE][0].queued_at
        except IndexError:
            return None

    @property
    def tier_name(self) -> str:
        """The tier's metric label."""
        return self._tier.name

    @property
    def received_chunks(self) -> float:
        """The chunks that have arrived since the start, parts of them included. If the tier cannot tell these apart,
        what its threads are loading counts as a whole."""
        received = None if self._receiving is None else self._receiving.received_bytes
        if received is not None:
            return received / self._payload_bytes
        items = [worker.item for worker in self._workers]
        return self._loaded + sum(item is not None and item.job.operation is Operation.LOAD for item in items)

    def kept_waiting(self, job: TransferJob, begun_at: float | None) -> bool:
        """Whether an item that is not done at its job's deadline waited here, and not for the tier.

        It is so if the tier has answered others since the job came, and had too little time for this one. begun_at:
        when a worker took the item; None: none has.
        """
        if self._answered_at[job.operation] <= job.queued_at:
            return False
        return begun_at is None or job.deadline - begun_at < FAIR_SHARE * (job.deadline - job.queued_at)

    def stop(self) -> None:
        """Ask the threads to end; they may be stuck in calls."""
        self._stopping = True
        for _ in self._workers:
            self._tokens.put(None)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the threads, together at most that long, and drop the reference to the rows.

        A thread that is still stuck holds its own bounce buffer at most; its job is void, so it never touches a row.
        """
        until = time.monotonic() + timeout_seconds
        for worker in list(self._workers):
            if worker.thread is not None:
                worker.thread.join(max(0.0, until - time.monotonic()))
        self._rows = None

    # --- worker threads ---------------------------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        bounce = transfer_buffer(self._payload_bytes) if self._borrowing is None else memoryview(bytearray())
        while True:
            self._tokens.get()
            while not self._stopping and not worker.lost:
                load = self._next(Operation.LOAD, worker)
                if load is not None:
                    self._run(load, bounce)
                elif not self._run_store(worker, bounce):
                    break
            with self._pick:
                worker.item = None
                if worker.lost:
                    self._workers.remove(worker)
            if self._stopping or worker.lost:
                return

    def _run_store(self, worker: _Worker, bounce: memoryview) -> bool:
        """Run one store. Returns False if there is none, or if enough threads are storing: the worker that ends one
        takes the next."""
        if not self._jobs[Operation.STORE] or not self._store_slots.acquire(blocking=False):
            return False
        worker.slot = True
        try:
            store = self._next(Operation.STORE, worker)
            if store is not None:
                self._run(store, bounce)
        finally:
            with self._pick:
                held, worker.slot, worker.item = worker.slot, False, None
            if held:
                self._store_slots.release()
        if self._jobs[Operation.LOAD] and self._jobs[Operation.STORE]:
            self._wake_one()  # a load will keep this thread from the stores
        return store is not None

    def _next(self, operation: Operation, worker: _Worker) -> TransferItem | None:
        jobs = self._jobs[operation]
        if not jobs:
            worker.item = None
            return None
        with self._pick:
            while jobs:
                item = worker.item = jobs[0].take(self._clock())
                if item is not None:
                    self._wake_one()
                    return item
                jobs.popleft()
        return None

    def _run(self, item: TransferItem, bounce: memoryview) -> None:
        begun = self._clock()
        error: TierError | None = None
        outcome: StoreOutcome | None = None
        try:
            if item.job.operation is Operation.LOAD:
                self._load(item, bounce, begun)
            else:
                outcome = self._store(item, bounce, begun)
                if outcome is None:
                    return  # given up meanwhile, before any I/O
        except Exception as raised:
            error = without_frames(as_tier_error(raised))
        ended = self._clock()
        if error is None and item.job.operation is Operation.LOAD:
            with self._pick:
                self._loaded += 1
        left = None if outcome is None else _LEFT.get(outcome)
        settled = item.settle(error, begun, ended, left=left)
        if settled is Settled.LAST:
            self.ended.append(item.job)
        elif settled is Settled.LATE:
            self.late.append(LateEnd(item, error, ended - begun, left))
        self._progress()

    def _load(self, item: TransferItem, bounce: memoryview, now: float) -> None:
        self._pass_breaker(Operation.LOAD)
        try:
            block = self._tier.in_memory(item.key, item.job.deadline)
            if block is not None and self._copy(item, block):
                return
            if self._borrowing is not None:
                self._borrowing.receive(item.key, _RowBorrow(item, self._row, self._rows_are_whole), item.job.deadline)
            else:
                self._tier.load(item.key, bounce, item.job.deadline)
        except TierCorrupt as corrupt:
            self._answered_at[Operation.LOAD] = self._clock()
            self._breakers[Operation.LOAD].record_success()
            self._discard(item.key)
            raise corrupt
        except TierMiss:
            self._answered_at[Operation.LOAD] = self._clock()
            self._breakers[Operation.LOAD].record_success()
            raise
        except Exception as error:
            self._judge(item, error, now)
            raise
        self._answered_at[Operation.LOAD] = self._clock()
        if item.begin_copy():
            if self._borrowing is None:
                np.copyto(self._row(item.row), np.frombuffer(bounce, np.uint8))
            item.end_copy()
            self._breakers[Operation.LOAD].record_success()

    def _copy(self, item: TransferItem, block: BlockInMemory) -> bool:
        """Copy a block from memory straight into the row; False: it was not copied. No I/O while the row is held."""
        if not item.begin_copy():
            return True  # given up
        copied = False
        try:
            copied = block.copy_to(self._row(item.row).data)
        finally:
            (item.end_copy if copied else item.undo_copy)()
        if copied:
            self._answered_at[Operation.LOAD] = self._clock()
            self._breakers[Operation.LOAD].record_success()
        return copied

    def _store(self, item: TransferItem, bounce: memoryview, now: float) -> StoreOutcome | None:
        """Store an item; None: it was given up before anything was done."""
        waited = now - item.job.queued_at
        if waited > self._store_queue_seconds_max:
            raise TierRefused(RefusedReason.QUEUE_AGE, f"waited {waited:.1f} s for a thread")
        self._pass_breaker(Operation.STORE)
        if self._borrowing is None:
            if not item.begin_copy():
                return None
            np.copyto(np.frombuffer(bounce, np.uint8), self._row(item.row))
            item.end_copy()
        elif item.void:
            return None
        if not self._rows_are_whole():
            raise TierRefused(RefusedReason.RESOURCES, "the rows of the CPU tier were cut")
        try:
            if self._borrowing is None:
                outcome = self._store_bounced(item, bounce)
            else:
                borrow = _RowBorrow(item, self._row, self._rows_are_whole)
                outcome = self._borrowing.send(item.key, borrow, item.job.deadline, item.job.tenant)
        except Exception as error:
            self._judge(item, error, now)
            raise
        self._answered_at[Operation.STORE] = self._clock()
        if not item.void:
            self._breakers[Operation.STORE].record_success()
        return outcome

    def _store_bounced(self, item: TransferItem, bounce: memoryview) -> StoreOutcome:
        key, job = item.key, item.job
        if job.session is None or self._session_tier is None:
            return self._tier.store(key, bounce, job.deadline, job.tenant)
        return self._session_tier.store_of_session(
            key, bounce, job.deadline, job.tenant, job.session, own_room=key in job.own_room
        )

    def _pass_breaker(self, operation: Operation) -> None:
        if not self._breakers[operation].allow():
            raise TierRefused(RefusedReason.BREAKER_OPEN, "the tier keeps failing; its circuit breaker is open")

    def _judge(self, item: TransferItem, error: Exception, begun_at: float) -> None:
        """Record a failure of the tier, unless this process caused it.

        Raises TierRefused(QUEUE_AGE) if the item waited too long for a thread.
        """
        if isinstance(error, TierTimeout) and self.kept_waiting(item.job, begun_at):
            raise TierRefused(RefusedReason.QUEUE_AGE, "its deadline passed soon after a thread took it") from error
        local = isinstance(error, TierRefused) and error.reason in _LOCAL_REASONS
        if not local and not item.void:  # a void item's failure was recorded when its job was given up
            self._breakers[item.job.operation].record_failure()

    def _discard(self, key: bytes) -> None:
        try:
            self._tier.discard(key, self._clock() + DISCARD_SECONDS)
        except Exception as error:  # it stays, and stays a counted miss; the load's own error is the one to report
            self._counters.count_failure(Upkeep.DISCARD, as_tier_error(error).reason)

    def _rows_are_whole(self) -> bool:
        return self._watched is None or self._watched.is_whole

    def _row(self, row: int) -> npt.NDArray[np.uint8]:
        assert self._rows is not None
        start = row * self._row_bytes
        return self._rows[start : start + self._payload_bytes]
