"""Every size among the values: Kubernetes' suffixes and spelt-out units become bytes; a wrong one is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import CHART, Render, RenderRefused, laid_over, nested, pod_spec, render
from size_cases import BYTES, REFUSED

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings
from spillway_engine.errors import SettingsError
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import engine_settings
from spillway_gateway.config.settings import GatewayConfig, parse_config
from spillway_gateway.errors import ConfigError

each_helm = pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
EXAMPLE = "write for example 512MiB, 64Gi, 1TB or a number of bytes"


def sizes(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Paths below `path` whose values are sizes by the schema."""
    if "512MiB, 64Gi" in schema.get("description", ""):
        yield path
    for key, inner in schema.get("properties", {}).items():
        yield from sizes(inner, f"{path}.{key}" if path else key)


SIZES = (*sizes(SCHEMA, ""), *sizes(SCHEMA["definitions"]["engine"], "engine"))
# Settings of two ways to size one thing, or read with one tier alone, are set together all the same: sizes come first.
OF_A_GATEWAY = (
    *("limits.bodyBytesMax", "limits.bodiesBytesMax", "limits.plainReplyBufferBytes", "limits.repliesBytesMax"),
    *("connections.headBytesMax", "connections.targetBytesMax", "index.bytesMax", "continuation.bytesMax"),
)
LEAST = {
    "engine.memory.pageCache": 0,
    "engine.memory.processPerRank": "512MiB",
    "redis.memory": "64MiB",
    **{f"gateway.{path}": "1KiB" for path in OF_A_GATEWAY},
}


def check(values: dict[str, Any]) -> list[str]:
    """Return the sentences of `spillway check`, one for each finding."""
    return [finding.sentence for finding in findings(values, Cluster())]


def everywhere(value: object, paths: tuple[str, ...] = SIZES) -> dict[str, Any]:
    return laid_over({}, *(nested(path, value) for path in paths))


def test_the_schema_names_the_sizes():
    assert len(SIZES) == len(set(SIZES)) == 33
    assert {"redis.memory", "engine.model.cache.sizeLimit", "gateway.index.bytesMax"} < set(SIZES)


def test_the_schema_leaves_every_size_to_the_parser():
    """A pattern of the schema could not say why, and would have to be the parser's grammar once more."""
    validator = jsonschema.Draft7Validator(SCHEMA)  # one for all: jsonschema.validate checks the schema each time
    for value in (*BYTES, *REFUSED):
        validator.validate({"redis": {"memory": value}, "engine": {"memory": {"limit": value}}})


@each_helm
@pytest.mark.parametrize("value", ["100m", "8Gx", -4, "9Ei"], ids=repr)
def test_what_is_no_size_of_a_pod_stops_the_render(helm, value):
    """Sizes that are only passed on are refused by `spillway check` and at the start, as the next tests show."""
    with pytest.raises(RenderRefused) as refused:
        render(values=nested("engine.memory.limit", value), helm=helm)

    assert f'engine.memory.limit: "{value}" is no size up to 8PiB; {EXAMPLE}' in str(refused.value)


def test_what_is_no_size_stops_the_start():
    offload = {"sharedTier": {"type": "nvme", "loadQueueBytesMax": "8Gx"}}
    rendered = render(values={"engine": {"offload": offload}, "gateway": {"limits": {"bodyBytesMax": "8Gx"}}})

    for read, name in (
        (engine_read, "engine.offload.sharedTier.loadQueueBytesMax"),
        (gateway_read, "limits.bodyBytesMax"),
    ):
        with pytest.raises((SettingsError, ConfigError), match=f"{name}: '8Gx' is no size; {EXAMPLE}"):
            read(rendered)


@pytest.mark.parametrize("value", [0, "0Gi"], ids=repr)
def test_nothing_is_given_no_bytes(value):
    """A Valkey with `maxmemory 0` has no bound, and a pod that requests 0 bytes is the first to be evicted."""
    given = f'"{value}"' if isinstance(value, str) else str(value)
    least = {path: LEAST.get(path, "1 byte") for path in SIZES}

    assert sorted(check(everywhere(value))) == sorted(
        f"{path}: {given} given, at least {needed} needed; {EXAMPLE}" for path, needed in least.items() if needed
    )


@pytest.mark.parametrize("value", ["100m", "8Gx", -4, "9Ei"], ids=repr)
def test_a_wrong_size_is_refused_at_every_setting_and_nothing_else_is_said(value):
    given = f'"{value}"' if isinstance(value, str) else str(value)
    reason = {**REFUSED, "8Gx": "is no size", "9Ei": "is 8 EiB or more"}[value]

    assert sorted(check(everywhere(value))) == sorted(f"{path}: {given} {reason}; {EXAMPLE}" for path in SIZES)


def test_sums_of_sizes_fit_into_64_bits():
    assert sorted(check(everywhere("9000Ti"))) == [
        f'{path}: "9000Ti" given, at most 8PiB needed; {EXAMPLE}' for path in sorted(SIZES)
    ]
    values = nested("engine.offload.numCpuBlocks", 10**15)
    assert any("1000000000000000 chunks of 18.0 MiB are more than 8 PiB; " in sentence for sentence in check(values))
    with pytest.raises(RenderRefused, match="numCpuBlocks: 1000000000000000 chunks given, at most 8PiB needed"):
        render(values=values)


