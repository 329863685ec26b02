"""Values of the cases with real engines, each laid over values-cpu.yaml.

tests/chart/test_lane_values.py renders them, as most runs of the lane leave these cases out.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from cluster.helm import CHART, VERSION
from cluster.local_cluster import REAL_ENGINES_NODE
from cluster.valkey_password import SECRET
from cluster.values import CLIENT_READS_METRICS, MODEL, NO_CHECK, Values, over

TIER_FOLDER = Path("/var/tmp/spillway-lane-kv")  # of the node, which both pods share
TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
EMULATOR = "acl-emulator"  # a ConfigMap
DEVICE_BLOCKS = 33  # fewer than the prompts of a case on pretended devices need
VALUES_CPU: Values = yaml.safe_load((CHART / "values-cpu.yaml").read_text())


def ascend(mode: str, resource: str = "huawei.com/Ascend910") -> Values:
    """The model of values-cpu.yaml on the MindCluster preset, without its scheduler and its image."""
    engine = {
        "replicas": 1,
        "accelerator": {"preset": "mindcluster", "resourceName": resource},
        "schedulerName": "default-scheduler",
        "image": {"tag": f"{VERSION}-cpu"},
        "model": {"dtype": "float32"},
        "cpu": {"request": "100m"},
        "memory": {"limit": "6GiB", "processPerRank": "4GiB"},
        "lifecycle": {"selfCheckTimeoutSeconds": 600, "drainTimeoutSeconds": 10},
        # vLLM is the CPU build, which would choose another transport.
        "offload": {"batchMemcpy": mode, "transport": "npu", "sharedTier": {"type": "none"}},
        "deviceBlocks": DEVICE_BLOCKS,
        # What the engine service does itself for the CPU build where the preset is cpu. GiB of KV, at most.
        "extraArgs": ["--enforce-eager"],
        "extraEnv": {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        "extraEnvVars": [{"name": "PYTHONPATH", "value": "/emulator"}],
        "extraVolumes": [{"name": "emulator", "configMap": {"name": EMULATOR}}],
        "extraVolumeMounts": [
            {"name": "emulator", "mountPath": "/emulator", "readOnly": True},
            {"name": "emulator", "mountPath": TOOLKIT, "readOnly": True},
        ],
    }
    gateway = {"replicas": 1, "resources": {"requests": {"cpu": "50m"}}}
    return over(
        VALUES_CPU,
        {"engine": engine, "gateway": gateway, "redis": {"enabled": False}, **CLIENT_READS_METRICS, **NO_CHECK},
    )


def shared_tier(tier: str, replicas: int, secrets_revision: str = "") -> Values:
    """values-cpu.yaml but for the tier, requests that a small machine holds, and deadlines that a slow one meets."""
    shared = {
        "redis": {"type": "redis"},
        "nvme": {
            "type": "nvme",
            "nvme": {"maxBytes": "2GiB", "volume": {"type": "hostPath", "hostPath": str(TIER_FOLDER)}},
        },
    }[tier]
    patient = {"lookupTimeoutSeconds": 30, "loadTimeoutSeconds": 60, "storeTimeoutSeconds": 60}
    small = {
        "engine": {
            "replicas": replicas,
            "cpu": {"request": "100m"},
            **({"memory": {"pageCache": "256MiB"}} if tier == "nvme" else {}),
            "nodeSelector": {"kubernetes.io/hostname": REAL_ENGINES_NODE},
            # At this rate of prefill any load takes less time than prefill.
            "offload": {"sharedTier": {**shared, **patient}, "requestWaitSeconds": 60, "prefillTokensPerSecond": 10},
            "lifecycle": {"selfCheckTimeoutSeconds": 600},
        },
        "gateway": {"resources": {"requests": {"cpu": "50m"}}},
        "redis": {
            "enabled": tier == "redis",
            "existingSecret": {"name": SECRET if tier == "redis" else ""},
            "secretsRevision": secrets_revision,
            "image": {"registry": "", "repository": "valkey", "tag": "lane"},
            "cpu": {"request": "50m"},
        },
    }
    return over(over(VALUES_CPU, small), {**CLIENT_READS_METRICS, **NO_CHECK})


def apart() -> Values:
    """One prefill and one decode engine of one model over Redis, as `shared_tier` has two engines."""
    roles = {role: {"role": role, "model": {"servedName": MODEL}} for role in ("prefill", "decode")}
    # No bound of the gateway's ends a leg, however slow the machine is.
    terms = {"mode": "always", "uncachedTokensMin": 128, "handOverSecondsMax": 120, "prefillSecondsMax": 600}
    return over(shared_tier("redis", 1, secrets_revision="2"), {"engines": roles, "gateway": {"disaggregation": terms}})


def two_stages() -> Values:
    """Two models of the same weights: `stages`, two pipeline stages in two pods, and `alone`, an engine in one pod."""
    small = {
        "cpu": {"request": "100m"},
        "nodeSelector": {"kubernetes.io/hostname": REAL_ENGINES_NODE},
        "offload": {"enabled": False, "sharedTier": {"type": "none"}},
        "lifecycle": {"selfCheckTimeoutSeconds": 600, "drainTimeoutSeconds": 300},
        "replicas": 1,
    }
    groups = {
        "stages": {"model": {"servedName": "stages"}, "pipelineParallelSize": 2, "nodesPerReplica": 2},
        "alone": {"model": {"servedName": "alone"}},
    }
    gateway = {
        "replicas": 1,
        "index": {"bytesMax": "64MiB"},
        "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "2GiB"}},
    }
    values = {"engine": small, "engines": groups, "gateway": gateway, "redis": {"enabled": False}}
    return over(VALUES_CPU, {**values, **CLIENT_READS_METRICS, **NO_CHECK})
