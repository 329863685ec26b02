"""Values in combination: each render is valid on the oldest and newest Kubernetes and keeps the chart's promises.

Every pair of choices of two dimensions occurs in some combination; a fixed seed picks them, so failures repeat.
"""

import random
from itertools import combinations

import pytest
from chart.helm_binaries import helms
from chart.rendering import laid_over, nested, pod_spec, quantity_bytes, render, require_valid

FOLDER = {"path": "/models/Qwen3-8B"}
DIMENSIONS = {
    "devices": [nested("engine.accelerator.preset", name) for name in ("mindcluster", "cce", "hami", "cpu")]
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
            nested("redis", {"enabled": True, "existingSecret": {"name": "p"}}),
        ),
        nested(
            "engine.offload.sharedTier",
            {"type": "redis", "redis": {"url": "redis://r:6379", "existingSecret": {"name": "p", "usernameKey": "u"}}},
        ),
        *(
            nested(
                "engine.offload.sharedTier",
                {"type": "nvme", "nvme": {"maxBytes": "300GiB", "volume": {"type": kind, "claimName": "c"}}},
            )
            for kind in ("hostPath", "emptyDir", "perPodClaim", "sharedClaim", "existingClaim")
        ),
    ],
    "size": [
        {},
        nested("engine", {"replicas": 1, "tensorParallelSize": 4}),
        nested("engine.autoscaling", {"enabled": True, "maxReplicas": 3}),
        {
            "engines": {
                "a": {"model": {"servedName": "a"}},
                "b": {"model": {"servedName": "b"}, "replicas": 1, "port": 9000},
            }
        },
    ],
    "gateway": [
        {},
        nested(
            "gateway", {"replicas": 1, "service": {"type": "NodePort", "nodePort": 30001}, "rbac": {"create": True}}
        ),
        nested("gateway", {"autoscaling": {"enabled": True}, "ingress": {"enabled": True, "className": "nginx"}}),
        nested(
            "gateway",
            {
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
                "serviceAccount": {"create": False, "name": "own"},
            },
        ),
    ],
    "network": [
        {},
        {"networkPolicy": {"enabled": False}},
        {"networkPolicy": {"restrictEgress": True, "gatewayFrom": [{"podSelector": {}}]}},
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


def covering_array() -> list[dict[str, int]]:
    """Greedy: of some random rows, take the one with the most pairs not seen yet."""
    dice = random.Random(7)
    names = list(DIMENSIONS)
    missing = {
        (one, i, two, j)
        for one, two in combinations(names, 2)
        for i in range(len(DIMENSIONS[one]))
        for j in range(len(DIMENSIONS[two]))
    }
    rows = []
    while missing:
        candidates = [{name: dice.randrange(len(DIMENSIONS[name])) for name in names} for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        if pairs_of(best) & missing:
            missing -= pairs_of(best)
            rows.append(best)
    return rows


def pairs_of(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(one, row[one], two, row[two]) for one, two in combinations(DIMENSIONS, 2)}


ROWS = covering_array()


def test_matrix_is_large_enough():
    assert len(ROWS) >= 45


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_combination(number):
    row = ROWS[number]
    values = laid_over({}, *(DIMENSIONS[name][choice] for name, choice in row.items()))
    kubernetes = ("1.28", "1.36")[number % 2]

    rendered = render(values=values, kubernetes=kubernetes, helm=helms()[number // 2 % 2])

    require_valid(rendered, kubernetes)
    require_promises(rendered)


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
