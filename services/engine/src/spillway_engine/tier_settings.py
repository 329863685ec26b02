"""The shared tier of an engine pod: where it lies, how to log in, what bounds it, and what in it contradicts itself.

The defaults are the connector's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spillway_connector.errors import ConfigError
from spillway_connector.limits import (
    DEFAULT_LIMITS as _LIMITS,
)
from spillway_connector.limits import (
    REDIS_CONNECTIONS,
    REDIS_PAYLOAD_CONNECTIONS,
    REDIS_TTL_SECONDS,
)
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_engine.bounds import require_at_least
from spillway_engine.byte_sizes import ByteCount, format_byte_count
from spillway_engine.door import FILE, Door
from spillway_engine.errors import SettingsError

SHARED_TIER = "offload.sharedTier."
NVME = SHARED_TIER + "nvme."
REDIS = SHARED_TIER + "redis."
ENCRYPTION = SHARED_TIER + "encryption."
_LOAD_QUEUE_BYTES = ByteCount(_LIMITS.load_queue_bytes_max)
_STORE_QUEUE_BYTES = ByteCount(_LIMITS.store_queue_bytes_max)
_PATH = re.compile(r"\w+(\.\w+)+")
_SECRET_KEY = re.compile(r"password|secret|credential|api_?key", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EncryptionSettings:
    """AES-GCM at rest; the key, 16 or 32 bytes in hex or base64, comes from one of the two."""

    key_id: str  # names the key in public; another id, another store
    key_file: str | None = None
    key_env: str | None = None  # name of the environment variable, never the key


@dataclass(frozen=True, slots=True)
class NvmeTierSettings:
    path: str = ""
    max_bytes: ByteCount | None = None  # None: four fifths of what the file system can give
    mode: Literal["files", "slab", "auto"] = "auto"  # auto: slab on a file system of one node, else files
    ttl_seconds: int | None = None  # of a block since its last use; None: only max_bytes ends it
    tenant_max_bytes: ByteCount | None = None


@dataclass(frozen=True, slots=True)
class RedisTlsSettings:
    ca_file: str | None = None  # None: the system's authorities
    certificate_file: str | None = None  # with key_file, where the server asks clients for one
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class RedisTierSettings:
    url: str = ""
    username_env: str | None = None  # name of the environment variable, never the value
    password_env: str | None = None
    password_file: str | None = None  # read anew for each login
    tls: RedisTlsSettings = field(default_factory=RedisTlsSettings)
    ttl_seconds: int = REDIS_TTL_SECONDS
    connections: int = REDIS_CONNECTIONS
    payload_connections: int = REDIS_PAYLOAD_CONNECTIONS
    tenant_max_bytes: ByteCount | None = None


@dataclass(frozen=True, slots=True)
class SharedTierSettings:
    type: Literal["none", "nvme", "redis"] = "none"
    nvme: NvmeTierSettings = field(default_factory=NvmeTierSettings)
    redis: RedisTierSettings = field(default_factory=RedisTierSettings)
    encryption: EncryptionSettings | None = None
    io_threads: int = _LIMITS.io_threads
    lookup_timeout_seconds: float = _LIMITS.lookup_timeout_seconds
    load_timeout_seconds: float = _LIMITS.load_timeout_seconds
    store_timeout_seconds: float = _LIMITS.store_timeout_seconds
    load_queue_bytes_max: ByteCount = _LOAD_QUEUE_BYTES
    store_queue_bytes_max: ByteCount = _STORE_QUEUE_BYTES  # more in hand are dropped and counted
    store_queue_seconds_max: float = _LIMITS.store_queue_seconds_max  # as are stores that waited longer


def check_shared_tier(tier: SharedTierSettings, door: Door = FILE) -> None:
    """Refuse what needs no look at the machine. Raises SettingsError with what to change."""
    _check_numbers(tier, door)
    if tier.type == "nvme":
        _check_nvme(tier.nvme, door)
    if tier.type == "redis":
        _check_redis(tier.redis, door)
    if tier.encryption is not None:
        _check_encryption(tier.type, tier.encryption, door)


def refuse_credentials(tier: SharedTierSettings, extra_tiers: Iterable[Mapping[str, Any]], door: Door) -> None:
    """Also of tiers not in use: whatever stands in the file is shown by /spillway/config. Raises SettingsError."""
    if "@" in tier.redis.url:
        raise SettingsError(
            f"{door.name(REDIS + 'url')} holds credentials; keep them out of files: name environment variables in "
            f"{door.name(REDIS + 'usernameEnv')} and {door.name(REDIS + 'passwordEnv')}, "
            f"or a file in {door.name(REDIS + 'passwordFile')}"
        )
    for position, extra in enumerate(extra_tiers):
        for key, value in extra.items():
            if isinstance(value, str) and _SECRET_KEY.search(key) and not key.endswith(("_env", "_file")):
                raise SettingsError(
                    f"{door.name(f'offload.extraTiers[{position}].{key}')} would show a secret to whoever reads this "
                    "file; give that tier its secret by an environment variable or a file"
                )


def connector_refusal(error: ConfigError, door: Door) -> SettingsError:
    """The connector names keys below offload.sharedTier, as `redis.url: ...`; here they get their names at the door."""
    text = str(error)
    path = _PATH.match(text)
    if path is None:
        return SettingsError(f"{door.name(SHARED_TIER[:-1])}: {text}")
    return SettingsError(f"{door.name(SHARED_TIER + path[0])}{text[path.end() :]}")


def _check_numbers(tier: SharedTierSettings, door: Door) -> None:
    at_least: list[tuple[str, float | None, float]] = [
        ("ioThreads", tier.io_threads, 1),
        ("lookupTimeoutSeconds", tier.lookup_timeout_seconds, 0.001),
        ("loadTimeoutSeconds", tier.load_timeout_seconds, 0.001),
        ("storeTimeoutSeconds", tier.store_timeout_seconds, 0.001),
        ("loadQueueBytesMax", tier.load_queue_bytes_max, 1),
        ("storeQueueBytesMax", tier.store_queue_bytes_max, 1),
        ("storeQueueSecondsMax", tier.store_queue_seconds_max, 0.001),
        ("nvme.maxBytes", tier.nvme.max_bytes, 1),
        ("nvme.ttlSeconds", tier.nvme.ttl_seconds, 1),
        ("nvme.tenantMaxBytes", tier.nvme.tenant_max_bytes, 1),
        ("redis.ttlSeconds", tier.redis.ttl_seconds, 1),
        ("redis.connections", tier.redis.connections, 1),
        ("redis.payloadConnections", tier.redis.payload_connections, 1),
        ("redis.tenantMaxBytes", tier.redis.tenant_max_bytes, 1),
    ]
    require_at_least([(SHARED_TIER + key, given, least) for key, given, least in at_least], door)


def _check_nvme(nvme: NvmeTierSettings, door: Door) -> None:
    if not nvme.path.startswith("/"):
        raise SettingsError(
            f"{door.given(NVME + 'path', repr(nvme.path))} is no absolute folder; "
            f"{door.given(SHARED_TIER + 'type', 'nvme')} needs one that every engine of this model can reach"
        )
    if nvme.max_bytes is not None and nvme.tenant_max_bytes is not None and nvme.tenant_max_bytes > nvme.max_bytes:
        raise SettingsError(
            f"{door.given(NVME + 'tenantMaxBytes', format_byte_count(nvme.tenant_max_bytes))} for one tenant is more "
            f"than {door.given(NVME + 'maxBytes', format_byte_count(nvme.max_bytes))} for all; "
            f"set it to {nvme.max_bytes} or less"
        )


def _check_redis(redis: RedisTierSettings, door: Door) -> None:
    if not redis.url:
        raise SettingsError(
            f"{door.name(REDIS + 'url')} is empty; {door.given(SHARED_TIER + 'type', 'redis')} needs it, "
            "e.g. redis://cache:6379/0"
        )
    try:
        endpoint = RedisEndpoint.from_url(redis.url)
    except ConfigError as error:
        raise connector_refusal(error, door) from error
    if redis.password_env is not None and redis.password_file is not None:
        raise SettingsError(
            f"{door.given(REDIS + 'passwordEnv', redis.password_env)} and "
            f"{door.given(REDIS + 'passwordFile', redis.password_file)} are both set; "
            "remove one (a file is read anew for each login, so a rotated password needs no restart)"
        )
    tls = redis.tls
    if tls != RedisTlsSettings() and not endpoint.tls:
        raise SettingsError(
            f"{door.name(REDIS + 'tls')} is set, but {door.given(REDIS + 'url', redis.url)} asks for no TLS; "
            "write rediss://..."
        )
    if (tls.certificate_file is None) != (tls.key_file is None):
        raise SettingsError(
            f"{door.given(REDIS + 'tls.certificateFile', tls.certificate_file)} and "
            f"{door.given(REDIS + 'tls.keyFile', tls.key_file)} belong together; set both or none"
        )
    if redis.payload_connections > redis.connections:
        raise SettingsError(
            f"{door.given(REDIS + 'payloadConnections', redis.payload_connections)} is more than "
            f"{door.given(REDIS + 'connections', redis.connections)}; raise the latter or lower the former"
        )


def _check_encryption(tier_type: str, encryption: EncryptionSettings, door: Door) -> None:
    if tier_type == "none":
        raise SettingsError(
            f"{door.name(ENCRYPTION[:-1])} is set, but {door.given(SHARED_TIER + 'type', 'none')}; "
            "it seals a shared tier: choose nvme or redis"
        )
    if not encryption.key_id or not encryption.key_id.isascii() or not encryption.key_id.isprintable():
        raise SettingsError(
            f"{door.given(ENCRYPTION + 'keyId', repr(encryption.key_id))} is not a name; use letters, digits and dashes"
        )
    if (encryption.key_file is None) == (encryption.key_env is None):
        raise SettingsError(
            f"{door.given(ENCRYPTION + 'keyFile', encryption.key_file)} and "
            f"{door.given(ENCRYPTION + 'keyEnv', encryption.key_env)}; "
            "set exactly one of them: where the key is read from"
        )
