"""Adapts SharedTier to the secondary-tier interface of vLLM 0.30 and later, for the connector's own manager.

Tiers for vLLM's own tiering spec are in engine/stock.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.engine.shared_tiers.prefix_tier import ChunkOwner, SharedTierBase
from spillway_connector.errors import ConfigError
from spillway_connector.transfer.lookups import Lookup
from spillway_settings.wire import STORE_TYPES

ANSWER = {Lookup.HIT: LookupResult.HIT, Lookup.MISS: LookupResult.MISS, Lookup.PENDING: LookupResult.RETRY}
_REMOTE = {"redis", "s3"}  # stores on another machine


class SharedTierAdapter(SharedTierBase):
    """Names and answers of vLLM 0.30 and later."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: ChunkOwner,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        if backpressure_detector is not None:
            raise ConfigError(
                f"secondary tier {tier_type!r}: backpressure: this connector's manager bounds stores by itself "
                "(limits); remove the setting"
            )
        super().__init__(cast(Any, offloading_spec), primary_kv_view, tier_type)
        try:
            own = Locality.REMOTE if tier_type in _REMOTE else Locality.LOCAL
            self.locality = own if locality is None else Locality(locality)
        except ValueError:
            known = ", ".join(member.value for member in Locality)
            raise ConfigError(f"secondary tier {tier_type!r}: locality: {locality!r} is not one of {known}") from None
        self._open(offloading_spec, primary_kv_view, tier_type, options)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return ANSWER[self._shared.lookup(key, req_context.req_id)]

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        self._store(job.job_id, job.keys, job.chunk_ids.tolist(), job.req_context)

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        self._load(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids.tolist(), job_metadata.req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._shared.step_end()


def remote_store_source() -> Any:
    """Return vLLM's source for hits in a remote store (0.32 and later); the medium, STORAGE, would count as disk."""
    return getattr(SecondaryTierManager, "cache_hit_source", None)


class RemoteTierAdapter(SharedTierAdapter):
    """An adapter whose store is on another machine."""

    cache_hit_source: ClassVar[Any] = remote_store_source()


def register_tiers() -> None:
    """Make the short names known to vLLM's tier factory. Idempotent."""
    for tier_type in STORE_TYPES:
        if tier_type not in SecondaryTierFactory._registry:
            adapter = RemoteTierAdapter if tier_type in _REMOTE else SharedTierAdapter
            SecondaryTierFactory.register_tier(tier_type, __name__, adapter.__name__)
