"""Values of the lane: small pods that two cores can hold, otherwise what an operator would write."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]
MODEL = "smollm2-135m-instruct"
OPERATIONS_PORT = 8001  # the default of gateway.opsPort
GATEWAY_DRAIN_SECONDS = 20
ENGINE_DRAIN_SECONDS = 20
DRIVER = "ascend-driver"  # a ConfigMap
CLIENT_LABELS = {"lane": "client"}
# The lane's client also reads what Prometheus may read; the chart's policies are enforced.
CLIENT_READS_METRICS: Values = {"networkPolicy": {"prometheusFrom": [{"podSelector": {"matchLabels": CLIENT_LABELS}}]}}
# A case of its own runs the hook; the others do without a Job before each of their upgrades.
NO_CHECK: Values = {"checks": {"hook": False}}
# What KEDA's own definition declares, as far as the API server needs it: nothing acts on it here.
SCALED_OBJECTS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects", "singular": "scaledobject"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            }
        ],
    },
}

_SIMULATED: Values = {
    "engine": {
        "replicas": 2,
        "accelerator": {"preset": "cpu"},
        "image": {"repository": "spillway-engine-simulated", "tag": "lane"},
        "model": {
            "path": f"/opt/spillway/models/{MODEL}",
            "maxLength": 2048,
            "volume": {"type": "image"},
            "shape": {"weightBytes": "1MiB"},
        },
        "deviceBlocks": 33,
        "offload": {"numCpuBlocks": 32, "sharedTier": {"type": "none"}},
        "memory": {"limit": "512MiB", "force": True},
        "cpu": {"request": "50m"},
        "topologySpread": {"enabled": True},
        "lifecycle": {
            "startupTimeoutSeconds": 120,
            "drainDelaySeconds": 3,
            "drainTimeoutSeconds": ENGINE_DRAIN_SECONDS,
            "selfCheck": "off",
        },
    },
    "gateway": {
        "replicas": 2,
        "timeouts": {"connectSeconds": 1},
        "lifecycle": {"preStopSeconds": 3, "drainTimeoutSeconds": GATEWAY_DRAIN_SECONDS},
        "index": {"bytesMax": "64MiB"},
        "resources": {"requests": {"cpu": "50m", "memory": "128MiB"}, "limits": {"memory": "1536MiB"}},
    },
    "redis": {
        "image": {"registry": "", "repository": "valkey", "tag": "lane"},
        "memory": "256MiB",
        "cpu": {"request": "50m"},
    },
    **CLIENT_READS_METRICS,
    **NO_CHECK,
}


def simulated(**fields: Mapping[str, Any]) -> Values:
    """Engines without a model: for routing, lifecycle and discovery."""
    return over(_SIMULATED, fields)


def simulated_ascend() -> Values:
    """One such engine on the MindCluster preset, in the image that the chart asks for there, without its scheduler."""
    engine = {
        "replicas": 1,
        "accelerator": {"preset": "mindcluster"},
        "schedulerName": "default-scheduler",
        "image": {"repository": "spillway-engine", "tag": ""},
        # The engine service counts what vLLM itself takes on an NPU; a simulator uses a tenth of it.
        "memory": {"limit": "3GiB"},
        # On a node ascend-docker-runtime brings the driver's files.
        "extraVolumes": [{"name": "driver", "configMap": {"name": DRIVER}}],
        "extraVolumeMounts": [{"name": "driver", "mountPath": "/usr/local/Ascend/driver", "readOnly": True}],
    }
    return over(_SIMULATED, {"engine": engine, "gateway": {"replicas": 1}})


def simulated_over_two_pods(**engine: Any) -> Values:
    """Replicas of two such engine pods each, with one engine core over both, which runs without offload."""
    split = {"nodesPerReplica": 2, "pipelineParallelSize": 2, "offload": {"enabled": False}}
    return simulated(engine={**split, **engine})


def over(base: Mapping[str, Any], fields: Mapping[str, Any]) -> Values:
    """`base` with `fields` laid over it, section by section; neither is touched."""
    merged = copy.deepcopy(dict(base))
    for name, value in fields.items():
        mine = merged.get(name)
        both = isinstance(mine, dict) and isinstance(value, Mapping)
        merged[name] = over(mine, value) if both else copy.deepcopy(value)
    return merged
