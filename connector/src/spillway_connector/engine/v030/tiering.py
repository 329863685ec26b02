"""The tiering manager in vLLM 0.30 and later: its answers, its jobs, where a load came from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.manager.prefix_lookup import ChunkState
from spillway_connector.engine.manager.promotion import Promotion
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.v030.stats import connector_stats


def _host_source() -> Any:
    """CacheHitSource.HOST; None with 0.30, which does not ask where a hit came from."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


HOST_SOURCE = _host_source()
_ANSWER = {
    ChunkState.READY: LookupResult.HIT,
    ChunkState.COMING: LookupResult.HIT_PENDING,
    ChunkState.LOOKING: LookupResult.RETRY,
    ChunkState.ABSENT: LookupResult.MISS,
}
_HELD = {
    LookupResult.HIT: True,
    LookupResult.HIT_PENDING: None,
    LookupResult.RETRY: None,
    LookupResult.MISS: False,
}


class SpillwayTieringManager(TieringManager):
    """EngineCore process, scheduler thread; no method blocks."""

    _of_workers: Samples | None = None  # to be reported with the next statistics

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Request -> the chunks that were promoted for it, and their tiers.
        self._load_sources: dict[str, dict[OffloadKey, Any]] = {}

    @override
    def _submit_promotion(self, tier: SecondaryTierManager, promotion: Promotion) -> None:
        if HOST_SOURCE is not None:
            sources = self._load_sources.setdefault(promotion.context.req_id, {})
            sources.update(dict.fromkeys(promotion.keys, tier.cache_hit_source))
        super()._submit_promotion(tier, promotion)

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """vLLM's contract since 0.32, for a chunk that is a hit: a CacheHitSource. For later requests than the one it
        was promoted for, it is in the CPU tier."""
        return self._load_sources.get(req_context.req_id, {}).get(key, HOST_SOURCE)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._load_sources.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    @override
    def reset_cache(self) -> None:
        self._load_sources.clear()
        super().reset_cache()

    def add_of_workers(self, samples: Samples) -> None:
        """Add what workers have measured: since 0.30 only the scheduler's process reports statistics, and workers send
        theirs with their metadata."""
        if self._of_workers is None:
            self._of_workers = Samples()
        self._of_workers.merge(samples.samples())

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        """vLLM's contract: what happened since the last call; None if nothing did. Called once per engine step."""
        samples, of_workers = self.take_samples(), self._of_workers
        if of_workers is not None:
            self._of_workers = None
            if samples is not None:
                of_workers.merge(samples.samples())
            samples = of_workers
        return None if samples is None else connector_stats(samples)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """vLLM's contract, except that at the request's deadline everything but a HIT turns into a MISS."""
        return _ANSWER[self.look_up(key, req_context)]

    @override
    def _holds(self, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return _HELD[tier.lookup(key, req_context)]

    @override
    def _may_load(self, tier: SecondaryTierManager, req_context: ReqContext) -> bool:
        """Whether the request's `kv_load_tiers` allows the tier."""
        return req_context.load_tier_filter.allows(tier.medium, tier.locality)

    @override
    def _make_job(
        self, job_id: int, keys: Collection[OffloadKey], rows: Sequence[int], is_promotion: bool, context: ReqContext
    ) -> TransferJob:
        return TransferJob(job_id, keys, np.asarray(rows, dtype=np.int32), is_promotion, context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._end_step()
        for tier in self.secondary_tiers:
            tier.on_schedule_end(context)

    @override
    def has_pending_work(self) -> bool:
        """Whether the engine must step on without requests: not for stores to Spillway's tiers, which end on threads of
        their own."""
        return any(tier.has_pending_work() for tier in self.secondary_tiers)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        yield from self.primary_tier.take_events()
        for tier in self.secondary_tiers:
            yield from tier.take_events()
