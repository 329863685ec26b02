"""Jobs between the CPU tier and the shared tiers: promotions, stores, resets, and the statistics of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.early_loads import PendingRows
from spillway_connector.engine.v023.cpu_tier import CpuTier
from spillway_connector.engine.v023.prefix_lookup import PrefixLookupManager
from spillway_connector.engine.v023.stats import SpillwayStats
from spillway_connector.engine.v023.tier_adapter import SharedTierAdapter, TierJobResult


class SpillwayTieringManager(PrefixLookupManager):
    """Upstream's tiering manager as Spillway runs it; lookups are PrefixLookupManager's.

    Beyond upstream: a promotion keeps its good chunks when others fail, a failed device copy never becomes a hit, a
    reset leaves no row pending, and chunks of a promotion can be used before its job ends.

    EngineCore process, scheduler thread; no method blocks.
    """

    def __init__(
        self,
        primary_tier: CpuTier,
        secondary_tiers: list[SecondaryTierManager],
        num_rows: int,
        config: ConnectorConfig,
        *,
        enable_events: bool,
        chunk_tokens: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            primary_tier,
            secondary_tiers,
            num_rows,
            config,
            enable_events=enable_events,
            chunk_tokens=chunk_tokens,
            chunk_bytes=chunk_bytes,
            clock=clock,
        )
        self._num_rows = num_rows
        self._shared_tiers = [tier for tier in secondary_tiers if isinstance(tier, SharedTierAdapter)]
        self._reported_state: tuple[int, float | None] | None = None
        self._reported_rows = -1
        self._reported_rates: dict[str, float] = {}  # by tier; "" is the prefill's
        self._resets = {"done": 0, "refused": 0}
        self._failed_stores: set[OffloadKey] = set()  # to be completed as failed
        self._early_chunks: dict[int, int] = {}  # by promotion under way: chunks that were completed before its end
        self._reset_rows: dict[int, list[int]] = {}  # by job under way: rows of chunks that a reset has dropped

    def count_request(self, keys: Sequence[OffloadKey]) -> None:
        """Record the chunks of a new request, once: a full shared tier admits what is requested repeatedly."""
        for tier in self._shared_tiers:
            tier.count_request(keys)

    def on_schedule_end(self) -> None:
        """Upstream's contract (called at the end of every step), with fewer calls."""
        if not self._processed_jobs_this_step:
            self._process_finished_jobs()
        self._processed_jobs_this_step = False
        if self._pending_load_submissions:
            self._flush_pending_promotions()
        for tier in self.secondary_tiers:
            tier.on_schedule_end()
        self.memo.fresh = False

    def weights_changed(self) -> None:
        """The shared tiers hold KV of other weights from now on: they are neither read nor written again."""
        for tier in self._shared_tiers:
            tier.weights_changed()

    def _process_finished_jobs(self) -> None:
        for tier in self.secondary_tiers:
            for result in tier.get_finished_jobs():
                self._complete(tier, result)
        if self.loads_begin_early and self._prefix_tier is not None and self._bounds.rows_in_flight:
            for job_id, arrived in self._prefix_tier.take_arrived():
                if job_id not in self._reset_rows:
                    self._complete_early(job_id, arrived)

    def _complete_early(self, job_id: int, arrived: list[OffloadKey]) -> None:
        """Complete chunks of a promotion whose job goes on with the others."""
        job = self._transfer_jobs[job_id]
        completed = set(arrived)
        job.keys = [key for key in job.keys if key not in completed]
        self._early_chunks[job_id] = self._early_chunks.get(job_id, 0) + len(arrived)
        self._bounds.rows_in_flight -= len(arrived)
        self.primary_tier.complete_write(arrived, job.req_context, True)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Upstream's contract (rows, pinned), except that not all chunks need be ready: then PendingRows, unpinned."""
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        if self.loads_begin_early and not self.primary_tier.ready.issuperset(keys):
            return PendingRows(list(keys))
        return self.primary_tier.prepare_load(keys, req_context)

    def _complete(self, tier: SecondaryTierManager, result: JobResult) -> None:
        job = self._transfer_jobs.pop(result.job_id)
        reset_rows = self._reset_rows.pop(result.job_id, None)
        if reset_rows is not None:
            self.primary_tier.release(reset_rows)
        if not job.is_promotion:
            if reset_rows is None:
                self.primary_tier.complete_read(job.keys, job.req_context)
            return
        self._bounds.rows_in_flight -= len(job.keys)
        arrived: Collection[OffloadKey] = job.keys if result.success else ()
        lost: Collection[OffloadKey] = () if result.success else job.keys
        if isinstance(result, TierJobResult):
            if result.failed_keys:
                arrived = [key for key in job.keys if key not in result.failed_keys]
                lost = [key for key in job.keys if key in result.failed_keys]
            chunks = len(arrived) + self._early_chunks.pop(result.job_id, 0)
            self._gates[tier].load_rate.add(chunks * self._chunk_bytes, result.seconds, self._clock())
            self._unreported = True
        if reset_rows is not None:
            return
        if arrived:
            self.primary_tier.complete_write(arrived, job.req_context, True)
        if lost:
            self.primary_tier.complete_write(lost, job.req_context, False)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        # Upstream polls for finished jobs here, too, and counts that as the next step's poll: a job that ends in
        # between would be seen one step late.
        polled = self._processed_jobs_this_step
        output = super().prepare_store(keys, req_context)
        self._processed_jobs_this_step = polled
        return output

    def fail_store(self, keys: Collection[OffloadKey]) -> None:
        """The device copy of these chunks failed: their next complete_store frees their rows."""
        self._failed_stores.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Upstream's contract, except that chunks given to :meth:`fail_store` count as failed."""
        self.memo.fresh = False  # the next lookup sees the change, even within the same step
        failed = self._failed_stores.intersection(keys)
        if failed:
            self._failed_stores -= failed
            super().complete_store(failed, req_context, success=False)
            keys = [key for key in keys if key not in failed]
        if keys:
            super().complete_store(keys, req_context, success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._bounds.waits.pop(req_context.req_id, None)
        if len(self._shared_tiers) == len(self.secondary_tiers):
            return RequestOffloadingContext()  # Spillway's tiers add nothing to it
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._bounds.waits.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def reset_cache(self) -> None:
        """Drop all chunks of the CPU tier. Jobs of the shared tiers go on; their rows are released when they end."""
        self._flush_pending_promotions()
        self._process_finished_jobs()
        for job_id, job in self._transfer_jobs.items():
            if job_id not in self._reset_rows:
                self._reset_rows[job_id] = self.primary_tier.rows_of(job.keys)
        self._failed_stores.clear()
        self._bounds.waits.clear()
        self.memo.fresh = False
        self.primary_tier.reset_cache()
        self._resets["done"] += 1
        self._unreported = True

    def count_refused_reset(self) -> None:
        self._resets["refused"] += 1
        self._unreported = True

    def take_stats(self) -> SpillwayStats | None:
        """What happened since the last call, as vLLM's stats; None where nothing did. Called once per engine step."""
        changed = self.primary_tier.changed_chunks.position, self.prefill_rate.updated_at
        if (
            changed == self._reported_state
            and not self._unreported
            and not any(tier.report.has_updates() for tier in self._shared_tiers)
        ):
            return None
        self._reported_state, self._unreported = changed, False
        stats = SpillwayStats()
        used = self.primary_tier.used_rows()
        if used != self._reported_rows:
            self._reported_rows = used
            stats.add(metrics.CPU_TIER_BLOCKS, used, "used")
            stats.add(metrics.CPU_TIER_BLOCKS, self._num_rows, "total")
        if (rate := self.prefill_rate.per_second) is not None and rate != self._reported_rates.get(""):
            self._reported_rates[""] = rate
            stats.add(metrics.PREFILL_RATE, rate)
        for outcome, count in self._resets.items():
            if count:
                stats.add(metrics.CPU_TIER_RESETS, count, outcome)
                self._resets[outcome] = 0
        for shared in self._shared_tiers:
            shared.report.add_to(stats)
        for tier, gate in self._gates.items():
            rate = gate.load_rate.per_second
            if rate is not None and rate != self._reported_rates.get(tier.tier_type):
                self._reported_rates[tier.tier_type] = rate
                stats.add(metrics.TIER_LOAD_RATE, rate, tier.tier_type)
        for tier_type, count in self._not_worth.items():
            if count:
                stats.add(metrics.TIER_NOT_WORTH, count, tier_type)
                self._not_worth[tier_type] = 0
        for (tier_type, reason), count in self._misses.items():
            stats.add(metrics.TIER_MISSES, count, tier_type, reason.value)
        self._misses.clear()
        return stats
