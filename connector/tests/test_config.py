from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from spillway_connector.config import (
    ConnectorConfig,
    NvmeTierConfig,
    RedisTierConfig,
    RedisTls,
    S3TierConfig,
    parse_tier,
)
from spillway_connector.device.pinned import CHUNK_BYTES
from spillway_connector.errors import ConfigError
from spillway_connector.limits import DEFAULT_LIMITS
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.transfer.shared_tier import SharedTier


def test_defaults_and_vllm_keys_pass():
    config = ConnectorConfig.parse({"spec_name": "x", "secondary_tiers": [], "num_cpu_blocks": 64})
    assert config.num_cpu_blocks == 64
    assert config.blocks_per_chunk == 1
    assert config.batch_memcpy == "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of num_cpu_blocks"),
        ({"num_cpu_blocks": 1, "cpu_bytes_to_use": 1}, "exactly one of num_cpu_blocks"),
        ({"num_cpu_block": 1}, "did you mean 'num_cpu_blocks'"),
        ({"num_cpu_blocks": 1, "sync_load_budget_bytes": 1}, "sync_load_budget_bytes: unknown setting"),  # of vLLM 0.33
        ({"num_cpu_blocks": 0}, "whole number of at least 1"),
        ({"num_cpu_blocks": "64"}, "whole number of at least 1"),
        ({"num_cpu_blocks": True}, "whole number of at least 1"),
        ({"num_cpu_blocks": 1, "blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"num_cpu_blocks": 1, "eviction_policy": "fifo"}, "eviction_policy: 'fifo' given, arc or lru needed"),
        (
            {"num_cpu_blocks": 1, "block_size": 128},
            "block_size: a key of vLLM's own .* set blocks_per_chunk, which counts",
        ),
        ({"cpu_bytes_to_use_per_rank": 1}, "set cpu_bytes_to_use, which is of all ranks together"),
        ({"num_cpu_blocks": 1, "lazy_offload": True}, "lazy_offload: a key of .* beside the computation; remove it"),
        ({"num_cpu_blocks": 1, "batch_memcpy": True}, "batch_memcpy: True given, auto, off or on needed"),
        ({"num_cpu_blocks": 1, "max_copy_descriptors": 0}, "max_copy_descriptors: 0"),
        ({"num_cpu_blocks": 1, "transport": "tpu"}, "transport: 'tpu' given, auto, cpu, cuda or npu needed"),
        ({"num_cpu_blocks": 1, "promotion_in_flight_fraction": 1.5}, "above 0 and at most 1"),
        ({"num_cpu_blocks": 1, "request_wait_seconds": 0}, "above 0"),
        ({"num_cpu_blocks": 1, "generated_tokens": True}, "generated_tokens: True given, auto, off or on needed"),
        ({"num_cpu_blocks": 1, "offload_prompt_only": "no"}, "offload_prompt_only: 'no' given, true or false needed"),
        (
            {"num_cpu_blocks": 1, "offload_prompt_only": True, "generated_tokens": "on"},
            "offload_prompt_only: True contradicts generated_tokens: 'on'; remove one",
        ),
    ],
)
def test_a_wrong_setting_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        ConnectorConfig.parse(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, "auto"),
        ({"generated_tokens": "on"}, "on"),
        ({"generated_tokens": "off"}, "off"),
        ({"offload_prompt_only": True}, "off"),
        ({"offload_prompt_only": False}, "on"),
        ({"offload_prompt_only": True, "generated_tokens": "off"}, "off"),
    ],
)
def test_generated_tokens_have_a_name_of_vllm_too(given, meant):
    assert ConnectorConfig.parse({"num_cpu_blocks": 1, **given}).generated_tokens == meant


