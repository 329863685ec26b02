"""The defaults of a shared tier's settings. Light to import: no torch, no vLLM, no client library."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from spillway_settings.byte_sizes import ByteCount
from spillway_settings.typed import Count, Positive

REDIS_TTL_SECONDS = 86_400
REDIS_CONNECTIONS = 4
REDIS_PAYLOAD_CONNECTIONS = 1  # for the stripes of one block; more may pay on a network with long round trips


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
    io_threads: Count = 8
    lookup_timeout_seconds: Positive = 0.2
    load_timeout_seconds: Positive = 2.0
    store_timeout_seconds: Positive = 10.0
    load_queue_bytes_max: ByteCount = ByteCount(8 << 30)
    # Six steps of 8,192 tokens of a 14B model, 1.3 GB each. It costs no memory (rows are pinned, not copied, so the CPU
    # tier bounds it, too), and at less than 1.7 GB/s store_queue_seconds_max drops stores before this does.
    store_queue_bytes_max: ByteCount = ByteCount(8 << 30)
    store_queue_seconds_max: Positive = 5.0  # a store that waited longer is dropped: its row is better freed


class TransferLimits(TierLimits, frozen=True, forbid_unknown_fields=True):
    """Every bound of one shared tier."""

    breaker: BreakerPolicy = BreakerPolicy()


DEFAULT_LIMITS = TransferLimits()
