"""The bounds of a shared tier under the connector's own keys; defaults are those of the chart's model.

Light to import: no torch, no vLLM, no client library.
"""

from __future__ import annotations

from dataclasses import dataclass

from spillway_settings.byte_sizes import ByteCount
from spillway_settings.keys import own_keys
from spillway_settings.values.offload import SharedTier, TransferSettings

_CHART = SharedTier()
REDIS_TTL_SECONDS = _CHART.redis.ttl_seconds
REDIS_CONNECTIONS = _CHART.redis.connections
REDIS_PAYLOAD_CONNECTIONS = _CHART.redis.payload_connections  # for the stripes of one block
S3_CONNECTIONS = _CHART.s3.connections


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """failures_to_open: failures in a row that open it. The rest lasts first_rest_seconds * 2**n, at most
    longest_rest_seconds."""

    failures_to_open: int = 3
    first_rest_seconds: float = 1.0
    longest_rest_seconds: float = 30.0
    probe_seconds: float = 15.0  # a probe that never reports is given up after this long


@own_keys
class TierLimits(TransferSettings, frozen=True):
    """The bounds of a shared tier that operators can set. The timeouts count from the submission of a batch or job."""

    load_queue_bytes_max: ByteCount = ByteCount.read(_CHART.load_queue_bytes_max)
    store_queue_bytes_max: ByteCount = ByteCount.read(_CHART.store_queue_bytes_max)


class TransferLimits(TierLimits, frozen=True, forbid_unknown_fields=True):
    """Every bound of one shared tier."""

    breaker: BreakerPolicy = BreakerPolicy()


DEFAULT_LIMITS = TransferLimits()
