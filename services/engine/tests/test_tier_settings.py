"""Settings of a shared tier, and the message of each contradiction."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.config import S3TierConfig, parse_tier
from spillway_engine.chart_keys import settings_tree
from spillway_engine.errors import SettingsError
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings
from spillway_engine.tier_settings import secondary_tiers


def checked(tier: Any, **offload: Any) -> EngineSettings:
    tree = {"model": {"path": "/m"}, "offload": {"numCpuBlocks": 64, **offload, "sharedTier": tier}}
    return check_settings(read_settings(EngineSettings, tree))


REFUSED = {
    "nvme without a folder": ("type: nvme", "nvme.path: '' is no absolute folder"),
    "unknown layout": ("{type: nvme, nvme: {path: /kv, mode: slabs}}", "'slabs' given, auto, files or slab needed"),
    "a share larger than the whole": (
        "{type: nvme, nvme: {path: /kv, maxBytes: 1GiB, tenantMaxBytes: 2GiB}}",
        "nvme.tenantMaxBytes: 2.0 GiB for one tenant is more than offload.sharedTier.nvme.maxBytes: 1.0 GiB for all",
    ),
    "blocks that live for no time": (
        "{type: nvme, nvme: {path: /kv, ttlSeconds: 0}}",
        "nvme.ttlSeconds: 0 given, a whole ",
    ),
    "redis without a server": ("type: redis", "redis.url is empty"),
    "credentials in the address": ("{type: redis, redis: {url: 'redis://u:p@h:1/0'}}", "redis.url holds credentials"),
    "credentials of a tier that is not in use": (
        "{type: none, redis: {url: 'redis://u:p@h:1/0'}}",
        "redis.url holds credentials",
    ),
    "a tier below of the same type": (
        "{type: nvme, nvme: {path: /kv}, below: {type: nvme}}",
        "below.type: nvme is the type of the tier above it, too",
    ),
    "a tier below none": ("{below: {type: s3}, s3: {bucket: kv-cache}}", "below.type: s3, but "),
    "a bucket below without a name": (
        "{type: nvme, nvme: {path: /kv}, below: {type: s3}}",
        "s3.bucket: '' names no bucket",
    ),
    "a bucket without a name": ("type: s3", "s3.bucket: '' names no bucket"),
    "a bucket with capitals": ("{type: s3, s3: {bucket: UPPER}}", "names no bucket"),
    "a prefix that runs into names": (
        "{type: s3, s3: {bucket: kv-cache, prefix: chat}}",
        "s3.prefix: 'chat' is none; use letters",
    ),
    "an endpoint without a scheme": (
        "{type: s3, s3: {bucket: kv-cache, endpoint: 'store:9000'}}",
        "s3.endpoint: no address without credentials and path was given; write https://host:port",
    ),
    "an authority for a plain endpoint": (
        "{type: s3, s3: {bucket: kv-cache, endpoint: 'http://store', caFile: /ca}}",
        "s3.caFile: /ca, but offload.sharedTier.s3.endpoint: http://store asks for no TLS",
    ),
    "credentials in an endpoint": (
        "{type: none, s3: {endpoint: 'https://id:pw@store'}}",
        "s3.endpoint holds credentials",
    ),
    "another protocol": (
        "{type: redis, redis: {url: 'http://h:1'}}",
        "offload.sharedTier.redis.url: 'http://h:1' is not understood; use redis://HOST:PORT/DB, redis-sentinel://",
    ),
    "sentinel without a service": ("{type: redis, redis: {url: 'redis-sentinel://h:1'}}", "is not understood"),
    "password from two places": (
        "{type: redis, redis: {url: 'redis://h', passwordEnv: P, passwordFile: /p}}",
        "passwordEnv: P and offload.sharedTier.redis.passwordFile: /p are both set; remove one",
    ),
    "certificates for a plain connection": (
        "{type: redis, redis: {url: 'redis://h:1/0', tls: {caFile: /ca}}}",
        "redis.tls is set, but offload.sharedTier.redis.url: redis://h:1/0 asks for no TLS; write rediss://",
    ),
    "a certificate without its key": (
        "{type: redis, redis: {url: 'rediss://h:1/0', tls: {certificateFile: /c}}}",
        "certificateFile: /c and offload.sharedTier.redis.tls.keyFile: None belong together",
    ),
    "more lanes than connections": (
        "{type: redis, redis: {url: 'redis://h', connections: 2, payloadConnections: 3}}",
        "redis.payloadConnections: 3 is more than offload.sharedTier.redis.connections: 2",
    ),
    "no thread": (
        "{type: nvme, nvme: {path: /kv}, ioThreads: 0}",
        "sharedTier.ioThreads: 0 given, a ",
    ),
    "ioThreads below nvme": ("{type: nvme, nvme: {path: /kv, ioThreads: 4}}", "nvme.ioThreads: unknown setting"),
    "encryption of nothing": (
        "{type: none, encryption: {keyId: a, keyFile: /k}}",
        "encryption is set, but offload.sharedTier.type: none",
    ),
    "encryption without a name": (
        "{type: nvme, nvme: {path: /kv}, encryption: {keyFile: /k}}",
        "offload.sharedTier.encryption.keyId: missing; add it to",
    ),
    "encryption with a strange name": (
        "{type: nvme, nvme: {path: /kv}, encryption: {keyId: schlüssel, keyFile: /k}}",
        "encryption.keyId: 'schlüssel' is not a name",
    ),
    "encryption without a key": (
        "{type: nvme, nvme: {path: /kv}, encryption: {keyId: a}}",
        "keyFile: None and offload.sharedTier.encryption.keyEnv: None; set exactly one of them",
    ),
    "encryption with two keys": (
        "{type: nvme, nvme: {path: /kv}, encryption: {keyId: a, keyFile: /k, keyEnv: K}}",
        "keyFile: /k and offload.sharedTier.encryption.keyEnv: K; set exactly one of them",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_refusal_names_the_setting_and_the_remedy(mistake: str) -> None:
    text, message = REFUSED[mistake]
    with pytest.raises(SettingsError) as refused:
        checked(yaml.safe_load(f"{{{text}}}" if not text.startswith("{") else text))

    assert message in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://h:6380/2",
        "redis-sentinel://a:26379,b/primary?db=1",
        "rediss-cluster://a:1,b:2",
        "unix:///run/redis.sock?db=3",
    ],
)
def test_every_form_of_address_that_the_connector_knows(url: str) -> None:
    assert checked({"type": "redis", "redis": {"url": url}}).offload.shared_tier.redis.url == url


def test_a_tier_beside_disabled_offload_is_left_alone() -> None:
    """`--set offload.enabled=false` measures without it, whatever else the file says."""
    assert not checked({"type": "redis"}, enabled=False).offload.enabled


@pytest.mark.parametrize("key", ["password", "aws_secret_access_key", "apiKey"])
def test_further_tiers_carry_no_secret(key: str) -> None:
    with pytest.raises(SettingsError, match=rf"offload.extraTiers\[1\].{key} would show a secret"):
        checked({}, extraTiers=[{"type": "fs"}, {"type": "obj", key: "hunter2"}])


def test_further_tiers_may_name_where_a_secret_is() -> None:
    assert checked({}, extraTiers=[{"type": "obj", "password_env": "P", "secret_file": "/s"}]).offload.extra_tiers


@given(
    st.fixed_dictionaries(
        {"type": st.just("nvme"), "ioThreads": st.integers(1, 64), "storeQueueSecondsMax": st.floats(0.001, 1e6)},
        optional={
            "nvme": st.fixed_dictionaries(
                {"path": st.just("/kv"), "mode": st.sampled_from(["files", "slab", "auto"])},
                optional={"ttlSeconds": st.integers(1, 10**9)},
            ),
            "encryption": st.just({"keyId": "a", "keyEnv": "K"}),
        },
    )
)
def test_every_setting_survives_the_way_out_and_back(tier: dict[str, Any]) -> None:
    tree = {"model": {"path": "/m"}, "offload": {"numCpuBlocks": 64, "sharedTier": tier}}
    settings = read_settings(EngineSettings, tree)

    assert read_settings(EngineSettings, settings_tree(settings)) == settings


def test_a_bucket_becomes_a_tier_of_the_connector() -> None:
    tree = {"type": "s3", "s3": {"bucket": "kv-cache", "prefix": "chat/", "caFile": "/ca"}}
    [tier] = secondary_tiers(checked(tree).offload.shared_tier)
    assert "endpoint" not in tier
    parsed = parse_tier(tier.pop("type"), tier)
    assert isinstance(parsed, S3TierConfig)
    assert (parsed.bucket, parsed.prefix, parsed.ca_file) == ("kv-cache", "chat/", "/ca")
    assert (parsed.region, parsed.path_style, parsed.connections) == ("us-east-1", True, 32)
