"""The settings of the connector, parsed once from vLLM's `kv_connector_extra_config`.

Defaults and words that the chart has too are those of settings/values/; inner code takes these frozen values, never a
dict.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
from msgspec import structs

from spillway_connector.errors import ConfigError
from spillway_connector.limits import (
    REDIS_CONNECTIONS,
    REDIS_PAYLOAD_CONNECTIONS,
    REDIS_TTL_SECONDS,
    S3_CONNECTIONS,
    TierLimits,
    TransferLimits,
)
from spillway_connector.native_keys import native_key_answer
from spillway_connector.plan.copy_table import CopyTable
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_settings.byte_sizes import ByteCount, format_byte_count
from spillway_settings.keys import own_keys
from spillway_settings.typed import Count, Portion, Positive, Settings, WrongSetting, read_settings
from spillway_settings.values.offload import (
    BUCKET_ENDPOINT_PATTERN,
    BUCKET_PATTERN,
    BUCKET_PREFIX_PATTERN,
    NODE_TIER_NEEDS,
    ConnectorSettings,
    NodeFallback,
    NvmeMode,
    Offload,
)
from spillway_settings.wire import STORE_TYPES

logger = logging.getLogger(__name__)

# Keys of the extra config that vLLM itself reads; the connector ignores them.
_PROMPT_ONLY = "offload_prompt_only"  # what vLLM calls generated_tokens: off
_VLLM_KEYS = frozenset({"spec_name", "spec_module_path", _PROMPT_ONLY, "secondary_tiers"})
AutoOnOff = Literal["auto", "on", "off"]
OnOff = Literal["on", "off"]
PageCache = Literal["auto", "off"]
_CHART = Offload()


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings under the keys of kv_connector_extra_config, which are the fields' names."""


class EncryptionConfig(Section, frozen=True):
    """AES-GCM at rest. The key, 16 or 32 bytes in hex or base64, comes from a file or an environment variable."""

    key_id: str  # names the key in public; another id, another store
    key_file: str | None = None
    key_env: str | None = None


class NvmeStore(Section, frozen=True):
    """A directory on a local disk or a shared file system."""

    path: str
    max_bytes: ByteCount | None = None  # None: four fifths of what the file system gives, measured every 5 minutes
    # auto: the layout the directory has, else slab on file systems of one node. slab: preallocated slots and one index,
    # for local disks. files: one file per frame, for any file system.
    mode: NvmeMode = _CHART.shared_tier.nvme.mode
    ttl_seconds: Count | None = None  # of a frame since it was last stored or loaded; None: only max_bytes ends it
    tenant_max_bytes: ByteCount | None = None  # of one tenant's frames; beyond it, its least recently used are evicted
    page_cache: PageCache = "auto"  # auto: slabs use it while memory is idle, if the kernel can tell what lies there


class NvmeTierConfig(NvmeStore, frozen=True):
    """One entry of `secondary_tiers` of type nvme."""

    encryption: EncryptionConfig | None = None
    limits: TransferLimits = TransferLimits()
    below: TierBelow | None = None


class RedisTls(Section, frozen=True):
    """Files for rediss:// and its like. In kv_connector_extra_config each key begins with `tls_`."""

    ca_file: str | None = None  # None: the system's authorities
    certificate_file: str | None = None  # with key_file, if the server asks clients for one
    key_file: str | None = None


class RedisStore(Section, frozen=True):
    """Any Redis or Valkey of version 7 or newer: one server, Sentinel or Cluster, as the URL's scheme says.

    Credentials come from the named environment variables, or from a file that is read again for each login, so that a
    rotated secret takes effect without a restart.
    """

    url: str
    username_env: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    tls: RedisTls = RedisTls()
    ttl_seconds: Count = REDIS_TTL_SECONDS
    connections: Count = REDIS_CONNECTIONS
    payload_connections: Count = REDIS_PAYLOAD_CONNECTIONS
    tenant_max_bytes: ByteCount | None = None  # of one tenant's values; beyond it, its least recently used are evicted


class RedisTierConfig(RedisStore, frozen=True):
    """One entry of `secondary_tiers` of type redis."""

    encryption: EncryptionConfig | None = None
    limits: TransferLimits = TransferLimits()
    below: TierBelow | None = None


