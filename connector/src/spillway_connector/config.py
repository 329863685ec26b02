"""What an operator may set on the connector, parsed once from vLLM's `kv_connector_extra_config`.

Each default is written here or in limits.py and nowhere else; inner code takes these frozen values, never a dict.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spillway_connector.errors import ConfigError
from spillway_connector.limits import (
    REDIS_CONNECTIONS,
    REDIS_PAYLOAD_CONNECTIONS,
    REDIS_TTL_SECONDS,
    TransferLimits,
)
from spillway_connector.plan.copy_table import H200_TABLE, CopyTable

# Keys of the extra config that vLLM itself reads; we pass them by.
_VLLM_KEYS = frozenset({"spec_name", "spec_module_path", "offload_prompt_only", "secondary_tiers"})
EVICTION_POLICIES = ("lru", "arc")
BATCH_MEMCPY_MODES = ("auto", "on", "off")
NVME_MODES = ("files", "slab", "auto")
TRANSPORTS = ("auto", "cpu", "npu", "cuda")


@dataclass(frozen=True, slots=True)
class EncryptionConfig:
    """AES-GCM at rest. The key, 16 or 32 bytes in hex or base64, comes from a file or an environment variable."""

    key_id: str  # names the key in public; another id, another store
    key_file: str | None = None
    key_env: str | None = None


@dataclass(frozen=True, slots=True)
class NvmeTierConfig:
    """A directory on a local disk or a shared file system."""

    path: Path
    max_bytes: int | None = None  # None: four fifths of what the file system can give, measured anew every 5 minutes
    # auto: the layout the directory has, else slab on file systems of one node. slab: preallocated slots and one index,
    # for local disks. files: one file per frame, for any file system.
    mode: str = "auto"
    ttl_seconds: int | None = None  # of a frame since it was last stored or loaded; None: only max_bytes ends it
    tenant_max_bytes: int | None = None  # of one tenant's frames; beyond it, that tenant's own oldest make room
    encryption: EncryptionConfig | None = None
    limits: TransferLimits = field(default_factory=TransferLimits)


@dataclass(frozen=True, slots=True)
class RedisTierConfig:
    """Any Redis or Valkey of version 7 or newer: one server, Sentinel or Cluster, as the URL's scheme says.

    Credentials come from the named environment variables, or from a file that is read anew for each login, so that a
    rotated secret takes effect without a restart.
    """

    url: str
    username_env: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    tls_ca_file: str | None = None  # None: the system's authorities
    tls_certificate_file: str | None = None  # with tls_key_file, where the server asks clients for one
    tls_key_file: str | None = None
    ttl_seconds: int = REDIS_TTL_SECONDS
    connections: int = REDIS_CONNECTIONS
    payload_connections: int = REDIS_PAYLOAD_CONNECTIONS
    tenant_max_bytes: int | None = None  # of one tenant's values; beyond it, that tenant's own oldest make room
    encryption: EncryptionConfig | None = None
    limits: TransferLimits = field(default_factory=TransferLimits)


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The offload settings of one engine replica."""

    num_cpu_blocks: int | None = None  # chunks of the whole replica; this or cpu_bytes_to_use
    cpu_bytes_to_use: int | None = None  # bytes of the whole replica, all ranks together
    blocks_per_chunk: int = 1  # device blocks moved and keyed together
    eviction_policy: str = "lru"
    batch_memcpy: str = "auto"
    transport: str = "auto"  # by platform; naming one is for tests on the ACL emulator
    acl_library_path: str | None = None  # None: libascendcl.so, where CANN's set_env.sh put it
    cuda_library_path: str | None = None  # None: libcuda.so.1 of the driver
    max_copy_descriptors: int = 4096  # pieces of one batched call to an NPU or GPU
    # CUDA: which way pieces of which size go, as bench-copy measured it on one H200; another machine may differ.
    copy_table: CopyTable = H200_TABLE
    # Bounds on promotion (shared tier -> CPU tier), as fractions of the CPU tier: in flight at once, so that
    # stores always find room (vllm#49902), and per request, so that one long prompt cannot evict its own head.
    promotion_in_flight_fraction: float = 0.5
    promotion_per_request_fraction: float = 0.75
    request_wait_seconds: float = 3.0  # over all lookups and loads of one request; then it recomputes
    # Part of the namespace where it is set: say another one after changing weights in place, and nothing old is hit.
    weights_version: str | None = None
    # Loads are made only while they beat recomputing, from rates measured while serving. A number here replaces the
    # measured prefill rate, for tests and for fleets whose rate is known.
    prefill_tokens_per_second: float | None = None

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> ConnectorConfig:
        """Raises ConfigError naming the key, what it holds and what to set instead."""
        known = {f.name for f in fields(cls)}
        _refuse_unknown(extra_config, known | _VLLM_KEYS, "kv_connector_extra_config")
        values = {key: value for key, value in extra_config.items() if key in known}
        if "copy_table" in values:
            values["copy_table"] = CopyTable.parse(values["copy_table"])
        config = cls(**values)
        if (config.num_cpu_blocks is None) == (config.cpu_bytes_to_use is None):
            raise ConfigError(
                "set exactly one of num_cpu_blocks (chunks) and cpu_bytes_to_use (bytes); "
                f"given num_cpu_blocks={config.num_cpu_blocks}, cpu_bytes_to_use={config.cpu_bytes_to_use}"
            )
        for name in ("num_cpu_blocks", "cpu_bytes_to_use", "blocks_per_chunk", "max_copy_descriptors"):
            value = getattr(config, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}: {value!r} is not a whole number of at least 1")
        _require_choice("eviction_policy", config.eviction_policy, EVICTION_POLICIES)
        _require_choice("batch_memcpy", config.batch_memcpy, BATCH_MEMCPY_MODES)
        _require_choice("transport", config.transport, TRANSPORTS)
        for name in ("promotion_in_flight_fraction", "promotion_per_request_fraction"):
            if not 0.0 < getattr(config, name) <= 1.0:
                raise ConfigError(f"{name}: {getattr(config, name)!r} is not between 0 and 1")
        _require_positive("request_wait_seconds", config.request_wait_seconds)
        if config.prefill_tokens_per_second is not None:
            _require_positive("prefill_tokens_per_second", config.prefill_tokens_per_second)
        return config


