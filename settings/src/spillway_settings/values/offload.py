"""`engine.offload`: tiers of KV, and what goes between them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from spillway_settings.queue_order import OVERTAKE_SECONDS
from spillway_settings.typed import Count, Port, Portion, Positive, Share
from spillway_settings.values.kinds import (
    Anything,
    AutoOff,
    AutoOnOff,
    CopyRow,
    Folder,
    ObjectName,
    OnOff,
    OptionalFolder,
    Seconds,
    SecretEntry,
    SecretName,
    Section,
    Size,
    WholeSeconds,
)
from spillway_settings.values.pods import CertificateSecret, SecretReference

EvictionPolicy = Literal["lru", "arc"]
TierType = Literal["none", "nvme", "redis", "s3"]
Storing = Literal["auto", "eager", "late"]
QueueOrder = Literal["prefix", "arrival"]
WindowChunks = Literal["last", "all"]
NvmeMode = Literal["files", "slab", "auto"]
NodeFallback = Literal["private", "refuse"]
Transport = Literal["auto", "cpu", "cuda", "npu"]


class CopyTable(Section, frozen=True):
    store: list[CopyRow] | UnsetType = UNSET
    load: list[CopyRow] | UnsetType = UNSET


class NvmeVolume(Section, frozen=True):
    type: Literal["hostPath", "emptyDir", "perPodClaim", "sharedClaim", "existingClaim"] = "hostPath"
    host_path: OptionalFolder = "/var/lib/spillway/kv"
    size: Size = "500GiB"
    storage_class_name: ObjectName | None = None
    claim_name: ObjectName = ""


class NvmeTier(Section, frozen=True):
    path: Folder = "/var/lib/spillway/kv"
    mode: NvmeMode = "auto"
    max_bytes: Size | None = None
    ttl_seconds: WholeSeconds | None = None
    tenant_max_bytes: Size | None = None
    page_cache: AutoOff = "auto"
    volume: NvmeVolume = NvmeVolume()


class RedisLogin(Section, frozen=True):
    name: SecretName = ""
    username_key: SecretEntry = ""
    password_key: SecretEntry = "password"
    password_as: Literal["file", "env"] = "file"


class RedisTls(Section, frozen=True):
    ca_secret: SecretReference = SecretReference(key="ca.crt")
    client_secret: CertificateSecret = CertificateSecret()


class RedisTier(Section, frozen=True):
    url: str = ""
    existing_secret: RedisLogin = RedisLogin()
    tls: RedisTls = RedisTls()
    ttl_seconds: WholeSeconds = 86400
    connections: Count = 4
    payload_connections: Count = 1
    tenant_max_bytes: Size | None = None


class S3Keys(Section, frozen=True):
    name: SecretName = ""
    access_key_id_key: SecretEntry = "access-key-id"
    secret_access_key_key: SecretEntry = "secret-access-key"


# How a bucket, the beginning of its keys and its endpoint are written: what the whole text matches.
BUCKET_PATTERN = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
BUCKET_PREFIX_PATTERN = r"([A-Za-z0-9._-]+/)*"
BUCKET_ENDPOINT_PATTERN = r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?"


class S3Tier(Section, frozen=True):
    bucket: str = ""
    prefix: str = ""
    endpoint: str = ""
    region: Annotated[str, Meta(min_length=1, description="a region, such as eu-central-1")] = "us-east-1"
    path_style: bool = True
    existing_secret: S3Keys = S3Keys()
    ca_secret: SecretReference = SecretReference(key="ca.crt")
    connections: Count = 32
    puts_per_second_max: Positive | None = 500
    gets_per_second_max: Positive | None = 2000


class Encryption(Section, frozen=True):
    enabled: bool = False
    key_id: Annotated[str, Meta(max_length=64, description="the public name of the key, never the key itself")] = ""
    key_secret_name: SecretName = ""
    key_secret_key: SecretEntry = "key"


class TransferSettings(Section, frozen=True):
    """The settings of `offload.sharedTier` that the connector has without a declaration of its own (TierLimits)."""

    # Twice what keeps a disk busy: half of them may be reading while the others verify and copy; of writes the same.
    # Each has a buffer of one chunk.
    io_threads: Annotated[int, Meta(ge=1, le=256)] = 8
    lookup_timeout_seconds: Seconds = 0.2
    load_timeout_seconds: Seconds = 2
    store_timeout_seconds: Seconds = 10
    load_queue_bytes_max: Size = "8GiB"
    # Six steps of 8,192 tokens of a 14B model, 1.3 GB each. It costs no memory (rows are pinned, not copied, so the CPU
    # tier bounds it, too), and at less than 1.7 GB/s store_queue_seconds_max drops stores before this does.
    store_queue_bytes_max: Size = "8GiB"
    store_queue_seconds_max: Seconds = 5


class TierBelow(TransferSettings, frozen=True):
    """The tier behind sharedTier; its store is in the section of sharedTier that its type names."""

    type: TierType = "none"
    idle_seconds: Seconds = 60
    lookup_timeout_seconds: Seconds = 1
    load_timeout_seconds: Seconds = 5


class SharedTier(TransferSettings, frozen=True):
    type: TierType = "none"
    below: TierBelow = TierBelow()
    nvme: NvmeTier = NvmeTier()
    redis: RedisTier = RedisTier()
    s3: S3Tier = S3Tier()
    encryption: Encryption = Encryption()


def tier_types(tier: SharedTier) -> tuple[TierType, ...]:
    """The types of the tiers in use, the one above first."""
    return tuple(each for each in (tier.type, tier.below.type) if each != "none")


class ConnectorSettings(Section, frozen=True):
    """The settings of `offload` that the connector has without a declaration of its own (ConnectorConfig)."""

    blocks_per_chunk: Count = 1
    generated_tokens: AutoOnOff = "auto"
    layerwise_loads: OnOff = "off"
    compute_while_loading: OnOff = "off"
    storing: Storing = "auto"
    queue_order: QueueOrder = "prefix"
    queue_overtake_seconds: Seconds = OVERTAKE_SECONDS
    fair_steps: OnOff = "off"
    window_chunks: WindowChunks = "last"
    eviction_policy: EvictionPolicy = "lru"
    batch_memcpy: AutoOnOff = "auto"
    max_copy_descriptors: Count = 4096
    transport: Transport = "auto"
    acl_library_path: Annotated[str, Meta(min_length=1, description="the path of a library")] | None = None
    weights_version: Annotated[str, Meta(min_length=1, description="a version of the weights")] | None = None
    prefill_tokens_per_second: Positive | None = None
    request_wait_seconds: Seconds = 3
    promotion_in_flight_fraction: Share = 0.5
    promotion_per_request_fraction: Share = 0.75
    promotion_ahead_fraction: Portion = 0.25


# Other settings of Offload that a node's tier needs: field, value, reason. `auto` is taken too.
NODE_TIER_NEEDS = (
    ("eviction_policy", "lru", "engines agree on the last use of a chunk alone"),
    ("storing", "eager", "a chunk that waits on one engine's device is not there for the others"),
    ("layerwise_loads", "off", "a row is checked behind its copy, which such a step reads"),
)


class NodeTier(Section, frozen=True):
    enabled: bool = False
    bytes: Size = "64GiB"
    host_path: Folder = "/dev/shm/spillway"  # noqa: S108 - the point is to be in shared memory
    floor: Portion = 0.1
    fallback: NodeFallback = "private"
    port: Port = 8400


class Offload(ConnectorSettings, frozen=True):
    enabled: bool = True
    num_cpu_blocks: Count | None = 2048
    cpu_bytes: Size | None = None
    node_tier: NodeTier = NodeTier()
    copy_table: CopyTable | None = None
    shared_tier: SharedTier = SharedTier()
    extra_tiers: list[Anything] = []