class NodeTierConfig(Section, frozen=True):
    """The CPU tier in memory that the engines of a node share: `node_tier`."""

    bytes: ByteCount  # of rows of one size, which all engines of the node that have such rows name alike
    path: str = "/dev/shm/spillway"  # noqa: S108 - the point is to be in shared memory
    # The act of an engine that cannot use it. private: it has a CPU tier of its own. refuse: it does not start.
    fallback: NodeFallback = _CHART.node_tier.fallback
    # The share of the rows of one size that each namespace keeps when another one wants rows.
    floor: Portion = _CHART.node_tier.floor
    # The owner of the memory. engine: the first engine of the node makes the rows. keeper: spillway node-tier makes
    # them, and engines wait for it.
    maker: Literal["engine", "keeper"] = "engine"


class S3Store(Section, frozen=True):
    """A bucket of any S3-compatible object store.

    Credentials are never settings: they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, else from the workload
    identity of the pod, else from the metadata service of the node.
    """

    bucket: str
    prefix: str = _CHART.shared_tier.s3.prefix  # of all object keys, such as "kv/"
    endpoint: str | None = None  # https://host[:port]; None: AWS's own of the region
    region: str = _CHART.shared_tier.s3.region
    path_style: bool = _CHART.shared_tier.s3.path_style  # https://host/bucket/key; else https://bucket.host/key
    ca_file: str | None = None  # authorities trusted besides the system's
    connections: Count = S3_CONNECTIONS
    puts_per_second_max: Positive | None = _CHART.shared_tier.s3.puts_per_second_max
    gets_per_second_max: Positive | None = _CHART.shared_tier.s3.gets_per_second_max  # HEAD counts as GET


class S3TierConfig(S3Store, frozen=True):
    """One entry of `secondary_tiers` of type s3."""

    encryption: EncryptionConfig | None = None
    limits: TransferLimits = TransferLimits()
    below: TierBelow | None = None


TierConfig = NvmeTierConfig | RedisTierConfig | S3TierConfig


class TierBelow(Section, frozen=True):
    """The shared tier behind another one: its `below`, which has idle_seconds besides the keys of an entry."""

    tier: TierConfig
    idle_seconds: float = _CHART.shared_tier.below.idle_seconds  # without a use, after which a chunk is copied into it


@own_keys
class ConnectorConfig(ConnectorSettings, frozen=True):
    """The offload settings of one engine replica: the chart's settings, under their fields' names.

    This class declares the settings for which the connector takes other values than the chart, which also knows YAML's
    booleans.
    """

    num_cpu_blocks: Count | None = None  # chunks of the whole replica; this or cpu_bytes_to_use
    cpu_bytes_to_use: ByteCount | None = None  # bytes of the whole replica, all ranks together
    generated_tokens: AutoOnOff = "auto"
    layerwise_loads: OnOff = "off"
    compute_while_loading: OnOff = "off"
    fair_steps: OnOff = "off"
    batch_memcpy: AutoOnOff = "auto"
    cuda_library_path: str | None = None  # None: libcuda.so.1 of the driver
    # CUDA: which path pieces of which size take, as bench-copy prints it; None: as measured on one H200.
    copy_table: CopyTable | None = None
    node_tier: NodeTierConfig | None = None  # None: the CPU tier belongs to the engine

    def why_stored_early(self) -> str | None:
        """Return why a chunk is stored when it was computed; None if it may be stored when it is about to leave the
        device, once the CPU tier is full."""
        if self.storing == "eager":
            return "it is asked for"
        if self.eviction_policy != "lru":
            return f"eviction_policy: {self.eviction_policy} does not know what the device holds"
        return "what one engine's device keeps is nothing to the others of the node" if self.node_tier else None

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> ConnectorConfig:
        """Raises ConfigError naming the key, what it holds and what to set instead."""
        given = {key: value for key, value in extra_config.items() if key not in _VLLM_KEYS}
        if _PROMPT_ONLY in extra_config:
            given["generated_tokens"] = _in_our_words(extra_config[_PROMPT_ONLY], given.get("generated_tokens"))
        for key in given.keys() - set(cls.__struct_fields__):
            answer = native_key_answer(key, str)
            if answer is not None:
                raise ConfigError(f"kv_connector_extra_config: {key}: {answer}")
        config = _read(cls, given, "kv_connector_extra_config")
        if (config.num_cpu_blocks is None) == (config.cpu_bytes_to_use is None):
            raise ConfigError(
                "set exactly one of num_cpu_blocks (chunks) and cpu_bytes_to_use (bytes); "
                f"given num_cpu_blocks={config.num_cpu_blocks}, cpu_bytes_to_use={config.cpu_bytes_to_use}"
            )
        check_node_tier(config, PLAIN_NAMES)
        for key in given:
            logger.debug("kv_connector_extra_config sets %s: %r", key, getattr(config, key))
        return config


