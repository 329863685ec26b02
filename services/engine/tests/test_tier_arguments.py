"""The settings of a shared tier, as the connector itself reads what is made of them."""

import yaml

from spillway_connector.config import (
    EncryptionConfig,
    NvmeTierConfig,
    RedisTierConfig,
    RedisTls,
    S3TierConfig,
    parse_tier,
)
from spillway_connector.transfer.shared_tier import TransferLimits
from spillway_engine.settings_reader import read_settings
from spillway_engine.tier_settings import SharedTierSettings, check_shared_tier, secondary_tiers


def parsed(text: str) -> NvmeTierConfig | RedisTierConfig:
    settings = read_settings(SharedTierSettings, yaml.safe_load(text))
    check_shared_tier(settings)
    (entry,) = secondary_tiers(settings)
    return parse_tier(entry.pop("type"), entry)


LIMITS = """
    ioThreads: 9
    lookupTimeoutSeconds: 0.5
    loadTimeoutSeconds: 3
    storeTimeoutSeconds: 7.5
    loadQueueBytesMax: 16GiB
    storeQueueBytesMax: 512MiB
    storeQueueSecondsMax: 2
"""
PARSED_LIMITS = TransferLimits(9, 0.5, 3.0, 7.5, 16 << 30, 512 << 20, 2.0)


def test_no_tier_is_no_entry() -> None:
    assert secondary_tiers(SharedTierSettings()) == []


def test_every_setting_of_a_folder() -> None:
    assert parsed(f"""
    type: nvme
    nvme: {{path: /kv, maxBytes: 1TiB, mode: slab, ttlSeconds: 3600, tenantMaxBytes: 100GiB, pageCache: "off"}}
    encryption: {{keyId: "2026", keyFile: /keys/kv}}
    {LIMITS}""") == NvmeTierConfig(
        path="/kv",
        max_bytes=1 << 40,
        mode="slab",
        ttl_seconds=3600,
        tenant_max_bytes=100 << 30,
        page_cache="off",
        encryption=EncryptionConfig("2026", key_file="/keys/kv"),
        limits=PARSED_LIMITS,
    )


def test_every_setting_of_a_server() -> None:
    assert parsed(f"""
    type: redis
    redis:
      url: rediss-sentinel://a:1,b:2/primary?db=3
      usernameEnv: U
      passwordFile: /secrets/password
      tls: {{caFile: /ca, certificateFile: /crt, keyFile: /key}}
      ttlSeconds: 60
      connections: 8
      payloadConnections: 2
      tenantMaxBytes: 5GiB
    encryption: {{keyId: a, keyEnv: KEY}}
    {LIMITS}""") == RedisTierConfig(
        url="rediss-sentinel://a:1,b:2/primary?db=3",
        username_env="U",
        password_file="/secrets/password",
        tls=RedisTls("/ca", "/crt", "/key"),
        ttl_seconds=60,
        connections=8,
        payload_connections=2,
        tenant_max_bytes=5 << 30,
        encryption=EncryptionConfig("a", key_env="KEY"),
        limits=PARSED_LIMITS,
    )


def test_a_password_by_variable() -> None:
    config = parsed("{type: redis, redis: {url: 'redis://h', passwordEnv: P}}")

    assert config == RedisTierConfig(url="redis://h", password_env="P")


def test_defaults_are_those_of_the_connector() -> None:
    assert parsed("{type: nvme, nvme: {path: /kv}}") == NvmeTierConfig(path="/kv")
    assert parsed("{type: redis, redis: {url: 'redis://h'}}") == RedisTierConfig(url="redis://h")


def test_a_tier_below_has_the_store_of_its_section_and_bounds_of_its_own() -> None:
    config = parsed(f"""
    type: nvme
    nvme: {{path: /kv}}
    s3: {{bucket: kv-cache, prefix: chat/}}
    encryption: {{keyId: "2026", keyFile: /keys/kv}}
    below:
        type: s3
        idleSeconds: 30
        {LIMITS.replace("    ", "        ").strip()}""")

    assert isinstance(config, NvmeTierConfig) and config.limits == TransferLimits()
    assert config.below is not None and config.below.idle_seconds == 30
    assert config.below.tier == S3TierConfig(
        bucket="kv-cache",
        prefix="chat/",
        encryption=EncryptionConfig("2026", key_file="/keys/kv"),
        limits=PARSED_LIMITS,
    )