def test_tiers():
    nvme = parse_tier("nvme", {"path": "/data", "max_bytes": 10, "io_threads": 2})
    assert isinstance(nvme, NvmeTierConfig)
    assert (nvme.path, nvme.max_bytes, nvme.limits.io_threads) == ("/data", 10, 2)
    redis = parse_tier("redis", {"url": "rediss://h/0", "ttl_seconds": 5, "tls_ca_file": "/ca"})
    assert isinstance(redis, RedisTierConfig)
    assert (redis.tls, redis.limits.load_timeout_seconds) == (RedisTls(ca_file="/ca"), 2.0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nvme", {}, "path: missing"),
        ("redis", {"ttl_seconds": 5}, "url: missing"),
        ("nvme", {"path": "/d", "maxBytes": 1}, "did you mean 'max_bytes'"),
        ("nvme", {"path": "/d", "max_bytes": 0}, "secondary tier 'nvme': max_bytes: 0 given, at least 1 byte needed"),
        ("redis", {"url": "u", "connections": -1}, "connections"),
        ("redis", {"url": "u", "payload_connections": 0}, "payload_connections"),
        ("redis", {"url": "u", "password_env": "A", "password_file": "b"}, "both set"),
        ("nvme", {"path": "/d", "mode": "slabs"}, "mode: 'slabs' given, auto, files or slab needed"),
        ("nvme", {"path": "/d", "encryption": True}, "encryption: True given, a mapping"),
        (
            "nvme",
            {"path": "/d", "encryption": {"key_id": "a"}},
            "key_file: None and .*key_env: None; set exactly",
        ),
        ("nvme", {"path": "/d", "encryption": {"key_id": "a", "keyfile": "b"}}, "did you mean 'key_file'"),
        ("redis", {"url": "u", "load_timeout_seconds": "2"}, "load_timeout_seconds"),
        ("redis", {"url": "u", "breaker": {}}, "breaker: unknown setting"),
        ("redis", {"url": "u", "limits": {}}, "limits: unknown setting"),
        ("redis", {"url": "u", "tls": {"ca_file": "c"}}, "tls: unknown setting; use tls_ca_file, "),
        ("redis", {"url": "redis://h", "tls_ca_file": "c"}, "tls is set, but .*url: redis://h asks for no TLS"),
        ("redis", {"url": "u", "connections": 1, "payload_connections": 2}, "payload_connections: 2 is more than"),
        ("nvme", {"path": "/d", "max_bytes": 1, "tenant_max_bytes": 2}, "tenant_max_bytes: 2 B for one tenant is more"),
    ],
)
def test_a_wrong_tier_setting_is_named(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        parse_tier(kind, options)


def test_the_documentation_states_the_defaults_as_they_are():
    docs = Path(__file__).parents[2] / "docs"
    [row] = [line for line in (docs / "reliability.md").read_text().splitlines() if line.startswith("| stores pile up")]
    limits = DEFAULT_LIMITS
    assert f"queue bounds of {limits.store_queue_bytes_max >> 30} GiB and {limits.store_queue_seconds_max:g} s" in row
    [row] = [line for line in (docs / "operations/install.md").read_text().splitlines() if "207001" in line]
    assert f"in pieces of {CHUNK_BYTES >> 30} GiB" in row


def test_what_is_constructed_without_settings_has_the_defaults_of_the_settings():
    parameters = inspect.signature(RedisTier).parameters
    config = RedisTierConfig(url="redis://h")
    for name in ("ttl_seconds", "connections", "payload_connections"):
        assert parameters[name].default == getattr(config, name), name
    assert inspect.signature(SharedTier).parameters["limits"].default == config.limits == DEFAULT_LIMITS


def test_a_tier_below_another_is_read_with_bounds_of_its_own() -> None:
    below = {"type": "s3", "bucket": "kv-cache", "idle_seconds": 30, "lookup_timeout_seconds": 2}
    config = parse_tier("nvme", {"path": "/kv", "below": below})

    assert config.below is not None and config.below.idle_seconds == 30
    assert isinstance(config.below.tier, S3TierConfig) and config.below.tier.limits.lookup_timeout_seconds == 2
    assert config.limits.lookup_timeout_seconds != 2


@pytest.mark.parametrize(
    ("below", "message"),
    [
        (
            {"type": "nvme", "path": "/kv"},
            "is no tier of another type; write its settings with type: redis, s3",
        ),
        ("s3", "below: 's3' is no tier of another type"),
        ({"type": "s3", "bucket": "kv-cache", "idle_seconds": 0}, "idle_seconds: 0 given, seconds above 0 needed"),
        ({"type": "s3", "bucket": "kv-cache", "below": {}}, "below: unknown setting"),
    ],
)
def test_a_tier_below_that_is_none_is_refused(below: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tier("nvme", {"path": "/kv", "below": below})