def check_node_tier(config: ConnectorConfig, names: Names) -> None:
    """Refuse what the tier of a node does not do. Raises ConfigError."""
    if config.node_tier is None:
        return
    for name, needed, why in NODE_TIER_NEEDS:
        given = getattr(config, name)
        if given not in (needed, "auto"):
            raise ConfigError(
                f"{names.given(name, given)} and {names.name('node_tier')} exclude each other: {why}; "
                f"set {names.given(name, needed)}"
            )


def _in_our_words(prompt_only: object, generated_tokens: object) -> str:
    """Translate vLLM's own key, for configurations that were written for its connector. Raises ConfigError."""
    if not isinstance(prompt_only, bool):
        raise ConfigError(f"kv_connector_extra_config: {_PROMPT_ONLY}: {prompt_only!r} given, true or false needed")
    meant = "off" if prompt_only else "on"
    if generated_tokens not in (None, meant):
        raise ConfigError(
            f"kv_connector_extra_config: {_PROMPT_ONLY}: {prompt_only} contradicts generated_tokens: "
            f"{generated_tokens!r}; remove one of them"
        )
    return meant


def parse_tier(tier_type: str, options: Mapping[str, Any]) -> TierConfig:
    """One entry of `secondary_tiers` without its `type`: keys of its store and of TierLimits, `encryption`, `below`.

    Raises ConfigError naming the key.
    """
    config = _parse_one(tier_type, {key: value for key, value in options.items() if key != "below"})
    given = options.get("below")
    if given is None:
        return config
    where = f"secondary tier {tier_type!r}: below"
    if not isinstance(given, Mapping) or given.get("type") not in STORE_TYPES or given["type"] == tier_type:
        others = ", ".join(each for each in STORE_TYPES if each != tier_type)
        raise ConfigError(f"{where}: {given!r} is no tier of another type; write its settings with type: {others}")
    rest = {key: value for key, value in given.items() if key not in ("type", "idle_seconds")}
    idle_seconds = given.get("idle_seconds", _CHART.shared_tier.below.idle_seconds)
    if isinstance(idle_seconds, bool) or not isinstance(idle_seconds, int | float) or idle_seconds <= 0:
        raise ConfigError(f"{where}: idle_seconds: {idle_seconds!r} given, seconds above 0 needed")
    return structs.replace(config, below=TierBelow(_parse_one(str(given["type"]), rest), float(idle_seconds)))


def _parse_one(tier_type: str, options: Mapping[str, Any]) -> TierConfig:
    where = f"secondary tier {tier_type!r}"
    names = SettingNames(others=f"{where}: {{path}}")
    bounds = {key: value for key, value in options.items() if key in TierLimits.__struct_fields__}
    limits = _read(TransferLimits, bounds, where)
    store = {key: value for key, value in options.items() if key not in bounds and key != "encryption"}
    encryption = None
    if options.get("encryption") is not None:
        encryption = _read(EncryptionConfig, options["encryption"], f"{where}: encryption")
        check_encryption(encryption, SettingNames(others=f"{where}: encryption: {{path}}"))
    if tier_type == "nvme":
        nvme = _read(NvmeStore, store, where)
        check_nvme(nvme, names)
        return NvmeTierConfig(**structs.asdict(nvme), encryption=encryption, limits=limits)
    if tier_type == "s3":
        s3 = _read(S3Store, store, where)
        check_s3(s3, names)
        return S3TierConfig(**structs.asdict(s3), encryption=encryption, limits=limits)
    tls = {f"tls_{name}": name for name in RedisTls.__struct_fields__}
    files = {tls[key]: store.pop(key) for key in tls if key in store}
    if "tls" in store:
        raise ConfigError(f"{where}: tls: unknown setting; use {', '.join(tls)}")
    redis = _read(RedisStore, {**store, "tls": files}, where)
    check_redis(redis, names)
    return RedisTierConfig(**structs.asdict(redis), encryption=encryption, limits=limits)


