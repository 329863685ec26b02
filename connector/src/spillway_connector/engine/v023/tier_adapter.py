"""Adapts SharedTier to the secondary-tier interface of vLLM 0.23."""

from __future__ import annotations

from typing import Any, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobMetadata

from spillway_connector.engine.shared_tiers.prefix_tier import ChunkOwner, SharedTierBase
from spillway_connector.transfer.lookups import Lookup

_ANSWER = {Lookup.HIT: True, Lookup.MISS: False, Lookup.PENDING: None}


class SharedTierAdapter(SharedTierBase):
    """Names and answers of vLLM 0.23."""

    def __init__(
        self, offloading_spec: ChunkOwner, primary_kv_view: memoryview, tier_type: str, **options: Any
    ) -> None:
        super().__init__(cast(Any, offloading_spec), primary_kv_view, tier_type)
        self._open(offloading_spec, primary_kv_view, tier_type, options)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return _ANSWER[self._shared.lookup(key, req_context.req_id)]

    @override
    def submit_store(self, job_metadata: JobMetadata) -> None:
        job = job_metadata
        self._store(job.job_id, job.keys, job.block_ids.tolist(), job.req_context)

    @override
    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._load(job_metadata.job_id, job_metadata.keys, job_metadata.block_ids.tolist(), job_metadata.req_context)

    @override
    def on_schedule_end(self) -> None:
        self._shared.step_end()