def parse_tier(tier_type: str, options: Mapping[str, Any]) -> NvmeTierConfig | RedisTierConfig:
    """One entry of `secondary_tiers` without its `type`. Raises ConfigError."""
    kinds: dict[str, type[NvmeTierConfig] | type[RedisTierConfig]] = {"nvme": NvmeTierConfig, "redis": RedisTierConfig}
    kind = kinds[tier_type]
    limit_names = {f.name for f in fields(TransferLimits)} - {"breaker"}
    own_names = {f.name for f in fields(kind)} - {"limits"}
    where = f"secondary tier {tier_type!r}"
    _refuse_unknown(options, limit_names | own_names, where)
    limits = TransferLimits(**{key: value for key, value in options.items() if key in limit_names})
    for name in limit_names:
        _require_positive(f"{where}: {name}", getattr(limits, name))
    try:
        config = kind(**{key: value for key, value in options.items() if key in own_names}, limits=limits)
    except TypeError as error:
        needed = "path" if kind is NvmeTierConfig else "url"
        raise ConfigError(f"{where} needs `{needed}`; given keys: {', '.join(sorted(options)) or 'none'}") from error
    config = replace(config, encryption=_parse_encryption(options.get("encryption"), where))
    for name in ("max_bytes", "ttl_seconds", "tenant_max_bytes"):
        if getattr(config, name, None) is not None:
            _require_positive(f"{where}: {name}", getattr(config, name))
    if isinstance(config, NvmeTierConfig):
        _require_choice(f"{where}: mode", config.mode, NVME_MODES)
        return replace(config, path=Path(config.path))
    _require_positive(f"{where}: connections", config.connections)
    _require_positive(f"{where}: payload_connections", config.payload_connections)
    if config.password_env is not None and config.password_file is not None:
        raise ConfigError(f"{where}: password_env and password_file are both set; remove one")
    return config


def _parse_encryption(options: Any, where: str) -> EncryptionConfig | None:
    if options is None:
        return None
    where = f"{where}: encryption"
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: {options!r} is not a mapping with key_id and key_file or key_env")
    _refuse_unknown(options, {f.name for f in fields(EncryptionConfig)}, where)
    config = EncryptionConfig(options.get("key_id", ""), options.get("key_file"), options.get("key_env"))
    if not config.key_id or (config.key_file is None) == (config.key_env is None):
        raise ConfigError(f"{where} needs key_id and exactly one of key_file and key_env; given {sorted(options)}")
    return config


def _refuse_unknown(given: Mapping[str, Any], known: set[str] | frozenset[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(choices)}")


def _require_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name}: {value!r} is not a number above 0")