class Names(Protocol):
    """The names of one section's settings, as the person who set them knows them."""

    def name(self, path: str, /) -> str: ...

    def given(self, path: str, value: object, /) -> str: ...


def check_nvme(nvme: NvmeStore, names: Names) -> None:
    """Refuse what contradicts itself. Raises ConfigError."""
    if nvme.max_bytes is not None and nvme.tenant_max_bytes is not None and nvme.tenant_max_bytes > nvme.max_bytes:
        raise ConfigError(
            f"{names.given('tenant_max_bytes', format_byte_count(nvme.tenant_max_bytes))} for one tenant is more "
            f"than {names.given('max_bytes', format_byte_count(nvme.max_bytes))} for all; "
            f"set it to {nvme.max_bytes} or less"
        )


def check_redis(redis: RedisStore, names: Names) -> None:
    """Refuse what contradicts itself. Raises ConfigError."""
    if redis.password_env is not None and redis.password_file is not None:
        raise ConfigError(
            f"{names.given('password_env', redis.password_env)} and "
            f"{names.given('password_file', redis.password_file)} are both set; "
            "remove one (a file is read again for each login, so a rotated password needs no restart)"
        )
    tls = redis.tls
    files = (tls.ca_file, tls.certificate_file, tls.key_file)
    if files != (None, None, None) and not redis.url.startswith("rediss"):
        raise ConfigError(
            f"{names.name('tls')} is set, but {names.given('url', redis.url)} asks for no TLS; write rediss://..."
        )
    if (tls.certificate_file is None) != (tls.key_file is None):
        raise ConfigError(
            f"{names.given('tls.certificate_file', tls.certificate_file)} and "
            f"{names.given('tls.key_file', tls.key_file)} belong together; set both or none"
        )
    if redis.payload_connections > redis.connections:
        raise ConfigError(
            f"{names.given('payload_connections', redis.payload_connections)} is more than "
            f"{names.given('connections', redis.connections)}; raise the latter or lower the former"
        )


def check_s3(s3: S3Store, names: Names) -> None:
    """Refuse what names no bucket. Raises ConfigError."""
    if re.fullmatch(BUCKET_PATTERN, s3.bucket) is None:
        raise ConfigError(
            f"{names.given('bucket', repr(s3.bucket))} names no bucket; use 3 to 63 lower-case letters, digits, dots "
            "and dashes"
        )
    if re.fullmatch(BUCKET_PREFIX_PATTERN, s3.prefix) is None:
        raise ConfigError(
            f"{names.given('prefix', repr(s3.prefix))} is none; use letters, digits, dots, dashes and underscores, "
            'with a slash behind each part, such as "kv/"'
        )
    if s3.endpoint is not None and re.fullmatch(BUCKET_ENDPOINT_PATTERN, s3.endpoint) is None:
        raise ConfigError(
            f"{names.name('endpoint')}: no address without credentials and path was given; write https://host:port "
            "(or http://)"
        )
    if s3.ca_file is not None and (s3.endpoint or "https:").startswith("http:"):
        raise ConfigError(
            f"{names.given('ca_file', s3.ca_file)}, but {names.given('endpoint', s3.endpoint)} asks for no TLS; write "
            "https://..."
        )


def check_encryption(encryption: EncryptionConfig, names: Names) -> None:
    """Refuse a key without a public name, or not from exactly one place. Raises ConfigError."""
    if not encryption.key_id or not encryption.key_id.isascii() or not encryption.key_id.isprintable():
        raise ConfigError(
            f"{names.given('key_id', repr(encryption.key_id))} is not a name; use letters, digits and dashes"
        )
    if (encryption.key_file is None) == (encryption.key_env is None):
        raise ConfigError(
            f"{names.given('key_file', encryption.key_file)} and {names.given('key_env', encryption.key_env)}; "
            "set exactly one of them: where the key is read from"
        )


def _read(kind: type[Settings], given: object, where: str) -> Settings:
    try:
        return read_settings(kind, dict(given) if isinstance(given, Mapping) else given)
    except WrongSetting as wrong:
        raise ConfigError(f"{where}: {wrong}") from wrong
