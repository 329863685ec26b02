"""Copies what a shared tier is about to evict into the tier below it.

What that is, the tier cannot say ahead, and a server evicts by itself. So chunks are copied once they have been idle
for a while, and a tenth of that while the tier above evicts (plan/idle_chunks.py has the order). They are read without
being used, so the tier above still evicts them first. Nothing waits for a demotion; one that comes too late costs a
hit.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

from spillway_connector.errors import TierCorrupt, TierMiss, TierPartlyAsked
from spillway_connector.plan.idle_chunks import IdleChunk, IdleChunks
from spillway_connector.tiers.buffers import transfer_buffer
from spillway_connector.tiers.tier import Clock, PeekableTier, StoreOutcome, Tier
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.calling_thread import Call, CallingThread, as_tier_error
from spillway_connector.transfer.stats import Operation, TierCounters, Upkeep

_log = logging.getLogger(__name__)

PRESSED_SHARE = 0.1  # of idle_seconds, while the tier above evicts
BATCH_CHUNKS = 32  # asked for, and then copied one after the other
WAIT_SECONDS = 1.0  # between two looks at what is idle
KNOWN_CHUNKS_MAX = 262_144  # of one engine; some 60 MB


class DemotionOutcome(StrEnum):
    """The outcome for a chunk that was idle."""

    STORED = "stored"
    PRESENT = "present"  # in the tier below already
    LOST = "lost"  # the tier above had evicted it, or could not give it
    FAILED = "failed"  # the tier below did not take it; it is tried again
    FORGOTTEN = "forgotten"  # too many were known


class Demotions:
    """Threads that copy idle chunks of ``above`` into ``below``.

    Args:
        above: the tier that chunks leave.
        below: the tier that takes them.
        idle_seconds: without a use, after which a chunk is copied.
        threads: the number of threads that copy, each with a buffer of one chunk.
        lookup_seconds, store_seconds: deadlines of single calls of the tiers.
        breaker: the breaker of stores to ``below``.
        counters: the counters of both tiers, in this order.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        above: Tier,
        below: Tier,
        *,
        idle_seconds: float,
        threads: int,
        lookup_seconds: float,
        store_seconds: float,
        breaker: Breaker,
        counters: tuple[TierCounters, TierCounters],
        clock: Clock,
    ) -> None:
        self._above, self._below = above, below
        self._read: Callable[[bytes, memoryview, float], None] = (
            above.peek if isinstance(above, PeekableTier) else above.load
        )
        self._idle_seconds = idle_seconds
        self._lookup_seconds, self._store_seconds = lookup_seconds, store_seconds
        self._breaker = breaker
        self._counters_above, self._counters_below = counters
        self._clock = clock
        self._lock = threading.Lock()  # of the five below
        self._idle = IdleChunks(KNOWN_CHUNKS_MAX)
        self._storing: dict[bytes, int] = {}  # the job that stores a chunk above
        self._keys_of: dict[int, Sequence[bytes]] = {}  # of these jobs
        self._outcomes: Counter[DemotionOutcome] = Counter()
        self._closed = threading.Event()
        self._stored: deque[bytes] = deque()
        name = f"spillway-{below.name}-below"
        self._threads = [CallingThread(f"{name}-{number}", self._work) for number in range(threads)]

    # --- scheduler thread -------------------------------------------------------------------------------------------

    def add(self, keys: Sequence[bytes], tenant: bytes) -> None:
        """The tier above holds these chunks of one prefix."""
        with self._lock:
            self._idle.add(keys, tenant, self._clock())

    def begin_store(self, job_id: int, keys: Sequence[bytes], tenant: bytes) -> None:
        """The tier above will hold these chunks. They may be idle before it does, and before end_store says so: an
        engine without requests takes no step in which it would."""
        with self._lock:
            self._idle.add(keys, tenant, self._clock())
            self._storing.update(dict.fromkeys(keys, job_id))
            self._keys_of[job_id] = keys

    def end_store(self, job_id: int, failed: Collection[bytes]) -> None:
        """The job is over, and the tier above has its chunks but those that failed."""
        with self._lock:
            for key in self._keys_of.pop(job_id, ()):
                if self._storing.get(key) == job_id:
                    del self._storing[key]
                    if key in failed:
                        self._idle.remove(key)

    def use(self, keys: Sequence[bytes]) -> None:
        """A request has these chunks."""
        with self._lock:
            self._idle.use(keys, self._clock())

    def clear(self) -> None:
        """Demote nothing of what is known."""
        with self._lock:
            self._idle.clear()
            self._storing.clear()
            self._keys_of.clear()

    def take_stored(self) -> list[bytes]:
        """The chunks that the tier below has received since the last call, in this order."""
        taken = []
        while self._stored:
            taken.append(self._stored.popleft())
        return taken

    def outcomes(self) -> dict[DemotionOutcome, int]:
        """Chunks since the start, by what became of them."""
        with self._lock:
            return {**self._outcomes, DemotionOutcome.FORGOTTEN: self._idle.forgotten}

    @property
    def waiting(self) -> int:
        """Chunks that are known and not idle for long enough."""
        with self._lock:
            return len(self._idle)

    def replace_stuck(self) -> None:
        """Start a thread for each one that is held by a call which does not end."""
        for thread in self._threads:
            thread.replace_if_stuck(self._clock())

    def stop(self) -> None:
        """Ask the threads to end; they may be stuck in calls."""
        self._closed.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the threads, each at most that long."""
        for thread in self._threads:
            thread.join(timeout_seconds)

    # --- worker threads ---------------------------------------------------------------------------------------------

    def _work(self, call: Call) -> None:
        buffer = transfer_buffer(self._above.payload_bytes)
        while not self._closed.is_set() and not call.lost:
            if not self.demote_due(buffer, call):
                self._closed.wait(WAIT_SECONDS)

    def demote_due(self, buffer: memoryview, call: Call) -> bool:
        """Copy some of the chunks that are due now. False: there were none. buffer: of one payload."""
        due = self._due()
        try:
            if due:
                self._demote(due, buffer, call)
        except Exception as error:  # a defect of a tier must not cost the thread
            failure = as_tier_error(error)
            self._counters_below.count_failure(Operation.STORE, failure.reason)
            _log.error("Shared tier %s: %s", self._below.name, failure)
        call.deadline = None
        return bool(due)

    def _due(self) -> list[IdleChunk]:
        if not self._breaker.would_allow():
            return []
        idle_seconds = self._idle_seconds * (PRESSED_SHARE if self._above.under_pressure else 1.0)
        with self._lock:
            return self._idle.take(self._clock() - idle_seconds, BATCH_CHUNKS)

    def _demote(self, chunks: list[IdleChunk], buffer: memoryview, call: Call) -> None:
        deadline = call.deadline = self._clock() + self._lookup_seconds
        try:
            there = self._below.contains([chunk.key for chunk in chunks], deadline)
        except Exception as error:
            self._counters_below.count_failure(Operation.LOOKUP, as_tier_error(error).reason)
            if not isinstance(error, TierPartlyAsked):
                self._breaker.record_failure()
            self._failed(chunks)
            return
        for number, (chunk, present) in enumerate(zip(chunks, there, strict=True)):
            if self._closed.is_set() or call.lost:
                return
            if present:
                self._end(DemotionOutcome.PRESENT, chunk.key)
            elif not self._copy(chunk, buffer, call):
                self._failed(chunks[number:])
                return

    def _copy(self, chunk: IdleChunk, buffer: memoryview, call: Call) -> bool:
        """Copy a chunk to the tier below. Returns False if that tier does not take it."""
        deadline = call.deadline = self._clock() + self._store_seconds
        try:
            self._read(chunk.key, buffer, deadline)
        except Exception as error:
            if not isinstance(error, TierMiss):  # it was evicted, or is still being stored
                self._counters_above.count_failure(Operation.LOAD, as_tier_error(error).reason)
            if isinstance(error, TierCorrupt):
                self._discard(chunk.key)
            elif self._await_store(chunk):
                return True
            self._end(DemotionOutcome.LOST)
            return True
        if not self._breaker.allow():
            return False
        try:
            outcome = self._below.store(chunk.key, buffer, deadline, chunk.tenant)
        except Exception as error:
            self._counters_below.count_failure(Operation.STORE, as_tier_error(error).reason)
            self._breaker.record_failure()
            return False
        self._breaker.record_success()
        self._end(DemotionOutcome.STORED if outcome is StoreOutcome.STORED else DemotionOutcome.PRESENT, chunk.key)
        return True

    def _await_store(self, chunk: IdleChunk) -> bool:
        """Whether the chunk is still being stored above; then it is due again after a while."""
        with self._lock:
            if chunk.key not in self._storing:
                return False
            self._idle.add([chunk.key], chunk.tenant, self._clock())
            return True

    def _discard(self, key: bytes) -> None:
        try:
            self._above.discard(key, self._clock() + self._lookup_seconds)
        except Exception as error:  # it stays, and the next load finds it corrupt
            self._counters_above.count_failure(Upkeep.DISCARD, as_tier_error(error).reason)

    def _end(self, outcome: DemotionOutcome, stored: bytes | None = None) -> None:
        with self._lock:
            self._outcomes[outcome] += 1
        if stored is not None:
            self._stored.append(stored)

    def _failed(self, chunks: Sequence[IdleChunk]) -> None:
        """Count the chunks as used now, so that they are due again after a while."""
        with self._lock:
            self._outcomes[DemotionOutcome.FAILED] += len(chunks)
            for chunk in chunks:
                self._idle.add([chunk.key], chunk.tenant, self._clock())
