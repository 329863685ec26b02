"""Values in combination: each render is valid on a supported Kubernetes, in turns, and keeps the chart's promises.

Every pair of choices of two dimensions occurs in some combination, and as many triples as the number of rows allows; a
fixed seed picks them, so failures repeat.
"""

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import (
    Render,
    environment,
    laid_over,
    nested,
    pod_spec,
    quantity_bytes,
    render_many,
    require_valid,
)

from spillway_connector.config import ConnectorConfig, RedisTierConfig, parse_tier
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings
from spillway_engine.vllm_arguments import own_transfer_config
from spillway_gateway.__main__ import main as gateway_command
from spillway_gateway.config.settings import load_config

FOLDER = {"path": "/models/Qwen3-8B"}
DIMENSIONS = {
    "devices": [nested("engine.accelerator.preset", name) for name in ("mindcluster", "cce", "hami", "cuda", "cpu")]
    + [
        nested(
            "engine.accelerator",
            {"preset": "custom", "resourceName": "npu.example/card", "driverMounts": True, "roceMounts": True},
        )
    ],
    "model": [
        nested("engine.model.cache.sizeLimit", "80GiB"),
        nested(
            "engine.model", {**FOLDER, "volume": {"type": "existingClaim", "claimName": "m"}, "tokenizer": "volume"}
        ),
        nested(
            "engine.model",
            {**FOLDER, "volume": {"type": "nfs", "nfs": {"server": "s", "path": "/p"}}, "tokenizer": "volume"},
        ),
        nested("engine.model", {**FOLDER, "volume": {"type": "image"}}),
    ],
    "tier": [
        nested("engine.offload", {"enabled": False}),
        nested(
            "engine.offload", {"numCpuBlocks": None, "cpuBytes": "33GiB", "blocksPerChunk": 3, "batchMemcpy": "off"}
        ),
        laid_over(
            nested("engine.offload.sharedTier.type", "redis"),
            nested(
                "redis",
                {
                    "enabled": True,
                    "existingSecret": {"name": "p"},
                    "extraEnvVars": [{"name": "TZ", "value": "UTC"}],
                    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
                    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
                    "initContainers": [{"name": "i", "image": "i:1"}],
                    "sidecars": [{"name": "exporter", "image": "e:1"}],
                },
            ),
        ),
        nested(
            "engine.offload.sharedTier",
            {"type": "redis", "redis": {"url": "redis://r:6379", "existingSecret": {"name": "p", "usernameKey": "u"}}},
        ),
        nested(
            "engine.offload.sharedTier",
            {
                "type": "redis",
                "redis": {
                    "url": "rediss-sentinel://a:26379,b:26379/main?db=2",
                    "existingSecret": {"name": "p", "passwordAs": "env"},
                    "tls": {"caSecret": {"name": "ca"}, "clientSecret": {"name": "client"}},
                    "connections": 8,
                    "payloadConnections": 4,
                    "tenantMaxBytes": "10GiB",
                },
            },
        ),
        nested("engine.offload.sharedTier", {"type": "redis", "redis": {"url": "redis-cluster://a,b,c:7000"}}),
        *(
            nested(
                "engine.offload.sharedTier",
                {
                    "type": "nvme",
                    "nvme": {
                        "mode": mode,
                        "maxBytes": bound,
                        "volume": {"type": kind, **({"claimName": "c"} if kind == "existingClaim" else {})},
                    },
                },
            )
            for kind, mode, bound in (
                ("hostPath", "slab", "300GiB"),
                ("emptyDir", "auto", None),
                ("perPodClaim", "slab", None),
                ("sharedClaim", "files", None),
                ("existingClaim", "auto", "300GiB"),
            )
        ),
    ],
    "bounds": [
        {},
        nested("engine.offload.sharedTier", {"ioThreads": 12, "lookupTimeoutSeconds": 0.05, "storeQueueSecondsMax": 1}),
        nested(
            "engine.offload",
            {
                "prefillTokensPerSecond": 8000,
                "requestWaitSeconds": 1.5,
                "promotionInFlightFraction": 0.3,
                "promotionPerRequestFraction": 1,
                "promotionAheadFraction": 0,
                "sharedTier": {"loadQueueBytesMax": "20GiB", "nvme": {"ttlSeconds": 3600, "tenantMaxBytes": "50GiB"}},
            },
        ),
    ],
    "encryption": [{}, {"sealed": True}],
    "weights": [
        {},
        nested("engine.model", {"kvCacheDtype": "fp8", "quantization": "ascend"}),
        nested(
            "engine.lora",
            {
                "adapters": [{"name": "support", "path": "/adapters/support"}, {"name": "sql", "path": "owner/sql"}],
                "maxActive": 2,
                "volume": {"type": "existingClaim", "claimName": "adapters"},
            },
        ),
    ],
    "size": [
        {},
        nested("engine", {"replicas": 1, "tensorParallelSize": 4}),
        nested("engine.autoscaling", {"enabled": True, "maxReplicas": 3}),
        {
            "engines": {
                "a": {"model": {"servedName": "a"}},
                "b": {
                    "model": {"servedName": "b"},
                    "replicas": 1,
                    "port": 9000,
                    "lora": {"adapters": [], "volume": {"type": "none"}},  # names are served once
                },
            }
        },
    ],
    "gateway": [
        {},
        nested(
            "gateway",
            {"replicas": 1, "service": {"type": "NodePort", "nodePort": 30001}, "discovery": {"type": "static"}},
        ),
        nested(
            "gateway",
            {
                "autoscaling": {"enabled": True},
                "ingress": {
                    "enabled": True,
                    "className": "nginx",
                    "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},  # of a gateway with TLS
                },
            },
        ),
        nested(
            "gateway",
            {
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
                "serviceAccount": {"create": False, "name": "own"},
            },
        ),
    ],
    "keys": [
        {},
        laid_over(
            nested("gateway.auth", {"keysSecret": {"name": "k"}, "saltSecret": {"name": "s", "key": "salt"}}),
            nested("tests.apiKeySecret.name", "t"),
        ),
        laid_over(
            nested(
                "gateway.auth",
                {
                    "keysSecret": {"name": "k"},
                    "saltSecret": {"name": "s"},
                    "engineKeySecret": {"name": "e"},
                    "reloadSeconds": 0.5,
                },
            ),
            nested("engine.apiKeySecret.name", "e"),
        ),
    ],
    "calm": [
        {},
        nested(
            "gateway",
            {
                "health": {"metricsPeriodSeconds": 5},
                "routing": {"slowStartSeconds": 0, "sharedStoreTokensPerSecond": 1e6, "defaultBlockTokens": 64},
                "breaker": {"failures": 1, "openSeconds": 0.5, "openSecondsMax": 0.5},
                "admission": {"requestsPerEngineMax": 8, "waitingRequestsMax": 1, "lowWaitSeconds": 0.1},
                "audit": {"enabled": True},
                "reload": {"periodSeconds": 0},
            },
        ),
        nested(
            "gateway",
            {"opsPort": 9001, "tls": {"secret": {"name": "certificate", "privateKeyKey": "private.key"}}},
        ),
    ],
    "network": [
        {},
        {"networkPolicy": {"enabled": False}},
        {
            "networkPolicy": {
                "restrictEgress": True,
                "gatewayFrom": [{"podSelector": {}}],
                "engineEgress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
            }
        },
    ],
    "extras": [
        {},
        {
            "tests": {"enabled": False},
            "commonLabels": {"team": "x"},
            "commonAnnotations": {"a": "b"},
            "image": {"registry": "r.example", "pullSecrets": [{"name": "s"}]},
        },
        {"monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "alerts", "dashboards")}},
        nested(
            "engine",
            {
                "kvEvents": {"enabled": False},
                "lifecycle": {"preStopSeconds": 0},
                "topologySpread": {"enabled": True},
                "priorityClassName": "p",
                "extraVolumes": [{"name": "e", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "e", "mountPath": "/e"}],
                "sidecars": [{"name": "s", "image": "s:1"}],
                "initContainers": [{"name": "i", "image": "i:1"}],
                "podLabels": {"l": "v"},
            },
        ),
    ],
}


VERSIONS = [f"1.{minor}" for minor in range(28, 37)]
Choice = tuple[str, int]
LEAST_ROWS = 200
TURNS = 2 * len(VERSIONS)


def covering_array() -> list[dict[str, int]]:
    """Greedy: of some random rows, the one with the most pairs not seen yet; then, with the most such triples."""
    dice = random.Random(7)
    names = list(DIMENSIONS)
    choices = [(name, choice) for name in names for choice in range(len(DIMENSIONS[name]))]
    missing_pairs = {pair for pair in combinations(choices, 2) if pair[0][0] != pair[1][0]}
    seen_triples: set[tuple[Choice, ...]] = set()
    rows: list[dict[str, int]] = []
    while missing_pairs or len(rows) < LEAST_ROWS:
        candidates = [{name: dice.randrange(len(DIMENSIONS[name])) for name in names} for _ in range(40)]
        best = max(
            candidates,
            key=lambda row: len(subsets(row, 2) & missing_pairs if missing_pairs else subsets(row, 3) - seen_triples),
        )
        if not missing_pairs or subsets(best, 2) & missing_pairs:
            missing_pairs -= subsets(best, 2)
            seen_triples |= subsets(best, 3)
            rows.append(best)
    return rows


def subsets(row: dict[str, int], size: int) -> set[tuple[Choice, ...]]:
    return set(combinations(row.items(), size))


def values_of(row: dict[str, int]) -> dict[str, Any]:
    chosen = {name: DIMENSIONS[name][choice] for name, choice in row.items()}
    sealed = bool(chosen.pop("encryption"))
    values = laid_over({}, *chosen.values())
    offload = values.get("engine", {}).get("offload", {})
    # Bounds of a tier that is not chosen would be refused as settings that nothing reads.
    kind = offload.get("sharedTier", {}).get("type", "none")
    if kind == "none":
        offload.pop("sharedTier", None)
    elif kind == "redis":
        offload["sharedTier"].pop("nvme", None)
    if sealed and offload.get("sharedTier", {}).get("type", "none") != "none":
        key = {"enabled": True, "keyId": "2026", "keySecretName": "kv-key"}
        values = laid_over(values, nested("engine.offload.sharedTier.encryption", key))
    return values


ROWS = covering_array()


def test_matrix_is_large_enough():
    assert len(ROWS) >= LEAST_ROWS
    assert len({json.dumps(values_of(row), sort_keys=True) for row in ROWS}) >= LEAST_ROWS
    every_pair = {
        pair
        for pair in combinations([(name, choice) for name in DIMENSIONS for choice in range(len(DIMENSIONS[name]))], 2)
        if pair[0][0] != pair[1][0]
    }
    assert every_pair == set().union(*(subsets(row, 2) for row in ROWS))


@pytest.mark.parametrize("turn", range(TURNS))
def test_combinations(turn, tmp_path):
    """Each turn has a version of Kubernetes and a Helm of its own."""
    cases = {str(number): values_of(ROWS[number]) for number in range(turn, len(ROWS), TURNS)}
    kubernetes, helm = version_and_helm(turn)

    for rendered in render_many(cases, tmp_path / "spillway", helm, kubernetes).values():
        require_valid(rendered, kubernetes)
        require_promises(rendered)
        require_a_gateway_that_starts(rendered, tmp_path / "gateway.yaml")


def version_and_helm(turn: int) -> tuple[str, Helm]:
    return VERSIONS[turn % len(VERSIONS)], helms()[turn // len(VERSIONS)]


def require_promises(rendered) -> None:
    services = {item["metadata"]["name"] for item in rendered.of_kind("Service")}
    for item in rendered.objects:
        assert (
            item["metadata"]["namespace"] == "llm"
            and item["metadata"]["labels"]["app.kubernetes.io/instance"] == "chat"
        )
    for workload in [*rendered.of_kind("StatefulSet"), *rendered.of_kind("Deployment")]:
        pod = pod_spec(workload)
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])}
        claimed = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(set(volumes)) == len(volumes) and mounted == {*volumes, *claimed}
        paths = [(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        assert ":latest" not in pod["containers"][0]["image"]
    for workload in rendered.of_kind("StatefulSet", "engine"):
        pod = pod_spec(workload)
        assert workload["spec"]["serviceName"] in services
        shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")["emptyDir"]
        assert shared["medium"] == "Memory"
        assert quantity_bytes(shared["sizeLimit"]) < quantity_bytes(
            pod["containers"][0]["resources"]["limits"]["memory"]
        )
        require_an_engine_that_starts(rendered, workload)


def require_an_engine_that_starts(rendered: Render, workload: dict[str, Any]) -> None:
    """The engine service accepts the file, the connector what is made of it, and what they name is in the pod."""
    files = rendered.named("ConfigMap", workload["metadata"]["name"])["data"]
    settings = check_settings(read_settings(EngineSettings, yaml.safe_load(files["engine.yaml"])))
    if not settings.offload.enabled:
        return
    extra = own_transfer_config(settings)["kv_connector_extra_config"]
    ConnectorConfig.parse(extra)
    needed_files, needed_variables = set(), set()
    for options in extra["secondary_tiers"]:
        tier = parse_tier(options.pop("type"), options)
        if isinstance(tier, RedisTierConfig):
            needed_files |= {tier.tls.ca_file, tier.tls.certificate_file, tier.tls.key_file, tier.password_file}
            needed_variables |= {tier.username_env, tier.password_env}
        if tier.encryption is not None:
            needed_files.add(tier.encryption.key_file)
    assert secret_files(workload) == needed_files - {None}
    assert needed_variables - {None} <= set(environment(workload))


def require_a_gateway_that_starts(rendered: Render, file: Path) -> None:
    """The gateway's own check accepts the file, and the Secrets that it names are in the pod."""
    file.write_text(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])
    assert gateway_command(["--config", str(file), "--check"]) == 0
    config = load_config(file)
    needed = {config.auth.keys_file, config.auth.salt_secret_file, config.auth.engine_key_file}
    if config.auth.shared_limits is not None:
        needed.add(config.auth.shared_limits.tls_ca_file)
    if config.listen.tls is not None:
        needed |= {config.listen.tls.cert_file, config.listen.tls.key_file}
    assert secret_files(rendered.one("Deployment", "gateway")) == needed - {None}


def secret_files(workload: dict[str, Any]) -> set[str]:
    pod = pod_spec(workload)
    own = [volume for volume in pod["volumes"] if volume["name"] == "secrets"]  # not those of extraVolumes
    assert all(volume["projected"]["defaultMode"] == 0o400 for volume in own)
    return {
        f"{mount['mountPath']}/{item['path']}"
        for volume in own
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] == volume["name"] and mount["readOnly"]
    }
