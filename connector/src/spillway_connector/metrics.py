"""Every metric of the connector: name, kind, help and labels. vLLM adds `model_name` and `engine`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, eq=False)  # each is one object: its hash is its address
class Metric:
    name: str  # without the `_total` that Prometheus counters end in
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


DEVICE_COPY_BYTES = Metric(
    "spillway_device_copy_bytes", Kind.COUNTER, "KV bytes copied between device and CPU tier.", ("direction",)
)
KV_GROUP_BYTES = Metric(
    "spillway_kv_group_bytes",
    Kind.COUNTER,
    "Bytes of rows of the CPU tier that chunks of a KV group were stored to and loaded from; absent with one group.",
    ("group", "direction"),
)
DEVICE_COPY_SECONDS = Metric(
    "spillway_device_copy_seconds", Kind.COUNTER, "Seconds spent copying between device and CPU tier.", ("direction",)
)
DEVICE_COPY_FAILURES = Metric(
    "spillway_device_copy_failures", Kind.COUNTER, "Copies that failed; the request recomputed.", ("direction",)
)
DEVICE_COPY_PATH = Metric(
    "spillway_device_copy_path", Kind.GAUGE, "1 for the way device copies go: batched calls or a loop.", ("path",)
)
HOST_MEMORY_PINNED = Metric(
    "spillway_host_memory_pinned",
    Kind.GAUGE,
    "1 when the device's runtime takes the CPU tier for page-locked; 0: each copy blocks the model.",
    ("method",),
)
CPU_TIER_BLOCKS = Metric(
    "spillway_cpu_tier_blocks",
    Kind.GAUGE,
    "Chunks of the CPU tier: used, of these retained for sessions that go on or kept for waiting requests, in total.",
    ("state",),
)
CPU_TIER_JOINED = Metric(
    "spillway_cpu_tier_joined",
    Kind.GAUGE,
    "With the CPU tier of a node, 1 while the engine uses it; 0: it has left it and has no CPU tier.",
)
CPU_TIER_SESSIONS_ENDED = Metric(
    "spillway_cpu_tier_sessions_ended",
    Kind.COUNTER,
    "Sessions whose last request ended, so that what they alone used leaves the CPU tier first.",
)
HELD_BLOCKS = Metric(
    "spillway_held_blocks",
    Kind.GAUGE,
    "Chunks whose retention clients asked for and whose time has not passed: they leave the CPU tier last.",
)
ANSWERS_KEPT = Metric(
    "spillway_answers_kept",
    Kind.GAUGE,
    "With generated_tokens: auto, 1 while the KV of generated tokens is kept; 0: clients send too few answers back.",
)
ANSWERS_SENT_BACK = Metric(
    "spillway_answers_sent_back_share",
    Kind.GAUGE,
    "With generated_tokens: auto, the share of the last answers that clients sent back as they were.",
)
CPU_TIER_RESETS = Metric(
    "spillway_cpu_tier_resets",
    Kind.COUNTER,
    "Resets of the CPU tier that were asked for: done, or refused because requests held device blocks.",
    ("outcome",),
)
PROCESS_SETTING = Metric(
    "spillway_process_setting",
    Kind.GAUGE,
    "1 for each setting and version as the process that obeys it holds it: EngineCore, or a worker.",
    ("process", "setting", "value"),
)
TIER_LOOKUPS = Metric(
    "spillway_tier_lookups", Kind.COUNTER, "Chunks asked of a shared tier, by answer.", ("tier", "outcome")
)
TIER_READ_BYTES = Metric("spillway_tier_read_bytes", Kind.COUNTER, "KV bytes loaded from a shared tier.", ("tier",))
TIER_READ_SECONDS = Metric(
    "spillway_tier_read_seconds", Kind.COUNTER, "Thread seconds spent loading from a shared tier.", ("tier",)
)
TIER_WRITTEN_BYTES = Metric("spillway_tier_written_bytes", Kind.COUNTER, "KV bytes stored in a shared tier.", ("tier",))
TIER_WRITE_SECONDS = Metric(
    "spillway_tier_write_seconds", Kind.COUNTER, "Thread seconds spent storing in a shared tier.", ("tier",)
)
TIER_FAILURES = Metric(
    "spillway_tier_failures",
    Kind.COUNTER,
    "Operations of a shared tier that failed, by the reason: of requests, of demotions, and of the tier's upkeep.",
    ("tier", "operation", "reason"),
)
TIER_SHED = Metric(
    "spillway_tier_shed",
    Kind.COUNTER,
    "Chunks dropped because more was to be moved at once than the tier can move in time; the tier did not fail.",
    ("tier", "operation", "reason"),
)
TIER_HELD_BLOCKS = Metric(
    "spillway_tier_held_blocks",
    Kind.GAUGE,
    "Chunks whose retention clients asked for and whose time has not passed: this engine renews them in a shared tier.",
    ("tier",),
)
TIER_RESIDENT_BYTES = Metric(
    "spillway_tier_resident_bytes", Kind.GAUGE, "Bytes a shared tier holds, if it can tell.", ("tier",)
)
TIER_BREAKER_OPEN = Metric(
    "spillway_tier_breaker_open",
    Kind.GAUGE,
    "1 while an operation of a shared tier rests because it kept failing.",
    ("tier", "operation"),
)
TIER_EVICTED_FRAMES = Metric(
    "spillway_tier_evicted_frames",
    Kind.COUNTER,
    "Frames this engine removed from a shared tier although nothing was wrong with them, by reason.",
    ("tier", "reason"),
)
TIER_QUARANTINED = Metric(
    "spillway_tier_quarantined_files",
    Kind.COUNTER,
    "Files of a shared tier, apart from frames, that were damaged: renamed and written again.",
    ("tier", "reason"),
)
TIER_QUEUE_BYTES = Metric(
    "spillway_tier_queue_bytes", Kind.GAUGE, "Bytes waiting to be stored in a shared tier.", ("tier",)
)

TIER_QUEUE_AGE = Metric(
    "spillway_tier_queue_age_seconds", Kind.GAUGE, "How long the oldest store has waited for a thread.", ("tier",)
)
TIER_DEADLINES_EXPIRED = Metric(
    "spillway_tier_deadlines_expired",
    Kind.COUNTER,
    "Lookup batches, load jobs and store jobs that were given up at their deadline.",
    ("tier", "operation"),
)
TIER_MISSES = Metric(
    "spillway_tier_misses",
    Kind.COUNTER,
    "Chunks that were wanted and did not come from a shared tier, by reason; of a prefix, the first.",
    ("tier", "reason"),
)
TIER_STORES_SKIPPED = Metric(
    "spillway_tier_stores_skipped",
    Kind.COUNTER,
    "Chunks not handed to a shared tier although nothing failed, by reason.",
    ("tier", "reason"),
)
TIER_STORES_WAIT = Metric(
    "spillway_tier_stores_wait",
    Kind.GAUGE,
    "1 while a shared tier is given new chunks later, because it is too slow or loads from it do not pay; 0: at once.",
    ("tier",),
)
TIER_OFFERED = Metric(
    "spillway_tier_offered_chunks",
    Kind.COUNTER,
    "Chunks that the CPU tier has received for a shared tier: given to it at once, deferred, or given to it later.",
    ("tier", "outcome"),
)
TIER_REQUESTS = Metric(
    "spillway_tier_requests",
    Kind.COUNTER,
    "Requests to an object store, which cost money, by kind.",
    ("tier", "kind"),
)
TIER_DEMOTIONS = Metric(
    "spillway_tier_demotions",
    Kind.COUNTER,
    "Idle chunks of the shared tier above, by what became of them in this tier below it.",
    ("tier", "outcome"),
)
TIER_READY = Metric(
    "spillway_tier_ready",
    Kind.GAUGE,
    "1 while a shared tier can be used: it answered when it was last asked how much it holds, every 10 s.",
    ("tier",),
)
TIER_WEIGHTS_CHANGED = Metric(
    "spillway_tier_weights_changed",
    Kind.GAUGE,
    "1 while a shared tier rests because the model's weights were changed in place.",
    ("tier",),
)

PREFILL_RATE = Metric(
    "spillway_prefill_tokens_per_second", Kind.GAUGE, "Measured prefill rate, against which loads are judged."
)
TIER_LOAD_RATE = Metric(
    "spillway_tier_load_bytes_per_second", Kind.GAUGE, "Measured rate of loads as requests see it.", ("tier",)
)
TIER_LOADS_PAY = Metric(
    "spillway_tier_loads_pay",
    Kind.GAUGE,
    "1 while loads from a shared tier beat computing; 0: requests compute instead, but for one that measures it again.",
    ("tier",),
)
PROMOTED_AHEAD = Metric(
    "spillway_promoted_ahead_blocks",
    Kind.COUNTER,
    "Chunks promoted for requests whose turn had not come, and what became of them: found there at the turn (used), "
    "evicted before it, or their request ended without one (unused).",
    ("outcome",),
)
LATE_STORES = Metric(
    "spillway_late_store_blocks",
    Kind.COUNTER,
    "Chunks to be stored in the CPU tier when the device was about to give them up: stored, or lost, because vLLM took "
    "the block before its copy had ended, or the copy failed.",
    ("outcome",),
)
SETTLED = Metric(
    "spillway_settled_blocks",
    Kind.COUNTER,
    "Chunks that an engine without work has stored although its device kept them.",
)
MEETINGS = Metric(
    "spillway_meetings",
    Kind.COUNTER,
    "Prompts computed from their front while a slow tier loads their end: begun (planned), continued behind the load "
    "(met), or computed to their end or given up (abandoned).",
    ("outcome",),
)
TIER_NOT_WORTH = Metric(
    "spillway_tier_not_worth", Kind.COUNTER, "Chunks not asked of a tier because recomputing is faster.", ("tier",)
)

ALL = (
    DEVICE_COPY_BYTES,
    DEVICE_COPY_SECONDS,
    DEVICE_COPY_FAILURES,
    KV_GROUP_BYTES,
    DEVICE_COPY_PATH,
    HOST_MEMORY_PINNED,
    CPU_TIER_BLOCKS,
    CPU_TIER_SESSIONS_ENDED,
    HELD_BLOCKS,
    ANSWERS_KEPT,
    ANSWERS_SENT_BACK,
    CPU_TIER_JOINED,
    CPU_TIER_RESETS,
    PROCESS_SETTING,
    TIER_LOOKUPS,
    TIER_READ_BYTES,
    TIER_READ_SECONDS,
    TIER_WRITTEN_BYTES,
    TIER_WRITE_SECONDS,
    TIER_FAILURES,
    TIER_SHED,
    TIER_HELD_BLOCKS,
    TIER_RESIDENT_BYTES,
    TIER_BREAKER_OPEN,
    TIER_EVICTED_FRAMES,
    TIER_QUARANTINED,
    TIER_QUEUE_BYTES,
    TIER_QUEUE_AGE,
    TIER_DEADLINES_EXPIRED,
    TIER_MISSES,
    TIER_STORES_SKIPPED,
    TIER_STORES_WAIT,
    TIER_OFFERED,
    TIER_REQUESTS,
    TIER_DEMOTIONS,
    TIER_READY,
    TIER_WEIGHTS_CHANGED,
    PREFILL_RATE,
    TIER_LOAD_RATE,
    TIER_LOADS_PAY,
    PROMOTED_AHEAD,
    LATE_STORES,
    SETTLED,
    MEETINGS,
    TIER_NOT_WORTH,
)
BY_NAME = {metric.name: metric for metric in ALL}
