"""`SpillwayNvmeTier` and `SpillwayRedisTier`: Spillway's shared tiers for vLLM's TieringOffloadingSpec.

In `kv_connector_extra_config`:

    "secondary_tiers": [{"type": "spillway-nvme", "path": "/kv", "max_bytes": "500 GiB"}]

or, where the plugin is not loaded, with the class name and `"module_path": "spillway_connector.engine.stock.tiers"`.
The other keys are those of Spillway's own connector (config.parse_tier), and vLLM's `backpressure` and `locality`.

The contract is vLLM's `SecondaryTierManager`, which is the same in 0.30, 0.32 and 0.33 in all that is used here; a test
per version compares it with the wheel. All methods are called by one thread at a time (0.33: under the manager's lock).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, cast

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from spillway_connector.config import S3TierConfig, TierConfig, parse_tier
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.requests.tenancy import tenant_of
from spillway_connector.engine.shared_tiers.open_tier import open_tier
from spillway_connector.engine.shared_tiers.tier_stats import REPORTED, TierReport
from spillway_connector.engine.stock.engine_objects import EngineObjects, engine_objects
from spillway_connector.engine.stock.namespace import stock_namespace
from spillway_connector.engine.v030.stats import connector_stats, metric_definitions
from spillway_connector.engine.v030.tier_adapter import ANSWER, remote_store_source
from spillway_connector.errors import ConfigError, WeightsUnknown
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_connector.transfer.stats import Operation

logger = logging.getLogger(__name__)

# vLLM 0.30 neither passes a detector of backpressure nor takes the bytes of a job; 0.32 does both.
_REPORTS_BYTES = "transfer_bytes" in JobResult.__dataclass_fields__


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The definitions of what a TierReport fills in, by name, for vLLM to register in its API server.

    The others are of Spillway's own connector: its device copies, CPU tier and load gate.
    """
    defined = metric_definitions()
    return {metric.name: defined[metric.name] for metric in REPORTED}


def take_stats(report: TierReport) -> OffloadingConnectorStats | None:
    """The changes since the last call; None if nothing did."""
    samples = Samples()
    report.add_to(samples)
    return connector_stats(samples)