def test_a_wrong_size_of_one_of_several_models_is_named():
    values = {"engines": {"a": {"memory": {"limit": "500m"}}, "b": {}}}

    assert check(values) == [f'engines.a.memory.limit: "500m" has a suffix for fractions of a byte; {EXAMPLE}']


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ("63MiB", f'"63MiB" given, at least 64MiB needed; {EXAMPLE}'),
        ("1e3", f'"1e3" given, at least 64MiB needed; {EXAMPLE}'),
        ("64MiB", "three quarters of 64MiB, 48.0 MiB, hold no chunk of 72.0 MiB; set it to 97Mi or more"),
    ],
)
def test_the_embedded_server_holds_a_chunk(memory, problem):
    offload = {"blocksPerChunk": 4, "sharedTier": {"type": "redis"}}
    values = {"redis": {"enabled": True, "memory": memory}, "engine": {"offload": offload}}

    assert check(values) == [f"redis.memory: {problem}"]
    assert check(laid_over(values, nested("redis.memory", "97Mi"))) == []


@each_helm
def test_sizes_become_bytes_wherever_they_are_read(helm):
    engine = {
        "memory": {"limit": "64G", "sharedMemory": "4.1e10", "processPerRank": "9e9"},
        "model": {"cache": {"sizeLimit": "80G"}},
        "offload": {
            "numCpuBlocks": None,
            "cpuBytes": ".03Ti",
            "sharedTier": {"type": "redis", "loadQueueBytesMax": "4G", "storeQueueBytesMax": 5e9},
        },
    }
    engine["offload"]["sharedTier"]["redis"] = {"tenantMaxBytes": "1.1 GiB"}
    gateway = {
        "resources": {"requests": {"memory": "1G"}, "limits": {"memory": "2000M"}},
        "limits": {"bodyBytesMax": "60MB", "bodiesBytesMax": "250M", "plainReplyBufferBytes": "+4Mi"},
        "connections": {"headBytesMax": "64k", "targetBytesMax": "8e3", "bodyBytesPerSecondMin": 65536},
        "index": {"bytesMax": "0.25GiB"},
    }

    rendered = render(
        values={"engine": engine, "gateway": gateway, "redis": {"enabled": True, "memory": "8G"}}, helm=helm
    )

    assert "maxmemory 6000000000\n" in rendered.one("ConfigMap", "redis")["data"]["valkey.conf"]
    assert memory(rendered, "redis") == {"requests": "7630Mi", "limits": "7630Mi"}
    assert memory(rendered, "gateway", "Deployment") == {"requests": "954Mi", "limits": "1908Mi"}
    assert memory(rendered, "engine") == {"requests": "61036Mi", "limits": "61036Mi"}
    volumes = volumes_of(rendered)
    assert volumes["hub"]["emptyDir"] == {"sizeLimit": "76294Mi"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "39101Mi"}
    offload = engine_read(rendered).offload
    assert offload.cpu_bytes_to_use == 32_985_348_834  # 0.03 x 2**40 = 32985348833.28
    tier = offload.shared_tier
    assert tier.redis.tenant_max_bytes == 1_181_116_007
    assert (tier.load_queue_bytes_max, tier.store_queue_bytes_max) == (4_000_000_000, 5_000_000_000)
    read = gateway_read(rendered)
    limits, connections = read.limits, read.connections
    assert (limits.body_bytes_max, limits.bodies_bytes_max) == (60_000_000, 250_000_000)
    assert limits.plain_reply_buffer_bytes == 4 << 20
    assert (connections.head_bytes_max, connections.target_bytes_max) == (64_000, 8_000)
    assert (connections.body_bytes_per_second_min, read.index.bytes_max) == (65_536, 1 << 28)


@each_helm
@pytest.mark.parametrize("kind", ["emptyDir", "perPodClaim", "sharedClaim"])
def test_the_size_of_a_volume_bounds_the_tier_on_it(helm, kind):
    nvme = {"volume": {"type": kind, "size": "500G"}, "tenantMaxBytes": "1T"}
    values = nested("engine.offload.sharedTier", {"type": "nvme", "nvme": nvme})

    [problem] = check(values)
    assert "tenantMaxBytes: 931.3 GiB for one tenant is more than maxBytes: 419.1 GiB" in problem
    nvme["tenantMaxBytes"] = "100G"
    rendered = render(values=values, helm=helm)
    store = engine_read(rendered).offload.shared_tier.nvme
    assert (store.max_bytes, store.tenant_max_bytes) == (450_000_000_000, 100_000_000_000)
    if kind == "emptyDir":
        assert volumes_of(rendered)["kv"]["emptyDir"] == {"sizeLimit": "476838Mi"}
    elif kind == "perPodClaim":
        [claim] = rendered.one("StatefulSet", "engine")["spec"]["volumeClaimTemplates"]
        assert claim["spec"]["resources"] == {"requests": {"storage": "476838Mi"}}
    else:
        claim = rendered.one("PersistentVolumeClaim")
        assert claim["spec"]["resources"] == {"requests": {"storage": "476838Mi"}}


def engine_read(rendered: Render) -> EngineSettings:
    return engine_settings(yaml.safe_load(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"]))


def gateway_read(rendered: Render) -> GatewayConfig:
    return parse_config(yaml.safe_load(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"]))


def memory(rendered: Render, component: str, kind: str = "StatefulSet") -> dict[str, str]:
    resources = pod_spec(rendered.one(kind, component))["containers"][0]["resources"]
    return {part: amounts["memory"] for part, amounts in resources.items()}


def volumes_of(rendered: Render) -> dict[str, Any]:
    return {volume["name"]: volume for volume in pod_spec(rendered.one("StatefulSet", "engine"))["volumes"]}
