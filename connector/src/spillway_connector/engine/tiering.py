"""Who holds what, and what moves between CPU tier and shared tiers: upstream's manager with its traps closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.stats import SpillwayStats
from spillway_connector.engine.tier_adapter import SharedTierAdapter, TierJobResult
from spillway_connector.plan.worth import LoadGate, RateMeter, WorthPolicy


@dataclass(slots=True)
class _Wait:
    """What one request has cost the tiers so far, over all its lookups."""

    deadline: float | None = None  # from the first answer that made it wait
    rows_promoted: int = 0


@dataclass(slots=True)
class _PromotionBounds:
    in_flight_rows_max: int
    request_rows_max: int
    rows_in_flight: int = 0
    waits: dict[str, _Wait] = field(default_factory=dict)


class SpillwayTieringManager(TieringOffloadingManager):
    """Runs in the EngineCore process on the scheduler thread; nothing here may block.

    Beyond upstream: a request's waiting has one deadline over all its lookups (vllm#49829, #53087), promotions are
    bounded in flight and per request (vllm#49902) and made only while they beat recomputing, a promotion keeps its
    good chunks when others fail, a failed device copy never becomes a hit, and a reset leaves no row pending for ever.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: list[SecondaryTierManager],
        num_rows: int,
        config: ConnectorConfig,
        *,
        enable_events: bool,
        chunk_tokens: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(primary_tier, secondary_tiers, enable_events)
        self._num_rows = num_rows
        self._chunk_bytes = chunk_bytes
        policy = WorthPolicy()
        self.prefill_rate = RateMeter(policy.half_life_seconds, config.prefill_tokens_per_second)
        self._gates = {
            tier: LoadGate(policy, chunk_tokens, chunk_bytes, RateMeter(policy.half_life_seconds))
            for tier in secondary_tiers
        }
        self._not_worth: dict[str, int] = {}
        self._wait_seconds = config.request_wait_seconds
        self._clock = clock
        self._bounds = _PromotionBounds(
            in_flight_rows_max=max(1, int(num_rows * config.promotion_in_flight_fraction)),
            request_rows_max=max(1, int(num_rows * config.promotion_per_request_fraction)),
        )
        self._distrusted: set[OffloadKey] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: in the CPU tier. None: on its way, ask again. False: recompute."""
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        in_cpu_tier = self.primary_tier.lookup(key, req_context)
        if in_cpu_tier:
            return True
        wait = self._bounds.waits.setdefault(req_context.req_id, _Wait())
        if wait.deadline is not None and self._clock() >= wait.deadline:
            return False
        answer = None if in_cpu_tier is None else self._ask_tiers(key, req_context)
        if answer is None and wait.deadline is None:
            wait.deadline = self._clock() + self._wait_seconds
        return answer

    def _ask_tiers(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """None: a tier holds it (promotion queued) or is still looking. False: no tier holds it."""
        looking = False
        for tier in self.secondary_tiers:
            if not self._gates[tier].passes(req_context.req_id, self.prefill_rate, self._clock()):
                self._not_worth[tier.tier_type] = self._not_worth.get(tier.tier_type, 0) + 1
                continue
            held = tier.lookup(key, req_context)
            if held:
                return None if self._initiate_promotion(tier, key, req_context) else False
            looking |= held is None
        return None if looking else False

    def _initiate_promotion(self, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> bool:
        bounds = self._bounds
        wait = bounds.waits.setdefault(req_context.req_id, _Wait())
        if bounds.rows_in_flight >= bounds.in_flight_rows_max or wait.rows_promoted >= bounds.request_rows_max:
            return False
        if not super()._initiate_promotion(tier, key, req_context):
            return False
        bounds.rows_in_flight += 1
        wait.rows_promoted += 1
        return True

    def _process_finished_jobs(self) -> None:
        for tier in self.secondary_tiers:
            for result in tier.get_finished_jobs():
                self._complete(tier, result)

    def _complete(self, tier: SecondaryTierManager, result: JobResult) -> None:
        job = self._transfer_jobs.pop(result.job_id)
        if not job.is_promotion:
            self.primary_tier.complete_read(job.keys, job.req_context)
            return
        self._bounds.rows_in_flight -= len(job.keys)
        arrived: Collection[OffloadKey] = job.keys if result.success else ()
        if isinstance(result, TierJobResult):
            arrived = [key for key in job.keys if key not in result.failed_keys]
            self._gates[tier].load_rate.add(len(arrived) * self._chunk_bytes, result.seconds, self._clock())
        lost = [key for key in job.keys if key not in set(arrived)]
        self.primary_tier.complete_write(arrived, job.req_context, True)
        self.primary_tier.complete_write(lost, job.req_context, False)

    def distrust_store(self, keys: Collection[OffloadKey]) -> None:
        """The device copy of these chunks failed: the coming complete_store must free their rows."""
        self._distrusted.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        failed = self._distrusted.intersection(keys)
        if failed:
            self._distrusted -= failed
            super().complete_store(failed, req_context, success=False)
            keys = [key for key in keys if key not in failed]
        if keys:
            super().complete_store(keys, req_context, success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._bounds.waits.pop(req_context.req_id, None)
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._bounds.waits.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def reset_cache(self) -> None:
        """Forget the CPU tier. Jobs of the shared tiers still touch its rows, so they end first.

        Called between steps by an administrator; waits for at most one load or store deadline per tier.
        """
        self._flush_pending_promotions()
        for tier in self.secondary_tiers:
            if isinstance(tier, SharedTierAdapter):
                tier.drain_jobs()
        self._process_finished_jobs()
        self._distrusted.clear()
        self._bounds.waits.clear()
        self.primary_tier.reset_cache()

    def take_stats(self) -> SpillwayStats:
        """What happened since the last call, as vLLM's stats; called once per engine step."""
        stats = SpillwayStats()
        # Upstream keeps the pool's counts private; both fields exist in 0.23 and versions.py guards the class.
        free = self.primary_tier._get_num_free_blocks()
        stats.add(metrics.CPU_TIER_BLOCKS, self._num_rows - free, "used")
        stats.add(metrics.CPU_TIER_BLOCKS, self._num_rows, "total")
        if self.prefill_rate.per_second is not None:
            stats.add(metrics.PREFILL_RATE, self.prefill_rate.per_second)
        for tier in self.secondary_tiers:
            if isinstance(tier, SharedTierAdapter):
                tier.add_stats(stats)
            if (load_rate := self._gates[tier].load_rate.per_second) is not None:
                stats.add(metrics.TIER_LOAD_RATE, load_rate, tier.tier_type)
            stats.add(metrics.TIER_NOT_WORTH, self._not_worth.pop(tier.tier_type, 0), tier.tier_type)
        return stats