class StockTier(SecondaryTierManager):
    """A shared tier behind vLLM's own tiering manager.

    A tier that fails, hangs or holds damaged bytes answers with misses: each job is reported exactly once, by its
    deadline, and the keys of a failed load are misses before it is reported, so that no request asks for them again.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    DEFAULT_LOCALITY: ClassVar[Locality]

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """vLLM's tier factory passes the entry of `secondary_tiers` as keywords. Raises ConfigError."""
        of_base = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **of_base)
        self.locality = self._locality(locality)
        config = self._parse(options)
        if config.below is not None:
            raise ConfigError(f"secondary tier {tier_type!r}: below: vLLM's own tiering has no such thing; remove it")
        engine = engine_objects(offloading_spec)
        bounds_tenants = not isinstance(config, S3TierConfig) and config.tenant_max_bytes is not None
        if bounds_tenants and engine.scheduler_half is None:
            raise ConfigError(
                f"secondary tier {tier_type!r}: tenant_max_bytes: this connector does not show a request's cache salt, "
                "so tenants cannot be distinguished; remove the setting"
            )
        assert primary_kv_view.strides is not None
        self._row_bytes = primary_kv_view.strides[0]
        self._engine: EngineObjects | None = engine
        self._rows = primary_kv_view.cast("B")
        self._limits = config.limits
        not_shared = None
        try:
            namespace = stock_namespace(offloading_spec, engine, self._row_bytes)
            tier = open_tier(config, namespace, self._row_bytes)
        except WeightsUnknown as reason:  # the engine serves without the tier
            not_shared = str(reason)
            namespace = Namespace.of({"weights": "unknown"})
            tier = MemoryTier(namespace, self._row_bytes, MemoryStore(0))
        self._shared = SharedTier(
            tier,
            rows=self._rows,
            row_bytes=self._row_bytes,
            payload_bytes=self._row_bytes,
            limits=config.limits,
        )
        self._report = TierReport(tier_type, self._shared)
        if not_shared is None:
            logger.info("Shared tier %s in vLLM's own tiering: namespace %s", tier_type, namespace.hex)
        else:
            self._shared.weights_changed()  # neither loads nor stores
            logger.error("Shared tier %s rests: %s", tier_type, not_shared)

    @classmethod
    @abstractmethod
    def _parse(cls, options: dict[str, Any]) -> TierConfig:
        """The tier's settings. Raises ConfigError."""

    def _locality(self, given: str | None) -> Locality:
        if given is None:
            return self.DEFAULT_LOCALITY
        try:
            return Locality(given)
        except ValueError:
            known = ", ".join(member.value for member in Locality)
            raise ConfigError(f"secondary tier {self.tier_type!r}: locality: {given!r} is not one of {known}") from None

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return ANSWER[self._shared.lookup(key, req_context.req_id)]

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        # vLLM's context of a new request has no keys, and a request whose chunks are in no tier stores them: a full
        # tier admits what was computed before.
        self._shared.count_request(keys)
        self._shared.submit_store(
            job_metadata.job_id,
            keys,
            job_metadata.chunk_ids.tolist(),
            tenant=self._tenant_of(job_metadata.req_context.req_id),
        )

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        self._shared.submit_load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(outcome) for outcome in self._shared.finished()]

    def _result(self, outcome: JobOutcome) -> JobResult:
        result = JobResult(outcome.job_id, success=outcome.success, transfer_time=outcome.seconds or None)
        if _REPORTS_BYTES:
            result.transfer_bytes = outcome.moved * self._row_bytes
        if outcome.operation is Operation.LOAD and outcome.failed and outcome.done:
            result.successful_keys = cast(tuple[OffloadKey, ...], outcome.done)
        return result

    @override
    def has_pending_work(self) -> bool:
        """Whether a job or a lookup is open. A lookup counts for the breaker even after its request has ended."""
        return self._shared.has_work()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._shared.request_finished(req_context.req_id)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._shared.step_end()

    @override
    def drain_jobs(self) -> None:
        """vLLM is about to drop the rows: at a reset of all caches, which also precedes a change of the weights.

        Blocks until no thread touches a row, at most until the deadline of the jobs under way. Which of the reasons it
        is, vLLM does not say, and blocks of other weights must not be loaded: the tier rests until the engine restarts.
        From then on `weights_version` identifies the weights, also those that had another name.
        """
        longest = max(self._limits.load_timeout_seconds, self._limits.store_timeout_seconds)
        while not self._shared.drain(longest):
            longest = 0.0  # a copy from memory to memory has not ended yet
        if not self._shared.snapshot().weights_changed:
            self._shared.weights_changed()
            logger.warning(
                "Shared tier %s rests until this engine restarts: its caches were reset, and vLLM does not say whether "
                "the weights change. If they do, restart it with a weights_version in kv_connector_extra_config: a new "
                "one, or that of an earlier state of them",
                self.tier_type,
            )

    @override
    def shutdown(self) -> None:
        self._shared.close()
        self._rows.release()
        self._engine = None  # and with it the scheduler half, which holds this tier

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return tier_metric_definitions()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        return take_stats(self._report)

    def _tenant_of(self, request_id: str) -> bytes:
        return NO_TENANT if self._engine is None else tenant_of(self._engine.salt_of(request_id))


class SpillwayNvmeTier(StockTier):
    """A directory on a local disk or a shared file system."""

    DEFAULT_LOCALITY = Locality.LOCAL

    @classmethod
    @override
    def _parse(cls, options: dict[str, Any]) -> TierConfig:
        return parse_tier("nvme", options)


class SpillwayRedisTier(StockTier):
    """Redis or Valkey: one server, Sentinel or Cluster."""

    DEFAULT_LOCALITY = Locality.REMOTE
    cache_hit_source: ClassVar[Any] = remote_store_source()

    @classmethod
    @override
    def _parse(cls, options: dict[str, Any]) -> TierConfig:
        return parse_tier("redis", options)
