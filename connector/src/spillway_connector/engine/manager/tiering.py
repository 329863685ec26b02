"""Jobs between the CPU tier and the shared tiers: promotions, stores, resets, and the statistics of both."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.process_settings import ProcessSettings
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.manager.early_loads import PendingRows
from spillway_connector.engine.manager.gauges import ManagerGauges
from spillway_connector.engine.manager.prefix_lookup import PrefixLookupManager
from spillway_connector.engine.manager.promotion import Promotion, TierJob
from spillway_connector.engine.manager.spills import AllSpills, LateRows
from spillway_connector.engine.requests.tenancy import UNKNOWN_REQUEST, TenantContext, session_of_context
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, SharedTierBase, TierJobResult
from spillway_connector.engine.shared_tiers.tier_stats import IDLE_SECONDS
from spillway_connector.namespace import Namespace
from spillway_connector.plan.ahead import AheadOutcome
from spillway_connector.plan.answers import AnswerReuse
from spillway_connector.plan.meeting import MeetingOutcome
from spillway_connector.transfer.announcements import Announcement
from spillway_connector.transfer.stats import Operation
from spillway_settings.wire import NODE_STORE

logger = logging.getLogger(__name__)
_ONE_GROUP: Mapping[int, str] = MappingProxyType({})


class TieringManager(PrefixLookupManager):
    """vLLM's OffloadingManager over a CPU tier and shared tiers; lookups are PrefixLookupManager's.

    Every chunk that the CPU tier receives from the device is offered to every shared tier (spills.py). The steps are
    those of vLLM's own tiering manager; beyond it, a promotion keeps its good chunks when others fail, a failed device
    copy never becomes a hit, a reset leaves no row pending, and chunks of a promotion can be used before its job ends.

    EngineCore process, scheduler thread; no method blocks.
    """

    def __init__(
        self,
        primary_tier: CpuTier,
        secondary_tiers: list[SecondaryTierManager],
        num_rows: int,
        config: ConnectorConfig,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            primary_tier,
            secondary_tiers,
            num_rows,
            config,
            chunk_tokens=chunk_tokens,
            chunk_bytes=chunk_bytes,
            clock=clock,
        )
        self._num_rows = num_rows
        self._process_settings: ProcessSettings | None = None
        self._late_stores: LateRows | None = None
        self._kv_groups = _ONE_GROUP
        # If the storing of generated tokens follows what comes back of them.
        self.answers = AnswerReuse() if config.generated_tokens == "auto" else None
        self._transfer_jobs: dict[int, TierJob] = {}  # under way
        self._last_job_id = -1
        # Request -> vLLM's tiers that want all chunks of the request, not only those that it computes.
        self._request_level_tiers: dict[str, list[SecondaryTierManager]] = {}
        self._shared_tiers = [tier for tier in secondary_tiers if isinstance(tier, SharedTierBase)]
        pays = {tier: partial(self._gates[tier].pays, self.prefill_rate) for tier in self._shared_tiers}
        self.spills = AllSpills(
            pays, primary_tier, self._submit_store, clock, rows=num_rows, follows_tiers=config.storing == "auto"
        )
        self._reported_state: tuple[int, float | None, int] | None = None
        self._gauges = ManagerGauges(primary_tier, num_rows, self.prefill_rate, self._gates)
        self._gauged_at = -math.inf
        self.settled_chunks = 0
        self._failed_stores: set[OffloadKey] = set()  # to be completed as failed
        self._early_chunks: dict[int, int] = {}  # by promotion under way: chunks that were completed before its end
        self._reset_rows: dict[int, list[int]] = {}  # by job under way: rows of chunks that a reset has dropped

    def serve_half(
        self, *, loads_begin_early: bool, late_stores: LateRows | None, kv_groups: Mapping[int, str] = _ONE_GROUP
    ) -> None:
        """Learn from the scheduler half, once, what depends on the model's KV groups.

        Args:
            loads_begin_early: Whether a load may begin before all of its chunks are in the CPU tier.
            late_stores: Decides which stores wait, and which chunks of the CPU tier the device holds too.
            kv_groups: Names of KV groups in metrics, by the index that keys have; none: there is one group.
        """
        self.loads_begin_early = loads_begin_early
        self._kv_groups = kv_groups
        self._late_stores = late_stores
        if late_stores is not None:
            self.primary_tier.evict_first(late_stores)

    def report_settings(self, settings: ProcessSettings) -> None:
        """Report them with the statistics from now on."""
        self._process_settings = settings

    def settings(self) -> dict[str, object]:
        """The settings that this manager uses, by name."""
        return {
            "cpu_blocks": self._num_rows,
            "chunk_tokens": self._chunk_tokens,
            "shared_tiers": ",".join(_names_of(tier) for tier in self.secondary_tiers) or "none",
        }

    def count_request(self, keys: Sequence[OffloadKey]) -> None:
        """Record the chunks of a new request, once: a full shared tier admits what is requested repeatedly."""
        for tier in self._shared_tiers:
            tier.count_request(keys)

    def use_chunks(
        self, keys: Sequence[OffloadKey], prompt_tokens: int, chunk_tokens: int, req_context: ReqContext
    ) -> None:
        """The request uses these chunks, those of its prompt first.

        What it says of its session counts for them in the shared tiers, and what it asks to retain is held from now on.
        """
        if not isinstance(req_context, TenantContext):
            return
        if req_context.session is not None:
            for tier in self._shared_tiers:
                tier.use_session(keys, req_context)
        if self.loads_begin_early:  # one KV group: the chunks are one prefix
            self.spills.use(keys, req_context)
        if (retention := req_context.retention) is not None:
            prompt = keys[: prompt_tokens // chunk_tokens]
            for tokens, seconds in retention.marks:
                held = prompt if tokens is None else prompt[: -(-tokens // chunk_tokens)]
                self.primary_tier.hold(req_context.tenant, retention.share, seconds, held)
                for tier in self._shared_tiers:
                    tier.retain(req_context, retention.share, seconds, held)
            self._unreported = True

    @property
    def introduced(self) -> bool:
        """Whether the engine has announced from which shared stores it loads."""
        news = self.primary_tier.news
        return (news is None or news.introduced) and all(tier.introduced for tier in self._shared_tiers)

    def take_announcements(self) -> Iterator[tuple[str, Announcement]]:
        """Yields (tier type, announcement) of all tiers that other engines share. Called once per engine step."""
        for announcement in self.primary_tier.take_announcements():
            yield NODE_STORE, announcement
        for tier in self._shared_tiers:
            yield from tier.take_announcements()

    @abstractmethod
    def _make_job(
        self, job_id: int, keys: Collection[OffloadKey], rows: Sequence[int], is_promotion: bool, context: ReqContext
    ) -> TierJob: ...

    def _begin_job(
        self, keys: Collection[OffloadKey], rows: Sequence[int], is_promotion: bool, context: ReqContext
    ) -> Any:  # this generation's class of jobs
        self._last_job_id += 1
        job = self._make_job(self._last_job_id, keys, rows, is_promotion, context)
        self._transfer_jobs[job.job_id] = job
        self._unreported = True
        if logger.isEnabledFor(logging.DEBUG):
            verb = "promotes" if is_promotion else "stores"
            logger.debug("request %s: job %d %s %d chunks", context.req_id, job.job_id, verb, len(keys))
        return job

    @override
    def _submit_promotion(self, tier: SecondaryTierManager, promotion: Promotion) -> None:
        tier.submit_load(self._begin_job(promotion.keys, promotion.rows, True, promotion.context))

    def _submit_store(self, tier: SecondaryTierManager, keys: Collection[OffloadKey], context: ReqContext) -> None:
        """The rows stay pinned until the tier has reported the job."""
        pinned = self.primary_tier.prepare_read(keys, context)
        if pinned is None:  # another engine of the node has taken one of the rows meanwhile
            return
        assert isinstance(pinned, CPULoadStoreSpec)
        tier.submit_store(self._begin_job(keys, pinned.block_ids.tolist(), False, context))

    def weights_changed(self) -> None:
        """The shared tiers hold KV of other weights from now on, so they rest. The memory of answers ends, too."""
        if self.answers is not None:
            self.answers = AnswerReuse()
        self.primary_tier.weights_changed()
        for tier in self.secondary_tiers:
            if isinstance(tier, PrefixTier):
                tier.weights_changed()

    def use_namespace(self, namespace: Namespace) -> None:
        """The changed weights have a name: share chunks again. Raises ConfigError; the CPU tier then rests, too."""
        for tier in self.secondary_tiers:
            if isinstance(tier, PrefixTier):
                tier.use_namespace(namespace)
        self.primary_tier.use_namespace(namespace.digest16)

    @override
    def _process_finished_jobs(self) -> None:
        self.primary_tier.sync()
        loading = self._bounds.rows_in_flight
        if loading and (computed := self.prefill_rate.per_second) is not None:
            for shared in self._shared_tiers:
                shared.give_up_behind(self._chunk_tokens / computed, self._nobody_waits)
        results = [(tier, result) for tier in self.secondary_tiers for result in tier.get_finished_jobs()]
        tier_of_early = self._prefix_tier if loading and self.loads_begin_early else None
        early = () if tier_of_early is None else tier_of_early.take_arrived()
        if results or early:
            with self.primary_tier.together():
                for tier, result in results:
                    self._complete(tier, result)
                for job_id, arrived in early:
                    if job_id not in self._reset_rows:
                        self._complete_early(job_id, arrived)
        self.spills.give()

    def _nobody_waits(self, job_id: int) -> bool:
        """Whether the request is computed while it is loaded."""
        return not self.may_probe(self._transfer_jobs[job_id].req_context.req_id)

    def _complete_early(self, job_id: int, arrived: list[OffloadKey]) -> None:
        """Complete chunks of a promotion whose job goes on with the others."""
        job = self._transfer_jobs[job_id]
        completed = set(arrived)
        job.keys = [key for key in job.keys if key not in completed]
        self._early_chunks[job_id] = self._early_chunks.get(job_id, 0) + len(arrived)
        self._bounds.rows_in_flight -= len(arrived)
        self.primary_tier.complete_write(arrived, job.req_context, True)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """vLLM's contract (rows, pinned), except that not all chunks need be ready: then PendingRows, unpinned."""
        self._maybe_process_finished_jobs()
        pending = self.loads_begin_early and not self.primary_tier.ready.issuperset(keys)
        if logger.isEnabledFor(logging.DEBUG):
            how = "some are still being promoted" if pending else "all are in the CPU tier"
            logger.debug("request %s loads %d chunks to the device: %s", req_context.req_id, len(keys), how)
        if pending:
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
        arrived: Collection[OffloadKey] = job.keys
        lost: Collection[OffloadKey] = ()
        if not result.success:
            # Since 0.30 a tier of vLLM's names the chunks that were loaded nevertheless.
            good = set(getattr(result, "successful_keys", None) or ())
            arrived, lost = [key for key in job.keys if key in good], [key for key in job.keys if key not in good]
        if isinstance(result, TierJobResult):
            if result.failed_keys:
                arrived = [key for key in job.keys if key not in result.failed_keys]
                lost = [key for key in job.keys if key in result.failed_keys]
            chunks = len(arrived) + self._early_chunks.pop(result.job_id, 0)
            gate, now = self._gates[tier], self._clock()
            if result.behind is not None:
                gate.given_up(*result.behind, now)
            else:
                gate.load_rate.add(chunks * self._chunk_bytes, result.seconds, now)
                if not self.may_probe(job.req_context.req_id):
                    gate.measured(now)
            self._unreported = True
        promoted = tier.take_promoted(result.job_id) if isinstance(tier, SharedTierBase) else ()
        if reset_rows is not None:
            return
        if arrived:
            self.primary_tier.complete_write(arrived, job.req_context, True)
        if lost:
            self.primary_tier.complete_write(lost, job.req_context, False)
        if promoted and (upward := [key for key in promoted if key in self.primary_tier.ready]):
            self._submit_store(tier, cast(list[OffloadKey], upward), job.req_context)

    @override
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.touch(keys, req_context)
        for tier in self.secondary_tiers:
            tier.touch(keys, req_context)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.primary_tier.complete_load(keys, req_context)
        self._count_groups(keys, Operation.LOAD)

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """vLLM's contract. Finished jobs are taken in first: they make rows evictable."""
        # This look counts for the present step alone. vLLM's manager counts it as the next step's: a job that ends in
        # between would be seen one step late.
        if not self._processed_jobs_this_step:
            self._process_finished_jobs()
        if (
            self._late_stores is not None
            and req_context.req_id not in self._request_level_tiers
            and self._late_stores.postpones(keys, req_context)
        ):
            logger.debug("request %s: %d chunks stay on the device alone for now", req_context.req_id, len(keys))
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        written = self.primary_tier.prepare_store(keys, req_context)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_store(len(keys), written, req_context)
        if written is not None and self._request_level_tiers:
            self._store_existing(keys, set(written.keys_to_store), req_context)
        return written

    @staticmethod
    def _log_store(wanted: int, written: PrepareStoreOutput | None, req_context: ReqContext) -> None:
        if written is None:
            logger.debug("request %s: %d chunks are not stored: no rows can be freed", req_context.req_id, wanted)
            return
        logger.debug(
            "request %s: %d of %d chunks are copied to the CPU tier, the others are there; %d others are evicted",
            req_context.req_id,
            len(written.keys_to_store),
            wanted,
            len(written.evicted_keys),
        )

    def _store_existing(self, keys: Collection[OffloadKey], new: set[OffloadKey], req_context: ReqContext) -> None:
        """Chunks that are in the CPU tier already go to the tiers that want all chunks of a request."""
        ready = self.primary_tier.ready
        existing = [key for key in keys if key not in new and key in ready]
        for tier in self._request_level_tiers.get(req_context.req_id, ()) if existing else ():
            self._submit_store(tier, existing, req_context)

    def fail_store(self, keys: Collection[OffloadKey]) -> None:
        """The device copy of these chunks failed: their next complete_store frees their rows."""
        self._failed_stores.update(keys)

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """vLLM's contract, except that chunks given to :meth:`fail_store` count as failed."""
        self.end_lookups()
        failed = self._failed_stores.intersection(keys)
        if failed:
            self._failed_stores -= failed
            self.primary_tier.complete_store(failed, req_context, False)
            logger.debug("request %s: %d chunks are not stored: their copy failed", req_context.req_id, len(failed))
            keys = [key for key in keys if key not in failed]
        if not keys:
            return
        self.primary_tier.complete_store(keys, req_context, success)
        if success:
            self._count_groups(keys, Operation.STORE)
        if self.secondary_tiers and not self.primary_tier.ready.issuperset(keys):
            keys = [key for key in keys if key in self.primary_tier.ready]  # rows of the node could not be published
        if success and keys and req_context is not UNKNOWN_REQUEST:  # else it was offered when it was stored first
            for tier in self.secondary_tiers:
                self.spills.offer(tier, keys, req_context)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._bounds.waits.pop(req_context.req_id, None)
        self.primary_tier.on_new_request(req_context)
        if session_of_context(req_context) is not None:
            for shared in self._shared_tiers:
                shared.begin_request(req_context)
        answer = RequestOffloadingContext()
        if len(self._shared_tiers) < len(self.secondary_tiers):  # Spillway's tiers add nothing to it
            for tier in self.secondary_tiers:
                wish = tier.on_new_request(req_context)
                if wish.policy is OffloadPolicy.REQUEST_LEVEL:
                    self._request_level_tiers.setdefault(req_context.req_id, []).append(tier)
                    answer = wish
        return answer

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._bounds.waits.pop(req_context.req_id, None)
        self.primary_tier.on_request_finished(req_context)
        if session_of_context(req_context) is not None:
            self._unreported = True
            for shared in self._shared_tiers:
                shared.end_request(req_context)
        for tier in self.secondary_tiers:
            tier.on_request_finished(req_context)
        self._request_level_tiers.pop(req_context.req_id, None)

    @override
    def shutdown(self) -> None:
        for tier in self.secondary_tiers:
            tier.shutdown()
        self.primary_tier.shutdown()

    @override
    def reset_cache(self) -> None:
        """Drop all chunks of the CPU tier. Jobs of the shared tiers go on; their rows are released when they end."""
        self._flush_promotions()
        self._process_finished_jobs()
        for job_id, job in self._transfer_jobs.items():
            if job_id not in self._reset_rows:
                self._reset_rows[job_id] = self.primary_tier.rows_of(job.keys)
        self._failed_stores.clear()
        self._bounds.waits.clear()
        self.end_lookups()
        self.primary_tier.reset_cache()
        self.spills.clear()
        self._count(metrics.CPU_TIER_RESETS, 1, "done")

    def count_refused_reset(self) -> None:
        self._count(metrics.CPU_TIER_RESETS, 1, "refused")

    def count_ahead(self, outcome: AheadOutcome, chunks: int) -> None:
        """Chunks promoted ahead of their request's turn, and what became of them."""
        self._count(metrics.PROMOTED_AHEAD, chunks, outcome.value)

    def stores_under_way(self) -> int:
        """Chunks on their way to shared tiers, and those that wait for them in the CPU tier."""
        return self.spills.waiting_chunks + sum(
            len(job.keys) for job in self._transfer_jobs.values() if not job.is_promotion
        )

    @property
    def chunk_bytes(self) -> int:
        return self._chunk_bytes

    @property
    def cpu_rows(self) -> int:
        return self._num_rows

    def _count_groups(self, keys: Collection[OffloadKey], operation: Operation) -> None:
        for group, chunks in Counter(map(get_offload_group_idx, keys)).items() if self._kv_groups else ():
            self._count(metrics.KV_GROUP_BYTES, chunks * self._chunk_bytes, self._kv_groups[group], operation.value)

    def count_settled(self, chunks: int) -> None:
        """Chunks that were stored although the device kept them, because the engine had no work."""
        self.settled_chunks += chunks
        self._count(metrics.SETTLED, chunks)

    def count_late_stores(self, stored: int, lost: int) -> None:
        """Chunks to be stored when the device was about to give them up; lost: it gave them up before the end."""
        self._count(metrics.LATE_STORES, stored, "stored")
        self._count(metrics.LATE_STORES, lost, "lost")

    def count_meeting(self, outcome: MeetingOutcome) -> None:
        """A prompt that is computed while its end is loaded, and what became of it."""
        self._count(metrics.MEETINGS, 1, outcome.value)

    def take_samples(self) -> Samples | None:
        """The events since the last call; None if nothing did. Called once per engine step."""
        tier = self.primary_tier
        state = tier.changed_chunks.position, self.prefill_rate.updated_at, tier.waiting.kept_count
        moved = self._unreported or state != self._reported_state
        updated = [shared for shared in self._shared_tiers if shared.report.has_updates()]
        if not moved and not updated:
            return None
        stats, self._counted = self._counted, Samples()
        if moved or self._clock() - self._gauged_at >= IDLE_SECONDS:
            self._reported_state, self._unreported = state, False
            self._gauged_at = self._clock()  # what changes by itself is at most IDLE_SECONDS late
            self._gauges.add_to(stats, self.answers)
            if self._process_settings is not None:
                self._process_settings.add_to(stats)
            self.spills.add_to(stats)
        for shared in updated:
            shared.report.add_to(stats)
            for name, count in shared.take_not_worth():
                stats.add(metrics.TIER_NOT_WORTH, count, name)
        return stats


def _names_of(tier: SecondaryTierManager) -> str:
    return tier.names if isinstance(tier, SharedTierBase) else tier.tier_type
