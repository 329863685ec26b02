"""The tiering manager in vLLM 0.23: its answers, its jobs, its statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobMetadata, SecondaryTierManager

from spillway_connector.engine.manager.prefix_lookup import ChunkState
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.v023.stats import SpillwayStats

_ANSWER = {ChunkState.READY: True, ChunkState.COMING: None, ChunkState.LOOKING: None, ChunkState.ABSENT: False}


class SpillwayTieringManager(TieringManager):
    """EngineCore process, scheduler thread; no method blocks."""

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """vLLM's contract, except that None turns into False at the request's deadline."""
        return _ANSWER[self.look_up(key, req_context)]

    @override
    def _holds(self, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return tier.lookup(key, req_context)

    @override
    def _make_job(
        self, job_id: int, keys: Collection[OffloadKey], rows: Sequence[int], is_promotion: bool, context: ReqContext
    ) -> JobMetadata:
        return JobMetadata(job_id, keys, np.asarray(rows, dtype=np.int64), is_promotion, context)

    @override
    def on_schedule_end(self) -> None:
        self._end_step()
        for tier in self.secondary_tiers:
            tier.on_schedule_end()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.primary_tier.take_events()

    def take_stats(self) -> SpillwayStats | None:
        samples = self.take_samples()
        return None if samples is None else SpillwayStats(data=samples.data)
