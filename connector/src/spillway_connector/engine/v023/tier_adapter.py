"""Adapts SharedTier to vLLM's secondary-tier interface; no policy."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobMetadata, JobResult, SecondaryTierManager

from spillway_connector.config import NvmeTierConfig, RedisTierConfig, parse_tier
from spillway_connector.engine.tenancy import tenant_of_context
from spillway_connector.engine.tier_stats import TierReport
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.layout_choice import Mode, suitable_mode, unused_layouts
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer.lookups import Answers, Lookup
from spillway_connector.transfer.shared_tier import SharedTier

if TYPE_CHECKING:
    from spillway_connector.engine.v023.spec import SpillwayOffloadingSpec

logger = logging.getLogger(__name__)

TIER_TYPES = ("nvme", "redis")
_ANSWER = {Lookup.HIT: True, Lookup.MISS: False, Lookup.PENDING: None}


@dataclass
class TierJobResult(JobResult):
    """A job's end, key by key: one lost chunk does not take the others of its job with it."""

    failed_keys: frozenset[bytes] = field(default_factory=frozenset)
    seconds: float = 0.0  # from the submission to the last chunk that was moved, by the thread that moved it


class PrefixTier(SecondaryTierManager):
    """A tier that answers about a whole prefix at once.

    answered_requests: requests with a PENDING chunk that may have another answer now.
    """

    answered_requests: ChangeLog[str]

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether the tier accepts lookups now; while False it answers MISS without being asked."""

    def take_arrived(self) -> Iterable[tuple[int, list[OffloadKey]]]:
        """(job, chunks) of loads under way: those loaded since the last call, each once; their jobs still end."""
        return ()

    @abstractmethod
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        """What lookup() would return for each of `keys` (at least one), up to and including the first MISS."""


class SharedTierAdapter(PrefixTier):
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
        self.answered_requests = self._shared.answered_requests
        self.report = TierReport(tier_type, self._shared)
        logger.info("Shared tier %s: namespace %s", tier_type, offloading_spec.namespace.hex)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return _ANSWER[self._shared.lookup(key, req_context.req_id)]

    @property
    def open(self) -> bool:
        return self._shared.open

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Answers:
        return self._shared.lookup_prefix(keys, req_context.req_id)

    def take_arrived(self) -> Iterable[tuple[int, list[OffloadKey]]]:
        return cast(list[tuple[int, list[OffloadKey]]], self._shared.arrived())

    def count_request(self, keys: Sequence[OffloadKey]) -> None:
        self._shared.count_request(keys)

    def weights_changed(self) -> None:
        self._shared.weights_changed()

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._shared.submit_store(
            job_metadata.job_id,
            list(job_metadata.keys),
            job_metadata.block_ids.tolist(),
            tenant=tenant_of_context(job_metadata.req_context),
        )

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._shared.submit_load(job_metadata.job_id, list(job_metadata.keys), job_metadata.block_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        outcomes = self._shared.finished()
        if not outcomes:  # most steps
            return ()
        return [
            TierJobResult(
                outcome.job_id,
                success=outcome.success,
                failed_keys=frozenset(outcome.failed),
                seconds=outcome.seconds,
            )
            for outcome in outcomes
        ]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._shared.request_finished(req_context.req_id)

    def on_schedule_end(self) -> None:
        self._shared.step_end()

    def shutdown(self) -> None:
        self._shared.close()
        self._rows.release()


def open_tier(config: NvmeTierConfig | RedisTierConfig, namespace: Namespace, payload_bytes: int) -> Tier:
    """The backend of one configured tier. A store that cannot be reached now is not an error: its breaker probes it."""
    if config.encryption is None:
        return _open_plain_tier(config, namespace, payload_bytes)
    # Imported only here: it needs the package `cryptography`, which an engine without encryption may lack.
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
        kind = SlabTier if _layout_of(config) == "slab" else FileTier
        return kind(
            namespace,
            payload_bytes,
            Path(config.path),
            max_bytes=config.max_bytes,
            ttl_seconds=config.ttl_seconds,
            tenant_max_bytes=config.tenant_max_bytes,
            transfers_at_once=max(1, config.limits.io_threads // 2),
        )
    # Imported here alone: redis-py takes 25 MB and half a second.
    from spillway_connector.tiers.redis.tier import RedisTier

    endpoint = RedisEndpoint.from_url(
        config.url,
        username=_secret(config.username_env),
        password=_secret(config.password_env),
        password_file=config.password_file,
        tls_ca_file=config.tls.ca_file,
        tls_certificate_file=config.tls.certificate_file,
        tls_key_file=config.tls.key_file,
    )
    return RedisTier(
        namespace,
        payload_bytes,
        endpoint,
        ttl_seconds=config.ttl_seconds,
        connections=config.connections,
        payload_connections=config.payload_connections,
        tenant_max_bytes=config.tenant_max_bytes,
    )


def _layout_of(config: NvmeTierConfig) -> Mode:
    """Which of the two layouts; logged, so that an operator can compare it with the disk."""
    mode: Mode
    folder = Path(config.path)
    if config.mode == "auto":
        mode, reason = suitable_mode(folder)
        logger.info("NVMe tier %s: layout %s: %s", config.path, mode, reason)
    else:
        mode = "slab" if config.mode == "slab" else "files"
        logger.info("NVMe tier %s: layout %s, as asked for", config.path, mode)
    others = unused_layouts(folder, mode)
    if others:
        logger.warning(
            "NVMe tier %s: it also holds blocks in the layout %s, which this engine neither uses nor removes; give "
            "another path, or empty the directory while no engine uses it",
            config.path,
            " and ".join(others),
        )
    return mode


def _secret(variable: str | None) -> str | None:
    """Raises ConfigError when the named environment variable is not set: an empty login is never meant."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"the environment variable {variable} is named for the Redis login, but it is not set")
    return os.environ[variable]
