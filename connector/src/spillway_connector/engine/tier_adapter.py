"""vLLM's secondary-tier interface on one side, our SharedTier on the other; nothing is decided here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.config import NvmeTierConfig, RedisTierConfig, parse_tier
from spillway_connector.engine.stats import SpillwayStats
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.breaker import BreakerState
from spillway_connector.tiers.lookups import Lookup
from spillway_connector.tiers.nvme import NvmeTier
from spillway_connector.tiers.redis import RedisTier
from spillway_connector.tiers.redis_endpoint import RedisEndpoint
from spillway_connector.tiers.slab import SlabTier
from spillway_connector.tiers.slab_mode import suitable_mode
from spillway_connector.tiers.stats import TierStats
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfers import SharedTier

if TYPE_CHECKING:
    from spillway_connector.engine.spec import SpillwayOffloadingSpec

logger = logging.getLogger(__name__)

TIER_TYPES = ("nvme", "redis")
_ANSWER = {Lookup.HIT: True, Lookup.MISS: False, Lookup.PENDING: None}


@dataclass
class TierJobResult(JobResult):
    """A job's end, key by key: one lost chunk does not take the others of its job with it."""

    failed_keys: frozenset[bytes] = field(default_factory=frozenset)
    seconds: float = 0.0  # from the submission to the last chunk that was moved, by the thread that moved it


class SharedTierAdapter(SecondaryTierManager):
    """Built by vLLM's tier factory for `{"type": "nvme" | "redis", ...}`; called on the scheduler thread only."""

    def __init__(
        self, offloading_spec: SpillwayOffloadingSpec, primary_kv_view: memoryview, tier_type: str, **options: Any
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        config = parse_tier(tier_type, options)
        geometry = offloading_spec.geometry
        tier = open_tier(config, offloading_spec.namespace, geometry.payload_bytes)
        self._rows = primary_kv_view.cast("B")
        self._shared = SharedTier(
            tier,
            rows=self._rows,
            row_bytes=geometry.row_bytes,
            payload_bytes=geometry.payload_bytes,
            limits=config.limits,
        )
        self._drain_seconds = max(config.limits.load_timeout_seconds, config.limits.store_timeout_seconds)
        self._reported: TierStats | None = None
        logger.info("Shared tier %s: namespace %s", tier_type, offloading_spec.namespace.hex)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return _ANSWER[self._shared.lookup(key, req_context.req_id)]

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._shared.submit_store(job_metadata.job_id, list(job_metadata.keys), job_metadata.block_ids.tolist())

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._shared.submit_load(job_metadata.job_id, list(job_metadata.keys), job_metadata.block_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            TierJobResult(
                outcome.job_id,
                success=outcome.success,
                failed_keys=frozenset(outcome.failed),
                seconds=outcome.seconds,
            )
            for outcome in self._shared.finished()
        ]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._shared.request_finished(req_context.req_id)

    def on_schedule_end(self) -> None:
        self._shared.step_end()

    def drain_jobs(self) -> None:
        """Wait, at most one deadline, until no job of this tier touches a row; outcomes are still to be collected."""
        self._shared.drain(self._drain_seconds)

    def add_stats(self, stats: SpillwayStats) -> None:
        """What this tier did since the last call."""
        now, before = self._shared.snapshot(), self._reported
        self._reported = now
        tier = self.tier_type
        for outcome, count in now.lookups.items():
            more = count - (before.lookups.get(outcome, 0) if before else 0)
            stats.add(metrics.TIER_LOOKUPS, more, tier, outcome.value)
        for (operation, reason), count in now.failures.items():
            more = count - (before.failures.get((operation, reason), 0) if before else 0)
            stats.add(metrics.TIER_FAILURES, more, tier, operation.value, reason)
        for metric, total, reported in (
            (metrics.TIER_READ_BYTES, now.read_bytes, before.read_bytes if before else 0),
            (metrics.TIER_READ_SECONDS, now.read_seconds, before.read_seconds if before else 0),
            (metrics.TIER_WRITTEN_BYTES, now.written_bytes, before.written_bytes if before else 0),
            (metrics.TIER_WRITE_SECONDS, now.write_seconds, before.write_seconds if before else 0),
            (metrics.TIER_EVICTED_FRAMES, now.evicted_frames, before.evicted_frames if before else 0),
        ):
            stats.add(metric, total - reported, tier)
        stats.add(metrics.TIER_RESIDENT_BYTES, now.resident_bytes, tier)
        stats.add(metrics.TIER_QUEUE_BYTES, now.queued_store_bytes, tier)
        for operation, state in now.breakers.items():
            stats.add(metrics.TIER_BREAKER_OPEN, float(state is not BreakerState.CLOSED), tier, operation.value)

    def shutdown(self) -> None:
        self._shared.close()
        self._rows.release()


def open_tier(config: NvmeTierConfig | RedisTierConfig, namespace: Namespace, payload_bytes: int) -> Tier:
    """The backend of one configured tier. A store that is away now is not an error: its breaker waits for it."""
    if config.encryption is None:
        return _open_plain_tier(config, namespace, payload_bytes)
    # Imported here alone: it needs the package `cryptography`, which an engine without encryption may lack.
    from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace

    wanted = config.encryption
    if wanted.key_file is not None:
        key = SealKey.from_file(wanted.key_id, Path(wanted.key_file))
    else:
        assert wanted.key_env is not None
        key = SealKey.from_environment(wanted.key_id, wanted.key_env)
    sealed = sealed_namespace(namespace, key)
    return SealedTier(_open_plain_tier(config, sealed, payload_bytes + SEAL_BYTES), sealed, payload_bytes, key)


def _open_plain_tier(config: NvmeTierConfig | RedisTierConfig, namespace: Namespace, payload_bytes: int) -> Tier:
    if isinstance(config, NvmeTierConfig):
        mode = suitable_mode(config.path) if config.mode == "auto" else config.mode
        kind = SlabTier if mode == "slab" else NvmeTier
        return kind(namespace, payload_bytes, config.path, max_bytes=config.max_bytes)
    endpoint = RedisEndpoint.from_url(
        config.url,
        username=_secret(config.username_env),
        password=_secret(config.password_env),
        password_file=config.password_file,
        tls_ca_file=config.tls_ca_file,
        tls_certificate_file=config.tls_certificate_file,
        tls_key_file=config.tls_key_file,
    )
    return RedisTier(
        namespace,
        payload_bytes,
        endpoint,
        ttl_seconds=config.ttl_seconds,
        connections=config.connections,
        payload_connections=config.payload_connections,
    )


def _secret(variable: str | None) -> str | None:
    """Raises ConfigError when the named environment variable is not set: an empty login is never meant."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"the environment variable {variable} is named for the Redis login, but it is not set")
    return os.environ[variable]
