"""Opens the backend of one configured tier."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from spillway_connector.config import NvmeTierConfig, S3TierConfig, TierConfig
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.layout_choice import Mode, suitable_mode, unused_layouts
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.tier import Tier

logger = logging.getLogger(__name__)


def open_tier(config: TierConfig, namespace: Namespace, payload_bytes: int) -> Tier:
    """The backend of one configured tier. A store that cannot be reached now is not an error: its breaker probes it."""
    if config.encryption is None:
        return _open_plain_tier(config, namespace, payload_bytes)
    # Imported only here: it needs the package `cryptography`, which an engine without encryption may lack.
    from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace

    wanted = config.encryption
    if wanted.key_file is not None:
        key = SealKey.from_file(wanted.key_id, Path(wanted.key_file))
    else:
        assert wanted.key_env is not None
        key = SealKey.from_environment(wanted.key_id, wanted.key_env)
    sealed = sealed_namespace(namespace, key)
    return SealedTier.of(_open_plain_tier(config, sealed, payload_bytes + SEAL_BYTES), sealed, payload_bytes, key)


def _open_plain_tier(config: TierConfig, namespace: Namespace, payload_bytes: int) -> Tier:
    if isinstance(config, NvmeTierConfig):
        kind: Callable[..., Tier] = FileTier
        if _layout_of(config) == "slab":
            kind = partial(SlabTier, page_cache=config.page_cache == "auto")
        return kind(
            namespace,
            payload_bytes,
            Path(config.path),
            max_bytes=config.max_bytes,
            ttl_seconds=config.ttl_seconds,
            tenant_max_bytes=config.tenant_max_bytes,
            transfers_at_once=max(1, config.limits.io_threads // 2),
        )
    if isinstance(config, S3TierConfig):
        # Imported here alone: obstore is a library of 15 MB that the other tiers do not need.
        from spillway_connector.tiers.s3.place import S3Place
        from spillway_connector.tiers.s3.tier import S3Tier

        return S3Tier(
            namespace,
            payload_bytes,
            S3Place.of(config),
            connections=config.connections,
            puts_per_second_max=config.puts_per_second_max,
            gets_per_second_max=config.gets_per_second_max,
        )
    # Imported here alone: redis-py takes 25 MB and half a second.
    from spillway_connector.tiers.redis.tier import RedisTier

    endpoint = RedisEndpoint.from_url(
        config.url,
        username=_secret(config.username_env),
        password=_secret(config.password_env),
        password_file=config.password_file,
        tls_ca_file=config.tls.ca_file,
        tls_certificate_file=config.tls.certificate_file,
        tls_key_file=config.tls.key_file,
    )
    return RedisTier(
        namespace,
        payload_bytes,
        endpoint,
        ttl_seconds=config.ttl_seconds,
        connections=config.connections,
        payload_connections=config.payload_connections,
        tenant_max_bytes=config.tenant_max_bytes,
    )


def _layout_of(config: NvmeTierConfig) -> Mode:
    """Choose one of the two layouts; the choice is logged, so that an operator can compare it with the disk."""
    mode: Mode
    folder = Path(config.path)
    if config.mode == "auto":
        mode, reason = suitable_mode(folder)
        logger.info("NVMe tier %s: layout %s: %s", config.path, mode, reason)
    else:
        mode = "slab" if config.mode == "slab" else "files"
        logger.info("NVMe tier %s: layout %s, as asked for", config.path, mode)
    others = unused_layouts(folder, mode)
    if others:
        logger.warning(
            "NVMe tier %s: it also holds blocks in the layout %s, which this engine neither uses nor removes; give "
            "another path, or empty the directory while no engine uses it",
            config.path,
            " and ".join(others),
        )
    return mode


def _secret(variable: str | None) -> str | None:
    """A secret from an environment variable, without line ends behind it. Raises ConfigError when the named environment
    variable is not set: an empty login is never meant."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"the environment variable {variable} is named for the Redis login, but it is not set")
    return os.environ[variable].rstrip("\r\n")
