"""Settings of the shared tier -> its entry of `secondary_tiers`, in the connector's own keys. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spillway_engine.tier_settings import EncryptionSettings, NvmeTierSettings, RedisTierSettings, SharedTierSettings


def secondary_tiers(tier: SharedTierSettings) -> list[dict[str, Any]]:
    """One dict as spillway_connector.config.parse_tier reads it; none for type `none`. What is not set is left out."""
    if tier.type == "none":
        return []
    own = _nvme(tier.nvme) if tier.type == "nvme" else _redis(tier.redis)
    limits = {
        "io_threads": tier.io_threads,
        "lookup_timeout_seconds": tier.lookup_timeout_seconds,
        "load_timeout_seconds": tier.load_timeout_seconds,
        "store_timeout_seconds": tier.store_timeout_seconds,
        "load_queue_bytes_max": tier.load_queue_bytes_max,
        "store_queue_bytes_max": tier.store_queue_bytes_max,
        "store_queue_seconds_max": tier.store_queue_seconds_max,
    }
    return [{"type": tier.type, **_given(own), **limits, **_encryption(tier.encryption)}]


def _nvme(nvme: NvmeTierSettings) -> dict[str, Any]:
    return asdict(nvme)


def _redis(redis: RedisTierSettings) -> dict[str, Any]:
    plain = asdict(redis)
    tls = plain.pop("tls")
    return plain | {f"tls_{key}": file for key, file in tls.items()}


def _encryption(encryption: EncryptionSettings | None) -> dict[str, Any]:
    return {} if encryption is None else {"encryption": _given(asdict(encryption))}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
