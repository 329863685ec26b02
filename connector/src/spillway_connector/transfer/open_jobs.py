"""The jobs of one shared tier that are under way: admission by bytes, deadlines, and what their end means for counters.

:class:`OpenJobs` belongs to the scheduler thread. The mover threads settle items and report ended jobs through deques,
which :meth:`OpenJobs.collect` takes in; so counters and the presence index are written by one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from spillway_connector.errors import RefusedReason, TierCorrupt, TierError, TierMiss, TierRefused, TierTimeout
from spillway_connector.limits import TransferLimits
from spillway_connector.plan.load_cost import BEHIND_SECONDS_MIN, behind_after
from spillway_connector.plan.prefix_memo import PresenceIndex
from spillway_connector.tiers.tier import NO_TENANT, Clock
from spillway_connector.transfer.announcements import Announcements
from spillway_connector.transfer.breaker import Breaker
from spillway_connector.transfer.jobs import Behind, JobOutcome, TransferJob
from spillway_connector.transfer.movers import LateEnd, Movers
from spillway_connector.transfer.stats import Operation, SkipReason, TierCounters, miss_of_error

logger = logging.getLogger(__name__)

ARRIVALS_REPORTED_SECONDS = 0.01  # a load that ends sooner is reported as a whole, which costs the scheduler less


class OpenJobs:
    """Loads and stores between their submission and their report.

    loads, stores: by job id, in the order of their deadlines (one timeout per operation). storing: keys of the stores.
    queued_bytes: of the jobs under way, by operation.
    """

    def __init__(
        self,
        movers: Movers,
        presence: PresenceIndex,
        counters: TierCounters,
        *,
        payload_bytes: int,
        limits: TransferLimits,
        breakers: Mapping[Operation, Breaker],
        clock: Clock,
        progress: threading.Event,
        announcements: Announcements | None = None,
    ) -> None:
        self._movers = movers
        self._presence = presence
        self._counters = counters
        self._payload_bytes = payload_bytes
        self._limits = limits
        self._breakers = breakers
        self._clock = clock
        self._progress = progress
        self._announcements = announcements
        self.loads: dict[int, TransferJob] = {}
        self.stores: dict[int, TransferJob] = {}
        self._jobs = {Operation.LOAD: self.loads, Operation.STORE: self.stores}
        self._ended: list[TransferJob] = []
        self.storing: set[bytes] = set()
        self.queued_bytes = {Operation.LOAD: 0, Operation.STORE: 0}
        self._judged_until = float("-inf")  # until then computing overtakes no load

    @property
    def busy(self) -> bool:
        """Whether :meth:`finished` will report anything, now or later."""
        return bool(self._ended or self.loads or self.stores)

    def open(self, job_id: int, operation: Operation, tenant: bytes = NO_TENANT) -> TransferJob:
        """A new job without items. Raises ValueError if a job of this id is under way."""
        self._counters.moved = True
        if job_id in self.loads or job_id in self.stores:
            raise ValueError(f"job {job_id} is already under way")
        now = self._clock()
        limits = self._limits
        timeout = limits.load_timeout_seconds if operation is Operation.LOAD else limits.store_timeout_seconds
        job = self._jobs[operation][job_id] = TransferJob(job_id, operation, now, now + timeout, tenant)
        return job

    def room(self, operation: Operation, limit_bytes: int, wanted: int) -> int:
        """Return how many of ``wanted`` chunks the limit admits beside those under way."""
        payload_bytes = self._payload_bytes
        # Jobs count in full until they end; settled items are subtracted only when room is short.
        if self.queued_bytes[operation] + wanted * payload_bytes <= limit_bytes:
            return wanted
        open_items = sum(job.open_items for job in self._jobs[operation].values())
        return min(wanted, max(0, limit_bytes // payload_bytes - open_items))

    def start(self, job: TransferJob, keys: list[bytes], rows: list[int]) -> None:
        """Hand the items to the movers."""
        if keys:
            job.fill(keys, rows)
            job.received_before = self._movers.received_chunks if job.operation is Operation.LOAD else 0.0
            self.queued_bytes[job.operation] += len(keys) * self._payload_bytes
            self._movers.submit(job)

    def skip(self, job: TransferJob, keys: Sequence[bytes] | set[bytes], reason: SkipReason) -> None:
        """Count keys of a store as done without moving them."""
        if keys:
            self._counters.skipped[reason] += len(keys)
            job.done += keys
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s: %d chunks are not stored: %s", self._name(job), len(keys), reason.value)

    def refuse(self, job: TransferJob, keys: Sequence[bytes], reason: RefusedReason, message: str) -> None:
        """Fail keys without moving them."""
        if keys:
            error = TierRefused(reason, message)
            job.failed.update(dict.fromkeys(keys, error))
            self._fail(job.operation, keys, error)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s: %d chunks are refused: %s", self._name(job), len(keys), message)

    def finished(self) -> list[JobOutcome]:
        """The jobs that ended since the last call, loads first: requests wait for them. Each is returned once."""
        if self.loads or self.stores or self._movers.late:
            self.collect()
        if not self._ended:
            return []
        self._counters.moved = True
        loads_first = sorted(self._ended, key=lambda job: job.operation is Operation.STORE)
        outcomes = [job.outcome() for job in loads_first]
        self._ended.clear()
        return outcomes

    def arrived(self) -> list[tuple[int, list[bytes]]]:
        """(job, keys) of loads older than ARRIVALS_REPORTED_SECONDS whose rows were filled since the last call.

        Each key is returned once; its job still ends.
        """
        if not self.loads:
            return []
        slow_since = self._clock() - ARRIVALS_REPORTED_SECONDS
        arrivals: list[tuple[int, list[bytes]]] = []
        for job in self.loads.values():
            if job.queued_at > slow_since:
                break  # and so are those behind it
            keys = job.take_arrived()
            if keys:
                arrivals.append((job.job_id, keys))
        return arrivals

    def collect(self) -> None:
        """Take in what the movers have reported, and give up jobs beyond their deadline."""
        movers = self._movers
        while movers.ended:
            self.end_if_done(movers.ended.popleft())
        while movers.late:
            self._take_in_late(movers.late.popleft())
        now: float | None = None
        for jobs in self._jobs.values():
            if not jobs:
                continue
            now = self._clock() if now is None else now
            # The oldest is the first to pass its deadline.
            if now >= next(iter(jobs.values())).deadline:
                for job in list(jobs.values()):
                    if now < job.deadline:
                        break
                    self._expire(job)
                    self.end_if_done(job)

    def give_up_behind(self, seconds_per_chunk: float, latency_seconds: float, spared: Callable[[int], bool]) -> None:
        """Give up the loads that computing has overtaken, except those for which no request waits (``spared``)."""
        now = self._clock()
        if now < self._judged_until:
            return
        received = self._movers.received_chunks
        self._judged_until = now + BEHIND_SECONDS_MIN  # so long no new load is behind; and rates change meanwhile
        for job in list(self.loads.values()):
            since, elapsed = received - job.received_before, now - job.queued_at
            left = behind_after(since, len(job.keys), seconds_per_chunk, latency_seconds) - elapsed
            if left >= 0:
                self._judged_until = min(self._judged_until, now + left)
            if left >= 0 or spared(job.job_id):
                continue
            self._judged_until = now  # what cannot be given up yet is tried again
            behind = TierRefused(RefusedReason.BEHIND, f"{since:.1f} of {len(job.keys)} chunks came in {elapsed:.3g} s")
            if self.void(job, lambda _, why=behind: why):  # type: ignore[misc]
                job.behind = Behind(since, elapsed)
            self.end_if_done(job)

    def end_if_done(self, job: TransferJob) -> None:
        """Close a job without open items, so that :meth:`finished` reports it."""
        if job.open_items or self._jobs[job.operation].pop(job.job_id, None) is None:
            return
        self._counters.moved = True
        self._ended.append(job)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_end(job)
        if not job.keys:
            return
        operation, moved = job.operation, job.moved()
        self.queued_bytes[operation] -= len(job.keys) * self._payload_bytes
        if operation is Operation.STORE:
            self.storing.difference_update(job.keys)
        self._count_transfer(operation, len(moved), job.busy_seconds)
        if moved:
            job.done += moved
            self._presence.put_many(moved, True, self._clock())
            if job.hand_over and self._announcements is not None:
                self._announcements.storing(moved)
        for index, reason in job.left.items():
            self.skip(job, (job.keys[index],), reason)
            if reason is SkipReason.ADMISSION and self._announcements is not None:
                self._announcements.failed((job.keys[index],))
        for index, error in job.errors.items():
            key = job.keys[index]
            job.failed[key] = error
            self._fail(operation, (key,), error)

    def _name(self, job: TransferJob) -> str:
        return f"{self._movers.tier_name} {job.operation.value} job {job.job_id}"

    def _log_end(self, job: TransferJob) -> None:
        failures = Counter(error.reason for error in (*job.errors.values(), *job.failed.values()))
        logger.debug(
            "%s ended after %.3f s: %d of %d chunks were moved%s",
            self._name(job),
            self._clock() - job.queued_at,
            len(job.moved()),
            len(job.keys),
            "".join(f"; {count} failed: {reason}" for reason, count in failures.items()),
        )

    def _fail(self, operation: Operation, keys: Sequence[bytes], error: TierError) -> None:
        self._counters.count_failure(operation, error.reason, len(keys))
        if operation is Operation.LOAD:
            self._counters.misses[miss_of_error(error)] += len(keys)
            # Before the job is reported, or the next lookup answers HIT again and the request never ends (vllm#49176).
            self._presence.put_many(keys, False, self._clock())
        if self._announcements is None:
            return
        if operation is Operation.STORE:
            self._announcements.failed(keys)
        elif isinstance(error, TierMiss | TierCorrupt):
            for key in keys:
                self._announcements.missed(key)

    def _take_in_late(self, late: LateEnd) -> None:
        self._counters.moved = True
        self._counters.late_completions += 1
        operation = late.item.job.operation
        self._count_transfer(operation, 0 if late.error or late.left else 1, late.seconds)
        if operation is Operation.STORE and late.error is None and late.left is None:
            self._presence.put(late.item.key, True, self._clock())  # late, but it is there
            if self._announcements is not None:
                self._announcements.storing((late.item.key,))

    def _count_transfer(self, operation: Operation, items: int, seconds: float) -> None:
        counters = self._counters
        if operation is Operation.LOAD:
            counters.read_seconds += seconds
            counters.read_bytes += items * self._payload_bytes
        else:
            counters.write_seconds += seconds
            counters.written_bytes += items * self._payload_bytes

    def _expire(self, job: TransferJob) -> None:
        seconds = job.deadline - job.queued_at
        late = TierTimeout(f"{job.operation.value} not done within {seconds:g} s")
        shed = TierRefused(RefusedReason.QUEUE_AGE, f"no thread was free for it within {seconds:g} s")
        movers, begun_at = self._movers, job.begun_at
        voided = self.void(job, lambda index: shed if movers.kept_waiting(job, begun_at.get(index)) else late)
        if late in voided:
            self._counters.expiries[job.operation] += 1
            self._breakers[job.operation].record_failure()  # once per job, not per key

    def void(self, job: TransferJob, error_of: Callable[[int], TierError]) -> list[TierError]:
        """Give up the items that can be given up; the errors they were given up with."""
        keys_by_error: dict[TierError, list[bytes]] = {}
        for key, error in job.give_up(error_of).items():
            keys_by_error.setdefault(error, []).append(key)
        for error, keys in keys_by_error.items():
            self._fail(job.operation, keys, error)
        return list(keys_by_error)

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Block (real time) until all jobs have ended; False at the timeout."""
        # Woken by reports; the bound lets job deadlines of this clock pass meanwhile.
        return self._collect_all(timeout_seconds, wake_seconds=0.05)

    def cancel_all(self) -> bool:
        """Give up all jobs, waiting at most a second for copies under way; False if one did not end."""
        return self._collect_all(
            1.0, wake_seconds=0.01, cancelled=TierRefused(RefusedReason.CLOSED, "cancelled while draining")
        )

    def _collect_all(self, timeout_seconds: float, wake_seconds: float, cancelled: TierError | None = None) -> bool:
        until = time.monotonic() + timeout_seconds
        while True:
            self.collect()
            if cancelled is not None:
                for job in [*self.loads.values(), *self.stores.values()]:
                    self.void(job, lambda _: cancelled)
                    self.end_if_done(job)
            if not (self.loads or self.stores):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._progress.wait(min(left, wake_seconds))
            self._progress.clear()
