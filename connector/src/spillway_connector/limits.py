"""The defaults of a shared tier's settings. Light to import: no torch, no vLLM, no client library."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from spillway_settings.byte_sizes import ByteCount
from spillway_settings.typed import Count, Positive
from spillway_settings.values.offload import SharedTier

_CHART = SharedTier()
REDIS_TTL_SECONDS = _CHART.redis.ttl_seconds
REDIS_CONNECTIONS = _CHART.redis.connections
REDIS_PAYLOAD_CONNECTIONS = (
    _CHART.redis.payload_connections
)  # for the stripes of one block; more may pay on a network with long round trips


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """failures_to_open: in a row. The rest lasts first_rest_seconds * 2**n, at most longest_rest_seconds."""

    failures_to_open: int = 3
    first_rest_seconds: float = 1.0
    longest_rest_seconds: float = 30.0
    probe_seconds: float = 15.0  # a probe that never reports is given up after this long


class TierLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator may set of a shared tier's bounds. The timeouts count from the submission of a batch or job."""

    # Twice what keeps a disk busy: half of them may be reading while the others verify and copy; of writes the same.
    # Each has a buffer of one chunk.
    io_threads: Count = _CHART.io_threads
    lookup_timeout_seconds: Positive = _CHART.lookup_timeout_seconds
    load_timeout_seconds: Positive = _CHART.load_timeout_seconds
    store_timeout_seconds: Positive = _CHART.store_timeout_seconds
    load_queue_bytes_max: ByteCount = ByteCount.read(_CHART.load_queue_bytes_max)
    # Six steps of 8,192 tokens of a 14B model, 1.3 GB each. It costs no memory (rows are pinned, not copied, so the CPU
    # tier bounds it, too), and at less than 1.7 GB/s store_queue_seconds_max drops stores before this does.
    store_queue_bytes_max: ByteCount = ByteCount.read(_CHART.store_queue_bytes_max)
    # a store that waited longer is dropped: its row is better freed
    store_queue_seconds_max: Positive = _CHART.store_queue_seconds_max


class TransferLimits(TierLimits, frozen=True, forbid_unknown_fields=True):
    """Every bound of one shared tier."""

    breaker: BreakerPolicy = BreakerPolicy()


DEFAULT_LIMITS = TransferLimits()
