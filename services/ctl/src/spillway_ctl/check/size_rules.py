"""Every size among the values, read before anything is computed from them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spillway_ctl.check.finding import Finding, quoted
from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.values.engine import Engine
from spillway_settings.values.release import Values

_EXAMPLE = "write for example 512MiB, 64Gi, 1TB or a number of bytes"
_MOST_BYTES = 8 << 50
_LEAST = {
    "memory.pageCache": "0",
    "memory.processPerRank": "512MiB",  # less holds no Python with torch; a bare 8 is eight bytes
    # Valkey takes a bound of 0 bytes for no bound at all, and the server fits into the quarter that is not for blocks.
    "redis.memory": "64MiB",
    # With fewer no request fits, or no prefix is remembered; a bare 64 is 64 bytes.
    **{
        f"gateway.{key}": "1KiB"
        for key in (
            "limits.bodyBytesMax",
            "limits.bodiesBytesMax",
            "limits.plainReplyBufferBytes",
            "limits.repliesBytesMax",
            "connections.headBytesMax",
            "connections.targetBytesMax",
            "index.bytesMax",
            "continuation.bytesMax",
        )
    },
}


def size_findings(values: Values, groups: Mapping[str, Engine]) -> Iterator[Finding]:
    for key, engine in groups.items():
        path = f"engines.{key}" if key else "engine"
        for setting, value in _engine_sizes(engine).items():
            yield from _judged(f"{path}.{setting}", value, _LEAST.get(setting, "1"))
    gateway = values.gateway
    sizes: dict[str, Any] = {"redis.memory": values.redis.memory}
    for kind, resources in (("requests", gateway.resources.requests), ("limits", gateway.resources.limits)):
        sizes[f"gateway.resources.{kind}.memory"] = resources.memory
        sizes[f"gateway.resources.{kind}.ephemeralStorage"] = resources.ephemeral_storage
    sizes |= {
        "gateway.limits.bodyBytesMax": gateway.limits.body_bytes_max,
        "gateway.limits.bodiesBytesMax": gateway.limits.bodies_bytes_max,
        "gateway.limits.plainReplyBufferBytes": gateway.limits.plain_reply_buffer_bytes,
        "gateway.limits.repliesBytesMax": gateway.limits.replies_bytes_max,
        "gateway.connections.headBytesMax": gateway.connections.head_bytes_max,
        "gateway.connections.targetBytesMax": gateway.connections.target_bytes_max,
        "gateway.connections.bodyBytesPerSecondMin": gateway.connections.body_bytes_per_second_min,
        "gateway.index.bytesMax": gateway.index.bytes_max,
        "gateway.continuation.bytesMax": gateway.continuation.bytes_max,
    }
    for setting, value in sizes.items():
        yield from _judged(setting, value, _LEAST.get(setting, "1"))


def _engine_sizes(engine: Engine) -> dict[str, Any]:
    tier = engine.offload.shared_tier
    sizes = {
        "model.shape.weightBytes": engine.model.shape.weight_bytes,
        "model.cache.sizeLimit": engine.model.cache.size_limit,
        "ephemeralStorage.limit": engine.ephemeral_storage.limit,
        "ephemeralStorage.request": engine.ephemeral_storage.request,
        "hugePages.amount": engine.huge_pages.amount,
        "memory.limit": engine.memory.limit,
        "memory.sharedMemory": engine.memory.shared_memory,
        "memory.processPerRank": engine.memory.process_per_rank,
        "memory.pageCache": engine.memory.page_cache,
        "offload.cpuBytes": engine.offload.cpu_bytes,
        "offload.nodeTier.bytes": engine.offload.node_tier.bytes,
        "offload.sharedTier.loadQueueBytesMax": tier.load_queue_bytes_max,
        "offload.sharedTier.storeQueueBytesMax": tier.store_queue_bytes_max,
        "offload.sharedTier.below.loadQueueBytesMax": tier.below.load_queue_bytes_max,
        "offload.sharedTier.below.storeQueueBytesMax": tier.below.store_queue_bytes_max,
        "offload.sharedTier.nvme.maxBytes": tier.nvme.max_bytes,
        "offload.sharedTier.nvme.tenantMaxBytes": tier.nvme.tenant_max_bytes,
        "offload.sharedTier.nvme.volume.size": tier.nvme.volume.size,
        "offload.sharedTier.redis.tenantMaxBytes": tier.redis.tenant_max_bytes,
    }
    table = engine.offload.copy_table
    for direction in ("store", "load") if table is not None else ():
        for row in getattr(table, direction) or ():
            sizes.setdefault(f"offload.copyTable.{direction}", row[0])
    return sizes


def _judged(path: str, value: Any, least: str) -> Iterator[Finding]:
    if value is None:
        return
    try:
        size_bytes = parse_byte_count(value)
    except ValueError as error:
        why = str(error).removeprefix(f"{value!r} ").split("; ")[0]
        yield Finding(path, f"{quoted(value)} {why}", _EXAMPLE)
        return
    if size_bytes < parse_byte_count(least):
        yield Finding(path, f"{quoted(value)} given, at least {'1 byte' if least == '1' else least} needed", _EXAMPLE)
    elif size_bytes > _MOST_BYTES:
        yield Finding(path, f"{quoted(value)} given, at most 8PiB needed", _EXAMPLE)
